"""What a replay reads and leaves out; whole replays are in tests/integration/test_lab.py."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch

from rlmq.buffer.recording import RecordingWriter
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.run_folder import RunFolder
from rlmq.consumers.replay import Change, RecordedRows, cosine, kept

ROWS = pa.record_batch(
    {
        "sample_id": ["a", "b", "c", "d"],
        "reward": [1.0, 2.0, None, 4.0],
        "policy_versions": [[5, 5], [4, 5], [5], []],
    }
)


def test_rows_older_than_the_bound_and_rows_without_a_reward_are_left_out() -> None:
    assert kept(ROWS, 6, Change())["sample_id"].to_pylist() == ["a", "b", "d"]
    assert kept(ROWS, 6, Change(max_staleness=1))["sample_id"].to_pylist() == ["a", "b", "d"]
    assert kept(ROWS, 6, Change(max_staleness=0))["sample_id"].to_pylist() == ["a", "d"]
    changed = kept(ROWS, 6, Change({"a": 0.5, "b": None, "c": 3.0}, max_staleness=0))
    assert changed.select(["sample_id", "reward"]).to_pylist() == [
        {"sample_id": "a", "reward": 0.5},
        {"sample_id": "c", "reward": 3.0},
    ]
    with pytest.raises(
        UsageError, match=r"none of 2 rows left, expected rows with a reward, at most 0 versions old"
    ):
        kept(ROWS.slice(1, 2), 6, Change(max_staleness=0))


def test_rows_come_in_the_order_of_their_ids_wherever_they_are_recorded(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r-1")
    writer = RecordingWriter(run.samples)
    for step in (1, 2):
        ids = [f"train-{step:06d}-0000-{member:02d}" for member in range(3)]
        values = pa.array([[step, member] for member in range(3)], pa.list_(pa.int32()))
        writer.add(
            "train", step, pa.table({"sample_id": ids, "step": pa.array([step] * 3), "response_ids": values})
        )
    ids = ["train-000002-0000-01", "train-000001-0000-02", "train-000002-0000-00"]
    found = RecordedRows(run).of("train", ids, ("sample_id", "response_ids"))
    assert found["sample_id"].to_pylist() == ids
    assert found["response_ids"].to_pylist() == [[2, 1], [1, 2], [2, 0]]
    # a row that was admitted in another step than its name says
    values = pa.array([[7]], pa.list_(pa.int32()))
    late = pa.table({"sample_id": ["train-000002-0009-00"], "step": [7], "response_ids": values})
    writer.add("train", 7, late)
    assert RecordedRows(run).of("train", ["train-000002-0009-00"], ("response_ids",)).num_rows == 1
    with pytest.raises(IntegrityError, match="no row train-000001-0000-03"):
        RecordedRows(run).of("train", ["train-000001-0000-03"], ("sample_id",))
    with pytest.raises(UsageError, match="no column values"):
        RecordedRows(run).of("train", ids, ("sample_id", "values"))


def test_the_cosine_is_of_all_tensors_as_one_vector() -> None:
    a, b = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])], [torch.tensor([0.0, 1.0]), torch.tensor([[2.0]])]
    assert cosine(a, b) == pytest.approx(8.0 / (5.0 * 5.0**0.5))
    assert cosine(a, a) == pytest.approx(1.0)
