"""The recorder over a real store: Parquet parts of ended rows, and evaluations."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmq.buffer.layout import TOLD
from rlmq.buffer.recording import Recording, RecordingWriter
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import ExperienceStore
from rlmq.buffer.tables import sample_tables
from rlmq.common.columns import (
    PROMPT_COLUMNS,
    ROLLOUT_COLUMNS,
    actor_columns,
    arrow_schema,
    reward_columns,
)
from rlmq.common.errors import DeadlineExceeded, DependencyError, Terminated
from rlmq.common.flow import sample_columns, sample_flow
from rlmq.common.logs import configure
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import WorkerContext
from rlmq.consumers.recorder import RecorderRole, aggregate

NAMES = ["correct"]
COLUMNS = sample_columns(sample_flow(NAMES))
TABLES = sample_tables(sample_flow(NAMES), capacity_rows=10_000)


class Bench:
    """A store, the recorder, and other workers' parts played by hand."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.url = redis_url
        self.run = RunFolder(folder / "runs" / "t-1")
        self.stopping = False
        self.stores: list[RedisStore] = []
        self.store = self.connect("test")
        self.puts = 0
        self.recorder = self.start()

    def connect(self, worker: str) -> RedisStore:
        store = RedisStore(self.url, run_id="t", worker=worker)
        store.open(TABLES)
        self.stores.append(store)
        return store

    def start(self, *, step_s: float = 30.0) -> RecorderRole:
        recipe = Recipe.model_validate(
            {
                "run": {"name": "t"},
                "model": "./m",
                "data": {"train": "t.jsonl"},
                "reward": ({"function": "r.py:correct"},),
                "train": {"steps": 3},
                "deadlines": {"step_s": step_s},
            }
        )
        context = WorkerContext(
            recipe=recipe,
            recipe_folder=self.run.path,
            run=self.run,
            role="recorder",
            rank=0,
            world_size=1,
            incarnation=1,
            calls=None,  # type: ignore[arg-type]  # the recorder makes no calls
            log=configure("recorder", 0, stream=io.StringIO()),
            activity=lambda _: None,
            progress=lambda: None,
            serving=lambda _: None,
            desired=lambda: None,
            stopping=lambda: self.stopping,
        )
        return RecorderRole(context, self.connect("recorder-0"))

    def put(self, count: int, *, table: str = "train", step: int = 1, source: str = "train") -> None:
        self.puts += 1
        rows = [
            {
                "sample_id": f"{table}-{step:06d}-{self.puts:04d}-{i:02d}",
                "group_id": f"{table}-{step:06d}-{self.puts:04d}",
                "step": step,
                "source": source,
                "prompt_ids": [1, 2],
                "prompt_text": "q",
                "record": "{}",
            }
            for i in range(count)
        ]
        batch = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(PROMPT_COLUMNS))
        self.store.put(table, batch, producer="prompts", sequence=self.puts, group_size=count)

    def generate(self, table: str = "train", *, tokens: int = 3, store: ExperienceStore | None = None) -> None:
        store = store or self.store
        while claim := store.claim(table, "rollout", max_rows=1000, columns=("sample_id",)):
            made = {
                "response_ids": list(range(tokens)),
                "response_text": "a",
                "rollout_logprobs": [-0.5] * tokens,
                "loss_mask": [True] * tokens,
                "policy_versions": [0] * tokens,
                "turns": [0] * tokens,
                "truncated": False,
            }
            batch = pa.RecordBatch.from_pylist([made] * claim.count, schema=arrow_schema(ROLLOUT_COLUMNS))
            store.write(claim, batch, ack=True)

    def score(self, *rewards: float | None, table: str = "train", store: ExperienceStore | None = None) -> None:
        store = store or self.store
        claim = store.claim(table, "reward", max_rows=len(rewards), min_rows=len(rewards), columns=("sample_id",))
        assert claim is not None
        made: list[dict[str, Any]] = [{"reward": r, "reward.correct": r} for r in rewards]
        for row in made[1:]:  # the first function's dict had nothing beside its score
            row["reward_fields"] = json.dumps({"correct": {"high": (row["reward"] or 0.0) > 0.3, "of": "b"}})
        batch = pa.RecordBatch.from_pylist(made, schema=arrow_schema(reward_columns(NAMES)))
        store.write(claim, batch, ack=True)

    def train(self, step: int = 1) -> None:
        claim = self.store.claim("train", "actor", max_rows=1000, min_rows=1, columns=("response_ids",))
        if claim is None:  # scope batch: exactly max_rows at once
            rows = self.store.counts("train").ready["actor"]
            claim = self.store.claim("train", "actor", max_rows=rows, min_rows=rows, columns=("response_ids",))
        assert claim is not None
        advantages = [[0.5] * len(ids) for ids in claim.rows.column("response_ids").to_pylist()]
        batch = pa.RecordBatch.from_pydict({"advantages": advantages}, schema=arrow_schema(actor_columns()))
        self.store.write(claim, batch)
        self.store.finish(claim, "trained", step=step)

    def train_step(self, step: int, *rewards: float) -> None:
        self.put(len(rewards), step=step)
        self.generate()
        self.score(*rewards)
        self.train(step)

    def recorded(self, step: int = 1) -> list[dict[str, Any]]:
        return Recording(self.run.samples).read(steps=[step]).to_pylist()

    def evaluate(self, step: int, samples: int) -> dict[str, Any]:
        return self.recorder.handlers()["evaluate"]({"step": step, "samples": samples})

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    made = Bench(tmp_path, redis_url)
    yield made
    made.close()


