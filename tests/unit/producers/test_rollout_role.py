"""The rollout role over a real store, with weights that come over gloo as in a run."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pyarrow as pa
import pytest
import torch

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import RowRange
from rlmq.buffer.tables import sample_tables
from rlmq.common.calls import Calls, Desired
from rlmq.common.columns import PROMPT_COLUMNS, arrow_schema
from rlmq.common.engines.staged_weights import StagedWeights
from rlmq.common.errors import IntegrityError
from rlmq.common.flow import sample_flow
from rlmq.common.layouts import exchange
from rlmq.common.layouts.part import own_part
from rlmq.common.layouts.weight_sync import WeightSender
from rlmq.common.logs import configure
from rlmq.common.models import load_model, resolve_model
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import WorkerContext
from rlmq.producers.rollout import RolloutRole

RECIPES = Path(__file__).parents[3] / "recipes"


class Bench:
    """A rollout role, a store beside it, and the trainer's side of a weight transfer."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.recipe = Recipe.model_validate(
            {
                "run": {"name": "t", "seed": 7},
                "model": "tiny_model.py:folder",
                "data": {"train": "t.jsonl"},
                "rollout": {"batch_size_per_device": 8, "max_response_tokens": 6},
                "reward": ({"function": "r.py:f"},),
                "train": {"steps": 3},
            }
        )
        tables = sample_tables(sample_flow(("f",)), capacity_rows=100)
        self.store, own = (RedisStore(redis_url, run_id="t", worker=worker) for worker in ("test", "rollout-0"))
        self.stores = [self.store, own]
        for store in self.stores:
            store.open(tables)
        self.wanted: Desired | None = None
        self.stopping = False
        self.serving = -1
        self.on_progress: Callable[[], object] = lambda: None
        self.log = io.StringIO()
        self.puts = 0
        context = WorkerContext(
            recipe=self.recipe,
            recipe_folder=RECIPES,
            run=RunFolder(folder / "runs" / "t-1"),
            role="rollout",
            rank=0,
            world_size=1,
            incarnation=1,
            calls=cast(Calls, None),  # a rollout worker makes no calls
            log=configure("rollout", 0, stream=self.log),
            activity=lambda _: None,
            progress=lambda: cast(None, self.on_progress()),
            serving=lambda version: setattr(self, "serving", version),
            desired=lambda: self.wanted,
            stopping=lambda: self.stopping,
        )
        self.role = RolloutRole(context, own)

    def want(self, version: int) -> None:
        self.wanted = Desired(role="rollout", version=1, phase="run", policy_version=version)

    def receive(self, version: int, *, fails: bool = False) -> None:
        """Weights of this version come, as the trainer sends them."""
        model = load_model(resolve_model(self.recipe.model, RECIPES), torch.float32)
        trainer = WeightSender(timeout_s=30)
        meeting = trainer.offer(f"g{version}", ("rollout-0",))

        def send() -> None:
            with contextlib.suppress(IntegrityError):
                trainer.send(meeting, own_part(model.state_dict().items()), version)

        sender = threading.Thread(target=send)
        sender.start()
        told = {"meeting": msgspec.to_builtins(meeting)}
        assert ("failed" in self.role.handlers()["receive_weights"]({**told, "version": version})) == fails
        sender.join()

    def put(self, *prompts: str, table: str = "train") -> RowRange:
        """One chunk."""
        self.puts += 1
        rows = [
            {
                "sample_id": f"{table}-{self.puts}-{index}",
                "group_id": f"{table}-{self.puts}-{index}",
                "step": 1,
                "source": table,
                "prompt_ids": list(prompt.encode()),
                "prompt_text": prompt,
                "record": "{}",
            }
            for index, prompt in enumerate(prompts)
        ]
        batch = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(PROMPT_COLUMNS))
        self.store.put(table, batch, producer="p", sequence=self.puts, group_size=1)
        return RowRange(f"p.{self.puts}", 0, len(prompts))

    def responses(self, table: str = "train") -> list[list[int]]:
        """Response tokens of rows that the reward stage can have now."""
        claim = self.store.claim(table, "reward", max_rows=100, columns=("response_ids",))
        return [] if claim is None else cast(list[list[int]], claim.rows["response_ids"].to_pylist())

    def close(self) -> None:
        self.role.close()
        for store in self.stores:
            store.close()


@pytest.fixture
def bench(tmp_path: Path, redis_url: str) -> Iterator[Bench]:
    made = Bench(tmp_path, redis_url)
    yield made
    made.close()


def test_without_weights_of_the_wanted_version_nothing_is_claimed(bench: Bench) -> None:
    bench.put("a", "b")
    assert not bench.role.work()
    bench.want(0)
    assert not bench.role.work()
    bench.receive(0)
    bench.want(1)
    assert not bench.role.work()
    assert bench.store.counts("train").ready["rollout"] == 2

    bench.want(0)
    assert bench.role.work()
    assert bench.store.counts("train").acked["rollout"] == 2


