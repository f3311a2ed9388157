"""Groups of recordings as rows of a step, and rewards of recorded rows by other functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rlmq.buffer.recording import RecordingWriter
from rlmq.common.columns import arrow_schema
from rlmq.common.errors import UsageError
from rlmq.common.flow import flow_of
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.producers.prompts import recorded_groups
from rlmq.producers.rescoring import rescore

RECIPES = Path(__file__).parents[3] / "recipes"


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe(RECIPES / "tiny.yaml", ("data.eval=null", "data.recorded=groups", *overrides)).recipe


def record(place: Path, groups: dict[str, list[str]], *, step: int = 1, ends: str = "trained") -> None:
    """A recording of these responses by group, all admitted in step 1 and trained in `step`."""
    schema = arrow_schema(flow_of(recipe_of())[0].writes)
    rows: list[dict[str, Any]] = [
        {
            **dict.fromkeys(schema.names),
            "sample_id": f"train-000001-{group}-{member:02d}",
            "group_id": f"train-000001-{group}",
            "step": 1,
            "source": "train",
            "prompt_ids": [1],
            "prompt_text": "p",
            "record": '{"prompt": "p"}',
            "response_ids": [5, 6],
            "response_text": text,
            "rollout_logprobs": [-0.25, -1.5],
            "loss_mask": [True, True],
            "policy_versions": [0, 0],
            "turns": [0, 0],
            "truncated": False,
            "reward": float(len(text)),
            "reward.letters": float(len(text)),
        }
        for group, texts in groups.items()
        for member, text in enumerate(texts)
    ]
    table = pa.Table.from_pylist(rows, schema=schema)
    told = {"end_state": [ends] * len(rows), "end_step": [step] * len(rows)}
    for name, values in told.items():
        table = table.append_column(name, pa.array(values))
    RecordingWriter(place).add("train", 1, table)


def test_groups_come_under_the_names_of_their_step_with_all_that_was_recorded(tmp_path: Path) -> None:
    record(tmp_path / "a", {"0000": ["x", "yy"], "0001": ["zzz", ""]})
    record(tmp_path / "b", {"0000": ["v", "w", "u"]})
    recipe = recipe_of('data.train={"a": "a", "b": "b"}')
    recorded = recorded_groups(recipe, tmp_path)

    chunks = recorded.chunks(4, [2, 0, 1], most_rows=64)

    assert [prompt.source for prompt in recorded.prompts.prompts] == ["a", "a", "b"]
    assert [chunk.num_rows for chunk in chunks] == [3, 4]  # groups of one size go together
    rows = [row for chunk in chunks for row in chunk.to_pylist()]
    names = ["0000-00", "0000-01", "0000-02", "0001-00", "0001-01", "0002-00", "0002-01"]
    assert [row["sample_id"] for row in rows] == [f"train-000004-{name}" for name in names]
    assert [row["response_text"] for row in rows] == ["v", "w", "u", "x", "yy", "zzz", ""]
    assert {tuple(row["rollout_logprobs"]) for row in rows} == {(-0.25, -1.5)}
    assert [row["reward"] for row in rows] == [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 0.0]
    assert {(row["step"], row["group_id"][-4:]) for row in rows} == {(4, "0000"), (4, "0001"), (4, "0002")}
    assert [len(chunk) for chunk in recorded.chunks(1, [0, 1], most_rows=3)] == [2, 2]


def test_a_step_has_the_rows_that_it_had_under_their_own_names(tmp_path: Path) -> None:
    record(tmp_path / "a", {"0000": ["x", "y"]}, step=1)
    record(tmp_path / "a", {"0001": ["z", "w"]}, step=3)
    recorded = recorded_groups(recipe_of("data.train=a", "data.recorded=steps"), tmp_path)

    assert recorded.steps == 3
    assert [recorded.of_step(step) for step in (1, 2, 3)] == [[0], [], [1]]
    [chunk] = recorded.chunks(3, recorded.of_step(3), most_rows=64)
    assert chunk["sample_id"].to_pylist() == ["train-000001-0001-00", "train-000001-0001-01"]


def test_what_is_no_recording_of_trained_rows_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "a", {"0000": ["x", "y"]}, ends="filtered")
    with pytest.raises(UsageError, match="none of 2 rows trained on"):
        recorded_groups(recipe_of("data.train=a"), tmp_path)
    record(tmp_path / "b", {"0000": ["x", "y"]})
    with pytest.raises(UsageError, match=r"no column reward\.other"):
        recorded_groups(recipe_of("data.train=b", "reward.0.name=other"), tmp_path)
    with pytest.raises(UsageError, match="steps of several recordings"):
        recorded_groups(recipe_of('data.train={"a": "b", "b": "b"}', "data.recorded=steps"), tmp_path)


def test_recorded_rows_are_scored_by_other_functions_and_weights(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def vowels(completions, **_):\n"
        "    return [None if not c else sum(x in 'aeiou' for x in c) for c in completions]\n"
        "def one(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    recipe = load_recipe(
        RECIPES / "tiny.yaml",
        (
            'reward=[{function: "r.py:vowels", weight: 2}, {function: "r.py:one", weight: 0.5}]',
            "algorithm.group_size=2",
        ),
    ).recipe
    rows = [
        {"response_text": text, "truncated": False, "record": '{"prompt": "p"}', "prompt_text": "p"}
        for text in ("audio", "rhythm", "", None)
    ]

    assert rescore(recipe, tmp_path, rows) == [
        (8.5, {"vowels": 4.0, "one": 1.0}),
        (0.5, {"vowels": 0.0, "one": 1.0}),
        (0.5, {"vowels": None, "one": 1.0}),
        (None, {"vowels": None, "one": None}),
    ]
