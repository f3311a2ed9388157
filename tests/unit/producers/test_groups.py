"""Groups are judged before they are trained on, and no kill between two verbs changes a row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import structlog

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.tables import TRAIN, sample_tables
from rlmq.common.algorithms import algorithm_of
from rlmq.common.columns import ROLLOUT_COLUMNS, arrow_schema, is_greedy, reward_columns
from rlmq.common.flow import flow_of
from rlmq.common.recipe.schema import Recipe
from rlmq.common.worker import WorkerContext
from rlmq.producers.groups import GroupStage
from rlmq.producers.prompt_tokens import PreparedPrompt
from rlmq.producers.prompts import chunk_rows

pytestmark = pytest.mark.timeout(60)


class Killed(BaseException):
    """Stands for the end of a process at this verb."""


class Dying(RedisStore):
    """Ends before its verb number `dies_at` of those that change a claim, or (negative) after it."""

    dies_at = 0
    seen = 0

    def _counted(self, verb: Callable[[], Any]) -> None:
        self.seen += 1
        if self.seen == self.dies_at:
            raise Killed
        verb()
        if self.seen == -self.dies_at:
            raise Killed

    def write(self, *args: Any, **how: Any) -> None:
        self._counted(lambda: super(Dying, self).write(*args, **how))

    def finish(self, *args: Any, **how: Any) -> None:
        self._counted(lambda: super(Dying, self).finish(*args, **how))


class Bench:
    """A store with scored groups of the algorithm."""

    def __init__(self, url: str, folder: Path, name: str, group_size: int) -> None:
        self.url, self.folder = url, folder
        self.recipe = Recipe.model_validate(
            {
                "run": {"name": "g"},
                "model": "m",
                "algorithm": {"name": name, "group_size": group_size},
                "data": {"train": "t.jsonl"},
                "reward": ({"function": "r.py:f"},),
                "train": {"steps": 1},
            }
        )
        self.members = group_size
        self.algorithm = algorithm_of(self.recipe)
        self.tables = sample_tables(flow_of(self.recipe), capacity_rows=1000)
        self.store = self.open(RedisStore, "test")

    def open(self, kind: type[RedisStore], worker: str) -> Any:
        store = kind(self.url, run_id="g-1", worker=worker)
        store.open(self.tables)
        return store

    def put(self, rewards: Sequence[Sequence[float | None]]) -> None:
        """Groups of rewards, the greedy row's last; None: no verdict."""
        greedy = self.algorithm.greedy_baseline
        prompts = [PreparedPrompt("train", (1, 2), "p", "{}") for _ in rewards]
        for sequence, rows in enumerate(chunk_rows(TRAIN, 1, prompts, self.members, 100, greedy=greedy)):
            self.store.put(TRAIN, rows, producer="p", sequence=sequence, group_size=self.members + greedy)
        flat = [reward for group in rewards for reward in group]
        claim = self.store.claim(TRAIN, "rollout", max_rows=len(flat))
        row = {"response_ids": [3], "response_text": "a", "rollout_logprobs": [-0.5], "loss_mask": [True]}
        row |= {"policy_versions": [0], "turns": [0], "truncated": False}
        responses = pa.RecordBatch.from_pylist([row] * len(flat), schema=arrow_schema(ROLLOUT_COLUMNS))
        self.store.write(claim, responses, ack=True)
        claim = self.store.claim(TRAIN, "reward", max_rows=len(flat))
        missing = [i for i, reward in enumerate(flat) if reward is None]
        if missing:
            self.store.finish(claim, "filtered", "no_verdict", rows=missing)
        schema = arrow_schema(reward_columns(self.recipe.reward_names))
        scored = [{**dict.fromkeys(schema.names, reward), "reward_fields": None} for reward in flat]
        self.store.write(claim, pa.RecordBatch.from_pylist(scored, schema=schema), ack=True)

    def stage(self, store: RedisStore) -> GroupStage:
        context = WorkerContext(
            recipe=self.recipe,
            recipe_folder=self.folder,
            run=None,  # type: ignore[arg-type]
            role="reward",
            rank=0,
            world_size=1,
            incarnation=1,
            calls=None,  # type: ignore[arg-type]
            log=structlog.get_logger(),
            activity=lambda _: None,
            progress=lambda: None,
            serving=lambda _: None,
            desired=lambda: None,
            stopping=lambda: False,
        )
        return GroupStage(context, store, self.algorithm, "test")

    def judge(self, worker: str = "reward-0") -> None:
        """As a worker of this name that is started anew and meets no kill."""
        store = self.open(RedisStore, worker)
        store.recover()
        stage = self.stage(store)
        while stage.work():
            pass
        store.close()

    def trained(self) -> list[tuple[str, float, float]]:
        """(id, reward, the group's column) of what the actor gets."""
        (name,) = self.algorithm.group_columns
        ready = self.store.counts(TRAIN).ready["actor"]
        if ready == 0:
            return []
        claim = self.store.claim(TRAIN, "actor", max_rows=ready, columns=("sample_id", "reward", name))
        return sorted((row["sample_id"], row["reward"], row[name]) for row in claim.rows.to_pylist())