# Recording


def test_a_trained_row_is_recorded_with_all_its_columns(bench: Bench) -> None:
    bench.train_step(1, 1.0, 0.0)

    assert bench.recorder.work()

    names = ["_train.manifest.json", "train-000001-0000.parquet"]
    assert sorted(p.name for p in bench.run.samples.iterdir()) == names
    table = pq.read_table(bench.run.samples / "train-000001-0000.parquet")
    assert table.schema.equals(pa.schema([*arrow_schema(COLUMNS), *TOLD]))
    first = table.to_pylist()[0]
    lineage = json.loads(first.pop("lineage"))
    assert {one["writer"] for one in lineage} == {"test"}
    assert {name for one in lineage for name in one["columns"]} == {column.name for column in COLUMNS}
    assert sorted(one["at"] for one in lineage) == [one["at"] for one in lineage]
    assert first == {
        "sample_id": "train-000001-0001-00",
        "group_id": "train-000001-0001",
        "step": 1,
        "source": "train",
        "prompt_ids": [1, 2],
        "prompt_text": "q",
        "record": "{}",
        "response_ids": [0, 1, 2],
        "response_text": "a",
        "rollout_logprobs": [-0.5] * 3,
        "loss_mask": [True] * 3,
        "policy_versions": [0] * 3,
        "turns": [0] * 3,
        "truncated": False,
        "reward": 1.0,
        "reward.correct": 1.0,
        "reward_fields": None,
        "advantages": [0.5] * 3,
        "end_state": "trained",
        "end_reason": "",
        "end_step": 1,
    }
    assert not bench.recorder.work()


def test_a_filtered_row_is_recorded_with_what_it_has(bench: Bench) -> None:
    bench.put(2)
    bench.generate()
    claim = bench.store.claim("train", "reward", max_rows=2)
    assert claim is not None
    bench.store.finish(claim, "filtered", "no_verdict")

    bench.recorder.work()

    assert [row["reward"] for row in bench.recorded()] == [None, None]
    assert bench.recorded()[0]["response_text"] == "a"


