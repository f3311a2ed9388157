"""The prompts role against a real server: which rows reach the tables, in which chunks."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
import structlog

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.tables import sample_tables
from rlmq.common.calls import Calls
from rlmq.common.columns import PROMPT_COLUMNS
from rlmq.common.errors import UsageError
from rlmq.common.flow import sample_flow
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import WorkerContext
from rlmq.producers.prompts import PromptsRole

RECIPES = Path(__file__).parents[3] / "recipes"
NAMES = [column.name for column in PROMPT_COLUMNS]

MakeRole = Callable[..., tuple[PromptsRole, RedisStore]]


@pytest.fixture
def make_role(tmp_path: Path, redis_url: str) -> MakeRole:
    """`make_role(*overrides)`: 12 prompts, 5 per step in groups of 4, at most 8 rows per chunk."""
    rows = [{"prompt": f"Say {n}:", "answer": str(n)} for n in range(12)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "e.jsonl").write_text('{"prompt": "Sing:"}\n{"prompt": "Hum:"}\n{"prompt": "Shout:"}\n')
    (tmp_path / "b.yaml").write_text(
        f"""\
run: {{name: b, seed: 7}}
model: {RECIPES}/tiny_model.py:folder
algorithm: {{group_size: 4}}
data: {{train: t.jsonl, eval: {{two: e.jsonl, one: e.jsonl}}, prompts_per_step: 5, max_prompt_tokens: 100}}
rollout: {{max_response_tokens: 16, batch_size_per_device: 9}}
reward: [{{function: "r.py:score"}}]
train: {{steps: 3}}
"""
    )

    def make(*overrides: str, store: RedisStore | None = None) -> tuple[PromptsRole, RedisStore]:
        recipe = load_recipe(tmp_path / "b.yaml", overrides).recipe
        store = store or RedisStore(redis_url, run_id="b-1", worker="prompts-0", put_timeout_s=5)
        store.open(sample_tables(sample_flow(recipe.reward_names), capacity_rows=1000))
        return PromptsRole(context(recipe, tmp_path), store), store

    return make


def context(recipe: Recipe, folder: Path) -> WorkerContext:
    return WorkerContext(
        recipe=recipe,
        recipe_folder=folder,
        run=RunFolder(folder / "runs" / "b-1"),
        role="prompts",
        rank=0,
        world_size=1,
        incarnation=1,
        calls=cast(Calls, None),  # the role makes no calls
        log=structlog.get_logger(),
        activity=lambda _activity: None,
        progress=lambda: None,
        serving=lambda _version: None,
        desired=lambda: None,
        stopping=lambda: False,
    )


def claimed(store: RedisStore, table: str) -> list[list[dict[str, Any]]]:
    """All rows, chunk by chunk, as a rollout worker gets them."""
    chunks = []
    while (claim := store.claim(table, "rollout", max_rows=1000, columns=NAMES)) is not None:
        chunks.append(claim.rows.to_pylist())
        store.ack(claim)
    return chunks


def test_a_step_is_put_in_chunks_of_whole_groups(make_role: MakeRole) -> None:
    role, store = make_role()
    assert role.handlers()["admit"]({"step": 1}) == {"samples": 20, "prompts": 5, "greedy": 0}
    chunks = claimed(store, "train")
    assert [len(chunk) for chunk in chunks] == [8, 8, 4]
    rows = [row for chunk in chunks for row in chunk]
    assert [row["sample_id"] for row in rows] == [
        f"train-000001-{g:04d}-{m:02d}" for g in range(5) for m in range(4)
    ]
    assert [row["group_id"] for row in rows] == [f"train-000001-{g:04d}" for g in range(5) for _ in range(4)]
    assert {(row["step"], row["source"]) for row in rows} == {(1, "train")}


class Listening(RedisStore):
    """Notes which puts close the step."""

    def __init__(self, url: str) -> None:
        super().__init__(url, run_id="b-1", worker="prompts-0")
        self.closing: list[tuple[str, bool]] = []

    def put(self, table: str, rows: pa.RecordBatch, **how: Any) -> bool:
        self.closing.append((table, how["closes"]))
        return super().put(table, rows, **how)


def test_the_last_chunk_of_a_step_closes_it(make_role: MakeRole, redis_url: str) -> None:
    store = Listening(redis_url)
    role, _ = make_role(store=store)
    role.admit({"step": 1})
    role.admit_eval({"step": 1})
    assert store.closing == [("train", False), ("train", False), ("train", True), ("eval", True)]
    store.close()


def test_a_row_has_tokens_text_and_the_record(make_role: MakeRole) -> None:
    role, store = make_role("data.shuffle=false")
    role.admit({"step": 1})
    row = claimed(store, "train")[0][0]
    assert row["prompt_text"] == "Say 0:"
    assert row["prompt_ids"] and len(row["prompt_ids"]) == 6
    assert json.loads(row["record"]) == {"prompt": "Say 0:", "answer": "0"}


def test_a_repeated_call_adds_nothing(make_role: MakeRole) -> None:
    role, store = make_role()
    again, _ = make_role()
    first = role.admit({"step": 1})
    assert again.admit({"step": 1}) == first
    assert store.counts("train").admitted == 20


def test_evaluation_admitted_between_steps_hinders_no_step(make_role: MakeRole) -> None:
    role, store = make_role()
    role.admit({"step": 1})
    assert role.admit_eval({"step": 1}) == {"samples": 6}
    role.admit({"step": 2})
    assert (store.counts("train").admitted, store.counts("eval").admitted) == (40, 6)


def test_every_evaluation_prompt_is_put_for_each_of_its_samples(make_role: MakeRole) -> None:
    role, store = make_role("evaluate.samples=3", "evaluate.temperature=1")
    assert role.admit_eval({"step": 0}) == {"samples": 18}
    rows = [row for chunk in claimed(store, "eval") for row in chunk]
    assert [row["source"] for row in rows] == ["two"] * 9 + ["one"] * 9
    assert [row["prompt_text"] for row in rows[::3]] == ["Sing:", "Hum:", "Shout:"] * 2
    assert rows[3]["sample_id"] == "eval-000000-0001-00" and rows[3]["group_id"] == "eval-000000-0001"


def test_a_group_greater_than_a_chunk_is_a_chunk_of_its_own(make_role: MakeRole) -> None:
    role, store = make_role("rollout.batch_size_per_device=3")
    role.admit({"step": 1})
    assert [len(chunk) for chunk in claimed(store, "train")] == [4] * 5


def test_a_refill_takes_the_next_prompts_and_is_put_once(make_role: MakeRole) -> None:
    role, store = make_role("data.shuffle=false", "data.passes=1")
    again, _ = make_role("data.shuffle=false", "data.passes=1")
    role.admit({"step": 1, "first": 0, "count": 5, "after": 0})
    for one in (role, again):
        assert one.admit({"step": 1, "first": 5, "count": 2, "after": 5}) == {
            "samples": 8,
            "prompts": 2,
            "greedy": 0,
        }
    assert role.admit({"step": 2, "first": 7, "count": 9, "after": 0})["prompts"] == 5
    rows = [row for chunk in claimed(store, "train") for row in chunk]
    assert [row["prompt_text"] for row in rows[::4]] == [f"Say {n}:" for n in range(12)]
    assert [row["group_id"] for row in rows[20:28:4]] == ["train-000001-0005", "train-000001-0006"]


def test_missing_groups_are_those_that_the_rows_left_would_not_fill(make_role: MakeRole) -> None:
    role, store = make_role("data.shuffle=false")
    role.admit({"step": 1})
    assert role.missing({"step": 1}) == {"groups": 0}
    claim = store.claim("train", "rollout", max_rows=1000)
    assert claim is not None
    store.finish(claim, "filtered", "equal_rewards", rows=range(7))
    assert role.missing({"step": 1}) == {"groups": 1}
    role.admit({"step": 1, "first": 5, "count": 1, "after": 5})
    assert role.missing({"step": 1}) == {"groups": 0}


def test_passes_end_with_a_short_step_and_all_prompts_used(make_role: MakeRole) -> None:
    role, store = make_role("data.passes=1")
    described = role.describe({})
    lengths = {"train_prompts": 12, "skipped": 0, "cut": 0, "eval": {"two": 3, "one": 3}}
    assert described == {**lengths, "steps": 3, "prompts": 12}
    assert [role.admit({"step": step})["samples"] for step in (1, 2, 3, 4)] == [20, 20, 8, 0]
    texts = [row["prompt_text"] for chunk in claimed(store, "train") for row in chunk]
    assert sorted(set(texts)) == sorted(f"Say {n}:" for n in range(12)) and len(texts) == 48


def test_the_length_policy_is_counted(make_role: MakeRole) -> None:
    role, _ = make_role("data.max_prompt_tokens=6", "data.long_prompts=skip")
    assert (role.describe({})["train_prompts"], role.describe({})["skipped"]) == (10, 2)
    cut, _ = make_role("data.max_prompt_tokens=5", "data.long_prompts=cut_left")
    assert (cut.describe({})["train_prompts"], cut.describe({})["cut"]) == (12, 12)


def test_long_evaluation_prompts_are_refused_by_set_and_row(make_role: MakeRole) -> None:
    with pytest.raises(UsageError, match=r"data\.eval\.two \(e\.jsonl\), row 3: got a prompt of 6 tokens"):
        make_role("data.max_prompt_tokens=5", "data.train=e.jsonl")


def test_a_response_beyond_the_models_context_is_refused(make_role: MakeRole) -> None:
    with pytest.raises(UsageError, match="the model's context"):
        make_role("rollout.max_response_tokens=510")


def test_waiting_ends_when_a_call_rings(make_role: MakeRole) -> None:
    role, _ = make_role()
    reader, writer = os.pipe()
    os.write(writer, b"x")
    role.wait(30, reader)
    assert role.work() is False
    role.close()
    os.close(reader)
    os.close(writer)


def test_a_curriculum_takes_its_sets_by_step(make_role: MakeRole) -> None:
    # given an easy and a hard set, of which the hard one comes in from step 2 on
    mixture = "data.mixture=[{weights: {easy: 1}}, {from_step: 2, weights: {easy: 1, hard: 4}}]"
    role, store = make_role("data.train={easy: t.jsonl, hard: e.jsonl}", mixture, "data.prompts_per_step=5")
    # when three steps are admitted
    for step in (1, 2, 3):
        role.admit({"step": step})
    # then each has its sets by weight
    rows = [row for chunk in claimed(store, "train") for row in chunk]
    counts = [Counter(row["source"] for row in rows if row["step"] == step) for step in (1, 2, 3)]
    assert counts == [{"easy": 20}, {"easy": 4, "hard": 16}, {"easy": 4, "hard": 16}]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["data.mixture=[{weights: {easy: 1}}]"], "which is one set"),
        (["data.train={easy: t.jsonl}", "data.mixture=[{weights: {eazy: 1}}]"], "not eazy"),
        (["data.train={easy: t.jsonl}", "data.mixture=[{from_step: 2, weights: {easy: 1}}]"], "from_step 1 first"),
        (["data.train={easy: t.jsonl}", "data.mixture=[{weights: {easy: 1}}]", "data.passes=1"], "no passes"),
        (["data.train={easy: t.jsonl}", "data.mixture=[{weights: {easy: 0}}]"], "at least one above 0"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(make_role: MakeRole, keys: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make_role(*keys)