@pytest.fixture
def bench(redis_url: str, tmp_path: Path) -> Callable[..., Bench]:
    return lambda name, group_size: Bench(redis_url, tmp_path, name, group_size)


REMAX = [[1.0, 0.0, 0.25], [0.5, None, 0.75], [0.5, 0.5, None], [None, None, 1.0]]
"""Whole; without one verdict; without the greedy row's; the greedy row alone."""
REMAX_TRAINED = [
    ("train-000001-0000-00", 1.0, 0.25),
    ("train-000001-0000-01", 0.0, 0.25),
    ("train-000001-0001-00", 0.5, 0.75),
]
REMAX_ENDED = {"filtered(no_verdict)": 4, "filtered(baseline)": 3, "filtered(no_baseline)": 2}

DAPO = [[1.0, 0.0], [0.5, 0.5], [None, 0.25], [0.0, 0.1]]
DAPO_TRAINED = [
    ("train-000001-0000-00", 1.0, float(np.std([1.0, 0.0], ddof=1))),
    ("train-000001-0000-01", 0.0, float(np.std([1.0, 0.0], ddof=1))),
    ("train-000001-0003-00", 0.0, float(np.std([0.0, 0.1], ddof=1))),
    ("train-000001-0003-01", 0.1, float(np.std([0.0, 0.1], ddof=1))),
]
DAPO_ENDED = {"filtered(no_verdict)": 1, "filtered(equal_rewards)": 3}

CASES = {"remax": (REMAX, REMAX_TRAINED, REMAX_ENDED), "dapo": (DAPO, DAPO_TRAINED, DAPO_ENDED)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dies_at", [0, 1, -1, 2, -2, 3, -3, 4, -4])
def test_groups_are_judged_once_whenever_the_worker_is_killed(
    bench: Callable[..., Bench], name: str, dies_at: int
) -> None:
    rewards, trained, ended = CASES[name]
    one = bench(name, 2)
    one.put(rewards)
    store = one.open(Dying, "reward-0")
    store.dies_at = dies_at
    try:
        while one.stage(store).work():
            pass
    except Killed:
        assert dies_at
    if dies_at == 0:
        assert store.seen >= 3
    one.judge()
    found = one.trained()
    assert [row[:2] for row in found] == [row[:2] for row in trained]
    np.testing.assert_allclose([row[2] for row in found], [row[2] for row in trained], rtol=1e-15)
    assert not any(is_greedy(row[0]) for row in found)
    counts = one.store.counts(TRAIN)
    assert dict(counts.ended) == ended
    assert counts.live == len(trained) and counts.leased["groups"] == 0


@pytest.mark.parametrize("name", CASES)
def test_no_row_is_ready_to_train_before_those_that_are_not_trained_have_ended(
    bench: Callable[..., Bench], name: str
) -> None:
    rewards, trained, _ = CASES[name]
    one = bench(name, 2)
    one.put(rewards)
    store = one.open(Dying, "reward-0")
    allowed = {row[0] for row in trained}
    for dies_at in (-1, -2, -3, -4):
        store.seen, store.dies_at = 0, dies_at
        store.recover()
        with contextlib.suppress(Killed):
            one.stage(store).work()
        ready = one.store.counts(TRAIN).ready["actor"]
        assert ready in (0, len(allowed))
        store = one.open(Dying, "reward-0")
        store.recover()


def test_the_greedy_row_is_the_last_of_its_group() -> None:
    prompt = PreparedPrompt("train", (1,), "p", "{}")
    (rows,) = chunk_rows(TRAIN, 3, [prompt], 2, 100, greedy=True, after=5)
    assert rows["sample_id"].to_pylist() == [f"train-000003-0005-{name}" for name in ("00", "01", "greedy")]
    assert set(rows["group_id"].to_pylist()) == {"train-000003-0005"}