def test_steps_go_to_files_of_their_own(bench: Bench) -> None:
    bench.train_step(1, 1.0)
    bench.train_step(2, 1.0, 0.0)

    assert bench.recorder.handlers()["flush"]({}) == {"rows": 3}

    assert [(one.first_step, one.rows) for one in Recording(bench.run.samples).segments("train")] == [
        (1, 1),
        (2, 2),
    ]


def test_a_recorded_row_is_freed_once_a_checkpoint_covers_it(bench: Bench) -> None:
    bench.train_step(1, 1.0, 0.0)
    held = bench.store.counts("train").payload_bytes
    assert held > 0

    bench.store.advance(1)
    assert bench.store.counts("train").payload_bytes == held
    bench.recorder.work()

    assert bench.store.counts("train").payload_bytes == 0


def test_rows_that_are_delivered_twice_are_read_once(bench: Bench) -> None:
    bench.train_step(1, 1.0, 0.0)
    claim = bench.store.claim("train", "recorder", max_rows=10)
    assert claim is not None
    RecordingWriter(bench.run.samples).add("train", 1, pa.Table.from_batches([claim.rows]))
    bench.store.release(claim)  # the recorder died between writing and ack

    bench.start().work()

    assert len(list(bench.run.samples.glob("*.parquet"))) == 2
    assert [row["sample_id"][-2:] for row in bench.recorded()] == ["00", "01"]


def test_nothing_half_written_is_left_when_the_folder_cannot_be_written(bench: Bench) -> None:
    bench.train_step(1, 1.0)
    bench.run.path.mkdir(parents=True)
    bench.run.samples.write_text("a file in the way")

    with pytest.raises(DependencyError, match=r"samples in .*expected a writable folder"):
        bench.recorder.work()

    bench.run.samples.unlink()
    assert bench.store.counts("train").acked["recorder"] == 0


def test_flush_without_rows_writes_nothing(bench: Bench) -> None:
    assert bench.recorder.handlers()["flush"]({}) == {"rows": 0}
    assert not bench.run.samples.exists()


# Evaluation


def test_an_evaluation_returns_means_per_set_and_ends_its_rows(bench: Bench) -> None:
    bench.put(2, table="eval", source="easy")
    bench.put(2, table="eval", source="hard")
    bench.generate("eval", tokens=4)
    bench.score(1.0, 0.0, 0.25, 0.5, table="eval")

    result = bench.evaluate(1, 4)

    assert result == {
        "reward_mean": 0.4375,
        "response_tokens_mean": 4.0,
        "samples": 4,
        "no_verdict": 0,
        "sets": {
            "easy": {
                "reward_mean": 0.5,
                "response_tokens_mean": 4.0,
                "samples": 2,
                "no_verdict": 0,
                "reward.correct": 0.5,
                "reward.correct.high": 0.0,
            },
            "hard": {
                "reward_mean": 0.375,
                "response_tokens_mean": 4.0,
                "samples": 2,
                "no_verdict": 0,
                "reward.correct": 0.375,
                "reward.correct.high": 0.5,
            },
        },
    }
    json.dumps(result, allow_nan=False)
    counts = bench.store.counts("eval")
    assert (counts.live, counts.ended) == (0, {"done": 4})
    rows = pq.read_table(bench.run.samples / "eval-000001.parquet")["sample_id"].to_pylist()
    assert rows == sorted(rows)
    assert len(rows) == 4


def test_rows_without_verdict_are_counted_by_set_and_end_as_filtered(bench: Bench) -> None:
    bench.put(3, table="eval", source="easy")
    bench.generate("eval")
    bench.score(1.0, None, 0.5, table="eval")

    result = bench.evaluate(1, 3)

    assert result["sets"]["easy"] == {
        "reward_mean": 0.75,
        "response_tokens_mean": 3.0,
        "samples": 2,
        "no_verdict": 1,
        "reward.correct": 0.75,
        "reward.correct.high": 0.5,
    }
    assert bench.store.counts("eval").ended == {"done": 2, "filtered(no_verdict)": 1}


