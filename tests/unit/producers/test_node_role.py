"""A node's role over a real store: who is kept, what fails, and who is told."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pytest
from conftest import eventually

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.tables import sample_tables
from rlmq.common.columns import PROMPT_COLUMNS, arrow_schema
from rlmq.common.flow import flow_of
from rlmq.common.logs import configure
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import WorkerContext
from rlmq.producers.node import NodeRole

CODE = """
import time

def short(rows):
    return [len(prompt) < 3 for (prompt,) in rows]

def curious(rows):
    return [row.reward is not None for row in rows]

def few(rows):
    return [True]

def slow(rows):
    return [not time.sleep(0.7) for row in rows]
"""
FLOW_CODE = """
from rlmq import DataFlow, Node
flow = DataFlow([Node("filter", reads=["prompt_text"], writes={"ok": bool}, keep="ok",
                      forward_fn=lambda rows: [row["prompt_text"] != "aaa" for row in rows])])
"""

Open = Callable[[str], tuple[NodeRole, RedisStore]]


@pytest.fixture
def open_role(tmp_path: Path, redis_url: str) -> Iterator[Open]:
    stores: list[RedisStore] = []
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "flow.py").write_text(FLOW_CODE)

    def begin(function: str) -> tuple[NodeRole, RedisStore]:
        node = {"name": "filter", "function": function, "reads": ("prompt_text",), "writes": {"ok": "bool"}}
        recipe = Recipe.model_validate(
            {
                "run": {"name": "t"},
                "model": "m",
                "algorithm": {"group_size": 2},
                "data": {"train": "t.jsonl"},
                "reward": ({"function": "r.py:f"},),
                "nodes": ({**node, "keep": "ok", "reason": "long", "max_deliveries": 2, "lease_s": 2.0},),
                "train": {"steps": 3},
            }
        )
        store = RedisStore(redis_url, run_id="t", worker="test")
        stores.append(store)
        store.open(sample_tables(flow_of(recipe), capacity_rows=100))
        context = WorkerContext(
            recipe=recipe,
            recipe_folder=tmp_path,
            run=RunFolder(tmp_path / "runs" / "t-1"),
            role="filter",
            rank=0,
            world_size=1,
            incarnation=1,
            calls=None,  # type: ignore[arg-type]  # a node's worker makes no calls
            log=configure("filter", 0, stream=io.StringIO()),
            activity=lambda _: None,
            progress=lambda: None,
            serving=lambda _: None,
            desired=lambda: None,
            stopping=lambda: False,
        )
        return NodeRole(context, store), store

    yield begin
    for store in stores:
        store.close()


def put(store: RedisStore, texts: list[str]) -> None:
    rows = [
        {
            "sample_id": f"train-000001-{i // 2:04d}-{i % 2:02d}",
            "group_id": f"train-000001-{i // 2:04d}",
            "step": 1,
            "source": "train",
            "prompt_ids": [1],
            "prompt_text": text,
            "record": "{}",
        }
        for i, text in enumerate(texts)
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(PROMPT_COLUMNS))
    store.put("train", batch, producer="p", sequence=1, group_size=2, closes=True)


def test_rows_that_are_not_kept_end_with_the_reason_and_reach_nothing_after_it(open_role: Open) -> None:
    # given two groups, of which one has a prompt that is too long
    role, store = open_role("own.py:short")
    put(store, ["a", "aaa", "b", "bb"])
    assert store.counts("train").ready["rollout"] == 0, "a filter of prompts comes before the rollout"
    # when the node has worked
    assert role.work()
    assert not role.work()
    # then that row is filtered and counted, and only the others go on
    counts = store.counts("train")
    assert counts.ended["filtered(long)"] == 1
    assert counts.ready["rollout"] == 3
    assert store.verify("train") == []
    # and whether it is recorded before or after the others' column is written, it has none of it
    ended = store.claim("train", "recorder", max_rows=4)
    assert ended is not None
    assert ended.rows.column("ok").to_pylist() == [None]


@pytest.mark.parametrize(
    ("function", "reason"),
    [("own.py:curious", "its function wants column 'reward'"), ("own.py:few", "1 values for 4 rows")],
)
def test_a_function_that_fails_leaves_dead_letters_with_its_traceback(
    open_role: Open, function: str, reason: str
) -> None:
    role, store = open_role(function)
    put(store, ["a", "b", "c", "d"])
    while role.work():
        pass
    letters = store.dead_letters("train")
    assert sum(letter.range.count for letter in letters) == 4
    assert all(reason in letter.reason and "Traceback" in letter.reason for letter in letters)
    failures = role.handlers()["failures"]({})
    assert failures["count"] == 2 * 4, "each of two deliveries"
    assert reason in failures["last"]


def test_the_function_may_be_a_lambda_of_a_flow(open_role: Open) -> None:
    role, store = open_role("flow.py:flow")
    put(store, ["a", "aaa", "b", "bb"])
    assert role.work()
    assert store.counts("train").ended["filtered(long)"] == 1


def test_a_row_is_not_over_before_every_node_has_seen_it() -> None:
    # given a node that keeps all rows and whose column nobody reads
    node = {"name": "note", "function": "n.py:f", "reads": ("prompt_text",), "writes": {"mood": "str"}}
    recipe = Recipe.model_validate(
        {
            "run": {"name": "t"},
            "model": "m",
            "data": {"train": "t.jsonl"},
            "reward": ({"function": "r.py:f"},),
            "nodes": (node,),
            "train": {"steps": 3},
        }
    )
    # then what ends a row waits for it, and nothing else does
    waits = {one.name for one in flow_of(recipe) if "mood" in one.needs}
    assert waits == {"actor", "evaluation"}


def test_a_call_may_last_longer_than_a_lease_while_it_takes_up_rows(open_role: Open, redis_url: str) -> None:
    # given a call of 2.8 s, a lease of 2 s, and another worker that takes what is over
    role, store = open_role("own.py:slow")
    put(store, ["a", "b", "c", "d"])
    other = RedisStore(redis_url, run_id="t", worker="other")
    other.attach(("train",))
    call = Thread(target=role.work)
    call.start()
    try:
        eventually(lambda: other.counts("train").leased["filter"] == 4, "the call has the rows")
        # when it takes up one row after the other, then nothing is over
        while call.is_alive():
            assert other.claim("train", "filter", max_rows=4) is None
            time.sleep(0.05)
    finally:
        call.join()
        other.close()
    counts = store.counts("train")
    assert (counts.ready["rollout"], counts.redelivered, counts.fenced) == (4, 0, 0)
