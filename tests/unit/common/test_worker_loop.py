"""The worker loop with an echo role: real Redis records, real sockets, the loop on a thread of the test."""

from __future__ import annotations

import select
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.bus import ControllerBus
from rlmq.common.calls import Call, Desired
from rlmq.common.errors import UsageError
from rlmq.common.logs import configure
from rlmq.common.messages import CallBell, DesiredBell, Goodbye, Heartbeat, Report
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.common.worker_loop import Worker

RECIPE = Recipe.model_validate_json(
    '{"run": {"name": "echo"}, "model": "m", "data": {"train": "t"}, "reward": [{"function": "r.py:f"}],'
    ' "train": {"steps": 1}}'
)


class Echo:
    """Counts what it is asked to do."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.calls: list[int] = []
        self.worked = 0
        self.closed = 0

    def handlers(self) -> Mapping[str, CallHandler]:
        return {"echo": self.echo, "fail": self.fail}

    def echo(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append(args["number"])
        return {"number": args["number"]}

    def fail(self, args: Mapping[str, Any]) -> dict[str, Any]:
        raise UsageError("echo", got="a wrong call", expected="another")

    def work(self) -> bool:
        self.worked += 1
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        select.select([wake_fd], [], [], timeout_s)

    def close(self) -> None:
        self.closed += 1


class Run:
    """One worker on a thread, and the records and socket of its controller."""

    def __init__(self, calls: RedisCalls, folder: Path) -> None:
        self.calls = calls
        self.folder = RunFolder(folder)
        self.epoch = calls.begin_epoch(fingerprint="f", lease_s=60)
        self.bus = ControllerBus(self.folder, epoch=1, tick=lambda: None, tick_s=1.0)
        self.code: int | None = None
        self.role: Echo | None = None
        self.heard: list[Report] = []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        log = configure("reward", 0)
        worker = Worker(RECIPE, self.folder.path, self.folder, "reward", 0, self.calls, "f", log)

        def make(context: WorkerContext) -> Echo:
            self.role = Echo(context)
            return self.role

        def work() -> None:
            self.code = worker.run(make)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def want(self, phase: Any, version: int) -> None:
        self.calls.want(Desired(role="reward", version=version, phase=phase, epoch=self.epoch))

    def submit(self, call_id: str, method: str = "echo", number: int = 0) -> Call:
        call = Call(id=call_id, role="reward", method=method, ranks=(0,), args={"number": number}, epoch=self.epoch)
        self.calls.submit(call)
        return call

    def reports(self) -> list[Report]:
        self.heard.extend(self.bus.reports())
        return self.heard

    def end(self) -> None:
        self.want("stop", 1000)
        if self._thread is not None:
            self._thread.join(timeout=10)
            assert not self._thread.is_alive()
        self.bus.close()


@pytest.fixture
def run(redis_url: str) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="rlmq-loop-") as folder:
        made = Run(RedisCalls(redis_url, run_id="loop"), Path(folder))
        yield made
        made.end()


def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)


def test_a_call_without_a_doorbell_is_found_in_the_records(run: Run) -> None:
    run.submit("1/1/reward.echo", number=5)
    run.start()
    wait_until(lambda: bool(run.calls.results("1/1/reward.echo")))
    assert run.calls.results("1/1/reward.echo")[0].value == {"number": 5}


def test_a_call_whose_doorbell_rings_three_times_is_executed_once(run: Run) -> None:
    run.start()
    wait_until(lambda: any(isinstance(r, Heartbeat) and r.ready for r in run.reports()))
    call = run.submit("1/1/reward.echo", number=1)
    for _ in range(3):
        run.bus.ring("reward", CallBell(call))
    wait_until(lambda: bool(run.calls.results(call.id)))
    run.submit("1/2/reward.echo", number=2)
    wait_until(lambda: bool(run.calls.results("1/2/reward.echo")))
    assert run.role is not None
    assert run.role.calls == [1, 2]


def test_calls_are_handled_in_the_order_of_their_submission(run: Run) -> None:
    for number in range(5):
        run.submit(f"1/{number}/reward.echo", number=number)
    run.start()
    wait_until(lambda: bool(run.calls.results("1/4/reward.echo")))
    assert run.role is not None
    assert run.role.calls == [0, 1, 2, 3, 4]


def test_rows_are_worked_on_in_phase_run_only(run: Run) -> None:
    run.want("pause", 1)
    run.start()
    wait_until(lambda: run.role is not None and any(isinstance(r, Heartbeat) and r.ready for r in run.reports()))
    run.submit("1/1/reward.echo")
    wait_until(lambda: bool(run.calls.results("1/1/reward.echo")))
    assert run.role is not None
    assert run.role.worked == 0
    run.want("run", 2)
    role = run.role
    wait_until(lambda: role.worked > 0)


def test_stop_ends_the_process_which_says_goodbye(run: Run) -> None:
    run.start()
    wait_until(lambda: any(isinstance(r, Heartbeat) and r.ready for r in run.reports()))
    run.want("stop", 3)
    wait_until(lambda: run.code == 0)
    wait_until(lambda: any(isinstance(r, Goodbye) and r.exit_code == 0 for r in run.reports()))
    assert run.role is not None
    assert run.role.closed == 1


def test_a_stop_from_before_it_joined_is_not_its_own(run: Run) -> None:
    # given the record that the end of an earlier process left
    run.want("stop", 4)
    run.start()
    run.submit("1/1/reward.echo")
    # then it waits, and takes calls
    wait_until(lambda: bool(run.calls.results("1/1/reward.echo")))
    assert run.code is None


def test_a_lower_version_than_seen_is_ignored(run: Run) -> None:
    run.want("run", 7)
    run.start()
    wait_until(lambda: run.role is not None and run.role.worked > 0)
    run.bus.ring("reward", DesiredBell(Desired(role="reward", version=6, phase="stop", epoch=run.epoch)))
    run.submit("1/1/reward.echo")
    wait_until(lambda: bool(run.calls.results("1/1/reward.echo")))
    assert run.code is None


def test_a_failed_call_ends_the_process_with_its_exit_code_and_no_result(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.submit("1/1/reward.fail", method="fail")
    run.start()
    wait_until(lambda: run.code == 2)
    assert run.calls.results("1/1/reward.fail") == []
    wait_until(lambda: any(isinstance(r, Goodbye) and r.exit_code == 2 for r in run.reports()))
    assert "error: echo: got a wrong call, expected another." in capfd.readouterr().err.splitlines()


def test_an_unknown_method_is_named(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run.submit("1/1/reward.dance", method="dance")
    run.start()
    wait_until(lambda: run.code is not None)
    assert "dance" in capfd.readouterr().err