def test_an_evaluation_without_any_verdict_has_no_mean(bench: Bench) -> None:
    bench.put(2, table="eval", source="easy")
    bench.generate("eval")
    bench.score(None, None, table="eval")

    result = bench.evaluate(1, 2)

    assert result["reward_mean"] is None
    assert (result["samples"], result["no_verdict"]) == (0, 2)


def test_rows_that_died_on_the_way_are_counted_as_no_verdict(bench: Bench) -> None:
    bench.put(2, table="eval", source="easy")
    bench.generate("eval")
    bench.put(1, table="eval", source="easy")
    claim = bench.store.claim("eval", "rollout", max_rows=1)
    assert claim is not None
    bench.store.finish(claim, "dead", "engine")
    bench.score(1.0, 1.0, table="eval")

    result = bench.evaluate(1, 3)

    assert (result["reward_mean"], result["samples"], result["no_verdict"]) == (1.0, 2, 1)


def test_an_evaluation_waits_for_rows_that_are_still_to_come(bench: Bench) -> None:
    bench.put(2, table="eval", source="easy")
    bench.put(2, table="eval", source="easy")
    other = bench.connect("reward-0")

    def later() -> None:
        bench.generate("eval", store=other)
        bench.score(1.0, 0.0, table="eval", store=other)
        bench.score(1.0, 1.0, table="eval", store=other)

    timer = threading.Timer(0.7, later)
    timer.start()
    result = bench.evaluate(1, 4)
    timer.join()

    assert (result["reward_mean"], result["samples"]) == (0.75, 4)


def test_an_evaluation_that_gets_no_rows_names_the_stage_that_holds_them(bench: Bench) -> None:
    bench.put(2, table="eval", source="easy")
    bench.generate("eval")
    recorder = bench.start(step_s=1.0)

    with pytest.raises(
        DeadlineExceeded, match=r"evaluation of step 4: got 0 of 2 rows, none for 1 s \(reward: 2 ready"
    ):
        recorder.handlers()["evaluate"]({"step": 4, "samples": 2})


def test_an_evaluation_gives_up_when_the_process_is_told_to_end(bench: Bench) -> None:
    bench.put(2, table="eval", source="easy")
    bench.stopping = True

    with pytest.raises(Terminated):
        bench.evaluate(1, 2)


def test_an_evaluation_repeated_after_a_crash_gives_the_same_result(bench: Bench) -> None:
    bench.put(3, table="eval", source="easy")
    bench.generate("eval")
    bench.score(1.0, 0.0, 0.5, table="eval")
    first = bench.evaluate(1, 3)

    again = bench.start().handlers()["evaluate"]({"step": 1, "samples": 3})

    assert again == first
    assert bench.store.counts("eval").ended == {"done": 3}


def test_the_mean_does_not_depend_on_the_order_of_rows() -> None:
    rewards = [0.1, 1e16, -1e16, 0.2, 0.3] * 7
    rows = {
        "source": ["a"] * len(rewards),
        "reward": rewards,
        "response_ids": [[1]] * len(rewards),
    }
    forward = pa.table(rows)
    backward = forward.take(list(range(len(rewards)))[::-1])

    assert aggregate(forward, len(rewards)) == aggregate(backward, len(rewards))
    assert aggregate(forward, len(rewards))["reward_mean"] == pytest.approx(0.12, rel=1e-15)


# Report


def test_report_draws_the_curve_or_says_that_there_is_none(bench: Bench) -> None:
    report = bench.recorder.handlers()["report"]
    assert report({}) == {"curve": ""}

    bench.run.path.mkdir(parents=True)
    bench.run.metrics.write_text('{"kind": "train", "step": 1, "reward_mean": 0.5}\n')

    assert report({}) == {"curve": str(bench.run.curve)}
    assert bench.run.curve.exists()