def test_the_store_is_told_version_and_recipe_of_what_was_generated(bench: Bench) -> None:
    bench.receive(3)
    bench.want(3)
    chunk = bench.put("ab", "c")

    assert bench.role.work()

    [written] = [one for one in bench.store.lineage("train", [chunk]) if "response_text" in one.columns]
    assert (written.writer, written.version) == ("rollout-0", 3)
    assert written.tag == f"config {recipe_hash(bench.recipe)} seed 7"
    versions = bench.store.read("train", [chunk], ["policy_versions"])["policy_versions"].to_pylist()
    assert {version for row in versions for version in row} == {3}


def test_the_store_is_told_how_many_tokens_each_row_has(bench: Bench) -> None:
    bench.receive(0)
    bench.want(0)
    prompts = ("a" * 20, "b", "c" * 9, "d" * 30)
    chunk = bench.put(*prompts)
    assert bench.role.work()
    made = bench.store.read("train", [chunk], ["response_ids"])["response_ids"].to_pylist()
    tokens = [len(prompt) + len(response) for prompt, response in zip(prompts, made, strict=True)]

    # a budget of exactly the first three rows takes three, one token less takes two
    for budget, rows in ((sum(tokens[:3]) - 1, 2), (sum(tokens[:3]), 3)):
        claim = bench.store.claim("train", "reward", max_rows=4, max_tokens=budget, columns=())
        assert claim is not None and claim.count == rows
        bench.store.release(claim)


def test_evaluation_comes_first(bench: Bench) -> None:
    bench.receive(0)
    bench.want(0)
    bench.put("a", "b")
    bench.put("c", table="eval")

    assert bench.role.work()

    assert (len(bench.responses()), len(bench.responses("eval"))) == (0, 1)


def test_in_normal_mode_free_slots_take_the_next_chunk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # given two chunks that fit into the slots together
    monkeypatch.setattr("rlmq.producers.rollout._LOOK_EVERY_S", 0.0)
    bench.receive(0)
    bench.want(0)
    bench.put("a", "b")
    bench.put("c", "d", "e")
    # when one piece of work is done, then it was both, each written on its own
    assert bench.role.work()
    assert bench.store.counts("train").acked["rollout"] == 5
    assert bench.log.getvalue().count("rollout.generated") == 2
    # and a version that is wanted meanwhile ends the taking
    bench.put("f")
    bench.put("g")
    bench.on_progress = lambda: bench.want(1)
    assert bench.role.work()
    assert bench.store.counts("train").acked["rollout"] == 6


def test_a_worker_that_is_told_to_stop_gives_its_chunk_back_uncounted(bench: Bench) -> None:
    bench.receive(0)
    bench.want(0)
    bench.put("a", "b")
    bench.stopping = True

    assert bench.role.work()

    assert bench.responses() == []
    claim = bench.store.claim("train", "rollout", max_rows=8)
    assert claim is not None
    assert [one.delivery for one in claim.ranges] == [1]
    assert bench.store.counts("train").redelivered == 0


def test_a_lost_lease_leaves_the_chunk_to_the_other_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    # given a worker whose chunk is taken back while it generates: another process of its name has started
    monkeypatch.setattr("rlmq.producers.rollout._EXTEND_EVERY_S", 0.0)
    bench.receive(0)
    bench.want(0)
    bench.put("a", "b")
    other = RedisStore(redis_url, run_id="t", worker="rollout-0")
    other.attach(["train", "eval"])
    bench.on_progress = other.recover

    assert bench.role.work()

    assert "given to another worker" in bench.log.getvalue()
    assert bench.responses() == []
    # and it goes on with the next one
    bench.on_progress = lambda: None
    assert bench.role.work()
    assert len(bench.responses()) == 2
    other.close()


def test_a_torn_engine_claims_nothing_until_weights_come_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a worker that serves version 1, and whose memory fails in the middle of taking version 2 into service
    bench.want(1)
    bench.receive(1)
    bench.put("one")
    swap = StagedWeights.swap

    def half_a_swap(weights: StagedWeights) -> None:
        next(iter(weights._targets.values())).data = torch.empty(0)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StagedWeights, "swap", half_a_swap)
    bench.receive(2, fails=True)
    # then it serves no version, whichever is wanted
    assert bench.serving == -1
    for version in (1, 2):
        bench.want(version)
        assert not bench.role.work()
    # until they come again
    monkeypatch.setattr(StagedWeights, "swap", swap)
    bench.receive(2)
    assert bench.serving == 2
    assert bench.role.work()
    assert len(bench.responses()) == 1


def test_a_damaged_transfer_leaves_the_old_version_which_serves_only_where_it_is_wanted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a worker that serves version 1, and a message of version 2 with a flipped bit
    bench.want(1)
    bench.receive(1)
    bench.put("one")
    monkeypatch.setattr(exchange, "is_whole", lambda *_: False)
    bench.want(2)
    bench.receive(2, fails=True)
    # then version 2 serves nobody, and version 1 is whole
    assert bench.serving == 1
    assert not bench.role.work()
    # and the next generation of the transfer is as good as any
    monkeypatch.undo()
    bench.receive(2)
    assert bench.serving == 2 and bench.role.work()
    assert len(bench.responses()) == 1
