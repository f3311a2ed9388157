"""`rlmq samples`: best, worst and random samples of a step, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmq.buffer.recording import Recording
from rlmq.common.columns import arrow_schema
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.flow import sample_columns, sample_flow
from rlmq.common.run_folder import RunFolder
from rlmq.consumers.samples_view import show_samples

SCHEMA = arrow_schema(sample_columns(sample_flow(["correct", "brevity"])))


def sample(number: int, reward: float | None, step: int = 1, **more: Any) -> dict[str, Any]:
    row = dict.fromkeys(SCHEMA.names)
    return {
        **row,
        "sample_id": f"train-{step:06d}-0000-{number:02d}",
        "group_id": f"train-{step:06d}-0000",
        "step": step,
        "source": "train",
        "prompt_ids": [1, 2, 3],
        "prompt_text": f"prompt {number}",
        "record": "{}",
        "response_ids": [4, 5],
        "response_text": f"response {number}",
        "policy_versions": [0, 0],
        "truncated": False,
        "reward": reward,
        "reward.correct": reward,
        "reward.brevity": None,
        "advantages": None if reward is None else [0.5, 0.5],
        **more,
    }


def write(run: RunFolder, name: str, *rows: dict[str, Any]) -> None:
    run.samples.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), run.samples / name)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "demo-1")


def picks(capsys: pytest.CaptureFixture[str], run: RunFolder, **options: Any) -> list[tuple[str, str]]:
    show_samples(run, as_json=True, **options)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(line["pick"], line["sample_id"][-2:]) for line in lines]


def test_best_worst_and_random_are_of_the_newest_step(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "train-000001-0000.parquet", sample(9, 99.0))
    write(run, "train-000002-0000.parquet", *[sample(i, float(i), step=2) for i in range(6)])

    found = picks(capsys, run, best=2, worst=1, random=1)

    assert found[:3] == [("best", "05"), ("best", "04"), ("worst", "00")]
    assert found[3][0] == "random"
    assert found[3][1] in ("01", "02", "03")


def test_the_random_choice_repeats_with_its_seed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "train-000001-0000.parquet", *[sample(i, 0.0) for i in range(50)])

    first, second, other = (picks(capsys, run, best=0, worst=0, random=5, seed=s) for s in (1, 1, 2))

    assert first == second
    assert first != other
    assert len(first) == 5


def test_a_sample_is_shown_once_when_there_are_few(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "train-000001-0000.parquet", sample(0, 1.0), sample(1, None))

    assert picks(capsys, run, best=3, worst=3, random=3) == [("best", "00"), ("random", "01")]


def test_parts_and_redelivered_rows_are_read_once_and_the_trained_copy_wins(run: RunFolder) -> None:
    write(run, "train-000001-0000.parquet", sample(0, 1.0, advantages=None), sample(1, 2.0))
    write(run, "train-000001-0001.parquet", sample(0, 1.0), sample(2, 3.0))
    write(run, "train-000001-0002.parquet", sample(0, 1.0, advantages=None))

    rows = Recording(run.samples).read(steps=[1]).to_pylist()

    assert [row["sample_id"][-2:] for row in rows] == ["00", "01", "02"]
    assert rows[0]["advantages"] == [0.5, 0.5]


def test_text_shows_what_a_reader_needs(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    write(run, "train-000001-0000.parquet", sample(0, 0.25, policy_versions=[3, 4], truncated=True))

    show_samples(run, table="train", step=1, best=1, worst=0, random=0)

    text = capsys.readouterr().out
    for words in (
        "demo-1, train, step 1: 1 samples, mean reward 0.250",
        "prompt 0",
        "response 0",
        "reward 0.25 (correct 0.25, brevity –)",
        "policy version 3 to 4",
        "3 + 2 tokens",
        "truncated",
    ):
        assert words in text


def test_markup_and_control_characters_in_a_response_are_harmless(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, "train-000001-0000.parquet", sample(0, 1.0, response_text="[red]x[/red] [/] \x1b[2J\x07\r"))

    show_samples(run, best=1, worst=0, random=0)

    text = capsys.readouterr().out
    assert "[red]x[/red] [/]" in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text


def test_a_row_without_response_or_verdict_is_shown_as_such(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        run,
        "train-000001-0000.parquet",
        sample(0, None, response_text=None, response_ids=None, policy_versions=None, truncated=None),
    )

    show_samples(run)

    text = capsys.readouterr().out
    assert "no verdict" in text
    assert "(no response)" in text


def test_no_samples_is_one_clear_message(run: RunFolder) -> None:
    with pytest.raises(UsageError, match=r"samples of run demo-1: got no eval samples in .*samples, expected"):
        show_samples(run, table="eval")


def test_an_unknown_step_names_those_that_there_are(run: RunFolder) -> None:
    for step in (1, 2, 3, 7):
        write(run, f"train-{step:06d}-0000.parquet", sample(0, 1.0, step=step))

    with pytest.raises(UsageError, match=r"got no rows of table train and steps \[5\], expected steps 1 to 3, 7"):
        show_samples(run, step=5)


def test_a_damaged_file_is_named(run: RunFolder) -> None:
    run.samples.mkdir(parents=True)
    (run.samples / "train-000001-0000.parquet").write_bytes(b"not parquet at all")

    with pytest.raises(IntegrityError, match=r"train-000001-0000\.parquet.*expected a Parquet file"):
        show_samples(run)


def test_half_written_and_foreign_files_are_not_samples(run: RunFolder) -> None:
    write(run, "train-000001-0000.parquet", sample(0, 1.0))
    write(run, ".train-000002.123.tmp", sample(0, 1.0))
    write(run, "train-x.parquet", sample(0, 1.0))
    write(run, "eval-000004.parquet", sample(0, 1.0))

    found = [(one.name, one.first_step) for one in Recording(run.samples).segments("train")]
    assert found == [("train-000001-0000.parquet", 1)]
    assert [one.first_step for one in Recording(run.samples).segments("eval")] == [4]
