"""The orders of an operator: on a real server, with the records of a controller that the test stands in for."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import zmq

from rlmq import cli_orders
from rlmq.buffer.redis_calls import RedisCalls
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Stage, Table
from rlmq.common.columns import Column
from rlmq.common.control import Snapshot
from rlmq.common.errors import DeadlineExceeded, DependencyError, UsageError
from rlmq.common.messages import Ordered, decode_report
from rlmq.common.recipe.load import load_recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller import events
from rlmq.controller.addresses import write_addresses
from rlmq.controller.runs import open_run

pytestmark = pytest.mark.timeout(60)

RECIPE = """
run: {name: c, seed: 7}
model: ./m
data: {train: t.jsonl, prompts_per_step: 4}
reward: [{function: "r.py:score"}, {function: "r.py:brevity", weight: 0.5}]
train: {steps: 30, lr: 1e-4}
"""
COLUMNS = (Column("sample_id", pa.string(), "prompts"),)
TABLES = [Table(name, COLUMNS, (Stage("rollout", ("sample_id",)),)) for name in ("train", "eval")]


class Steered:
    """A run folder and its server; the test stands in for the controller."""

    def __init__(self, folder: Path, url: str) -> None:
        (folder / "c.yaml").write_text(RECIPE)
        recipe = load_recipe(folder / "c.yaml", [f"run.folder={folder / 'runs'}"]).recipe
        self.run: RunFolder = open_run(recipe).run
        self.folder = folder / "runs"
        write_addresses(self.run, url)
        self.store = RedisStore(url, run_id=self.run.run_id, worker="x")
        self.store.open(TABLES)
        self.calls = RedisCalls(url, run_id=self.run.run_id)

    def snapshot(self, **fields: Any) -> None:
        known: dict[str, Any] = {"at_unix_s": time.time(), "run_id": self.run.run_id, "epoch": 1, "phase": "run"}
        known |= {"pid": 1, "host": "here", "step": 7, "steps": 30, "policy_version": 6}
        known |= {"members": (), "missing": (), "waits": ()}
        self.run.control.write_bytes(msgspec.json.encode(Snapshot(**known | fields)))

    def order(self, verb: Any, *, wait: bool = False, within_s: float = 5.0) -> int:
        return cli_orders.order_command(verb, None, folder=self.folder, wait=wait, within_s=within_s)

    def set(self, *words: str, wait: bool = False) -> int:
        return cli_orders.set_command(words, folder=self.folder, wait=wait, within_s=5.0)

    def obey(self, *commands: events.Command, **fields: Any) -> None:
        """Once an order is there: log it, and show the snapshot that it leads to."""
        deadline = time.monotonic() + 20
        while not (found := self.calls.orders(0)) and time.monotonic() < deadline:
            time.sleep(0.01)
        event = events.Ordered(at=time.time(), number=1, order=found[0])
        line = events.Line(at=event.at, epoch=1, event=event, commands=commands)
        self.run.control_log.write_bytes(msgspec.json.encode(line) + b"\n")
        self.snapshot(**fields)

    def end(self) -> None:
        self.calls.close()
        self.store.close()


@pytest.fixture
def steered(tmp_path: Path, redis_url: str) -> Iterator[Steered]:
    bench = Steered(tmp_path, redis_url)
    bench.calls.begin_epoch(fingerprint="f", lease_s=60)
    yield bench
    bench.end()


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_an_order_is_a_record_and_rings(steered: Steered, capsys: pytest.CaptureFixture[str]) -> None:
    # given the controller's socket
    steered.run.sockets.mkdir(mode=0o700, exist_ok=True)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(steered.run.reports_address)
        # when an operator asks for a pause
        assert steered.order("pause") == 0
        # then the controller is rung
        assert router.poll(10_000)
        assert isinstance(decode_report(router.recv_multipart()[-1]), Ordered)
    (steered.run.sockets / "reports").unlink(missing_ok=True)
    steered.run.sockets.rmdir()
    # and the records have the order, with who gave it
    [order] = steered.calls.orders(0)
    assert (order.verb, order.settings) == ("pause", {})
    assert order.by.endswith(f"@{platform.node()}")
    assert "order 1 is stored: pause" in capsys.readouterr().out


def test_the_effect_is_waited_for_and_told(steered: Steered, capsys: pytest.CaptureFixture[str]) -> None:
    steered.snapshot()
    thread = in_background(lambda: steered.obey(phase="pause"))

    assert steered.order("pause", wait=True, within_s=30) == 0

    thread.join()
    assert capsys.readouterr().out == "run c-1: paused at step 7 of 30\n"


def test_settings_apply_from_the_next_step(steered: Steered, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"train.steps": [(8, "40")], "reward.brevity.weight": [(3, "1"), (8, "0.25")]}
    kept = events.Keep(phase="run", orders=1, settings=settings)
    thread = in_background(lambda: steered.obey(kept))

    assert steered.set("c-1", "train.steps=40", "reward.weights.brevity=0.25", wait=True) == 0

    thread.join()
    [order] = steered.calls.orders(0)
    assert order.settings == {"train.steps": "40", "reward.brevity.weight": "0.25"}
    assert "train.steps=40, reward.brevity.weight=0.25 from step 8 on" in capsys.readouterr().out


def test_an_order_that_the_controller_refuses_is_an_error(steered: Steered) -> None:
    refused = events.Refuse(number=1, why="resume in phase run")
    thread = in_background(lambda: steered.obey(refused))

    with pytest.raises(UsageError, match=r"order 1, resume.*refused: resume in phase run"):
        steered.order("resume", wait=True)
    thread.join()


def test_an_order_without_an_effect_ends_at_its_deadline(steered: Steered) -> None:
    steered.snapshot()

    with pytest.raises(DeadlineExceeded, match=r"order 1 of run c-1, stop.*no word of the controller"):
        steered.order("stop", wait=True, within_s=0.3)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.step=3", r"KEY train\.step: .*one of reward\.score\.weight, .*Did you mean train\.steps\?"),
        ("rollout.temperature=1", r"KEY rollout\.temperature: got a key that cannot be set while the run goes on"),
        ("train.steps=many", r"train\.steps .*'many'"),
        ("checkpoint.every_steps=-1", r"checkpoint\.every_steps .*-1"),
        ("reward.score.weight=heavy", r"weight .*'heavy'"),
        ("nothing", r"set: got no KEY=VALUE"),
    ],
)
def test_what_cannot_be_set_is_said_in_one_message(steered: Steered, word: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        steered.set(word)

    assert steered.calls.orders(0) == []


def test_a_run_without_a_controller_takes_no_orders(tmp_path: Path, redis_url: str) -> None:
    bench = Steered(tmp_path, redis_url)
    try:
        with pytest.raises(DependencyError, match=r"run c-1: got no controller.*The command that began"):
            bench.order("pause")
        assert bench.calls.orders(0) == []
        bench.run.summary.write_text('{"exit": 0}')
        with pytest.raises(DependencyError, match=r"a run that has ended \(exit 0\)"):
            bench.order("pause")
    finally:
        bench.end()
