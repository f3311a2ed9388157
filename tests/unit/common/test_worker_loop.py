"""The worker loop with an echo role: real Redis records, real sockets, the loop on a thread of the test."""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common import watch
from rlmq.common.bus import ControllerBus
from rlmq.common.calls import Call, Desired
from rlmq.common.errors import UsageError
from rlmq.common.logs import configure
from rlmq.common.messages import CallBell, DesiredBell, Goodbye, Heartbeat, Report
from rlmq.common.metrics import STALE_COMMANDS
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.common.worker_loop import Worker, raise_if_stopping

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
        self.close_fails: Exception | None = None
        self.go_on = threading.Event()

    def handlers(self) -> Mapping[str, CallHandler]:
        return {"echo": self.echo, "fail": self.fail, "hold": self.hold}

    def echo(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append(args["number"])
        return {"number": args["number"]}

    def fail(self, args: Mapping[str, Any]) -> dict[str, Any]:
        raise UsageError("echo", got="a wrong call", expected="another")

    def hold(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """A long computation, in steps when it is told so; gives up at a boundary."""
        while not self.go_on.wait(0.01):
            if args["number"]:
                raise_if_stopping(self.context)
        return {}

    def work(self) -> bool:
        self.worked += 1
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        self.context.waits("rows of stage echo")
        select.select([wake_fd], [], [], timeout_s)

    def close(self) -> None:
        self.closed += 1
        if self.close_fails is not None:
            raise self.close_fails


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

    def start(self, window_s: float | None = None) -> None:
        log = configure("reward", 0)
        worker = Worker(RECIPE, self.folder.path, self.folder, "reward", 0, self.calls, "f", log, window_s=window_s)

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

    def heartbeats(self) -> list[Heartbeat]:
        return [report for report in self.reports() if isinstance(report, Heartbeat)]

    def goodbyes(self) -> list[Goodbye]:
        return [report for report in self.reports() if isinstance(report, Goodbye)]

    def reports(self) -> list[Report]:
        self.heard.extend(self.bus.reports())
        return self.heard

    def end(self) -> None:
        self.want("stop", 1000)
        if self.role is not None:
            self.role.go_on.set()
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


def test_a_heartbeat_says_which_process_does_what_and_for_how_long(run: Run) -> None:
    run.want("run", 4)
    run.start()
    # when it has nothing to do, then it says what it waits for, since when, as which process
    wait_until(lambda: any(beat.wait_s > 1.0 for beat in run.heartbeats()))
    idle = next(beat for beat in run.heartbeats() if beat.wait_s > 1.0)
    assert (idle.wait, idle.call, idle.pid, idle.host) == ("rows of stage echo", "", os.getpid(), platform.node())
    assert idle.desired == 4
    assert idle.still_s >= idle.wait_s > 1.0
    # when it works on a call, then it says which, and waits no more
    run.submit("1/1/reward.hold", method="hold")
    wait_until(lambda: any(beat.call == "1/1/reward.hold" and beat.still_s > 1.0 for beat in run.heartbeats()))
    assert run.heartbeats()[-1].wait == ""
    # when that is done, then it says so
    assert run.role is not None
    run.role.go_on.set()
    wait_until(lambda: run.heartbeats()[-1].call == "")


def test_in_another_phase_it_waits_for_phase_run(run: Run) -> None:
    run.want("pause", 1)
    run.start()
    wait_until(lambda: any(beat.wait == "phase run" for beat in run.heartbeats()))


@pytest.fixture
def fast_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_TICK_S", 0.05)


def test_a_worker_with_a_broken_link_joins_anew_and_keeps_its_role(run: Run, fast_watch: None) -> None:
    # given a worker that hears no beat although a controller's lease is live
    run.want("run", 1)
    run.bus.close()
    run.start(window_s=0.5)
    wait_until(lambda: _incarnation(run) >= 2)
    # when the link is whole again
    role = run.role
    run.bus = ControllerBus(run.folder, epoch=run.epoch, tick=lambda: None, tick_s=1.0)
    wait_until(lambda: any(beat.ready and beat.incarnation >= 2 for beat in run.heartbeats()))
    # then the same role works on
    run.submit("1/1/reward.echo", number=3)
    wait_until(lambda: bool(run.calls.results("1/1/reward.echo")))
    assert role is run.role
    assert role is not None
    assert role.calls == [3]
    assert run.code is None


def _incarnation(run: Run) -> int:
    """The newest incarnation of the worker, as the role knows it."""
    return run.role.context.incarnation if run.role is not None else 0


def test_a_call_that_is_given_up_for_a_broken_link_restarts_the_process(run: Run, fast_watch: None) -> None:
    run.bus.close()
    run.submit("1/1/reward.hold", method="hold", number=1)
    run.start(window_s=0.5)
    wait_until(lambda: run.code == 75)
    assert run.calls.results("1/1/reward.hold") == []
    run.bus = ControllerBus(run.folder, epoch=run.epoch, tick=lambda: None, tick_s=1.0)


def test_a_killed_controller_leaves_its_workers_up(run: Run, fast_watch: None) -> None:
    # given a worker whose controller is gone, and its lease with it
    run.start(window_s=0.5)
    wait_until(lambda: any(beat.ready for beat in run.heartbeats()))
    run.calls.end_epoch(run.epoch)
    run.bus.close()
    time.sleep(1.5)
    # when a new controller begins, then the worker is the same as before
    run.epoch = run.calls.begin_epoch(fingerprint="f", lease_s=60)
    run.heard.clear()
    run.bus = ControllerBus(run.folder, epoch=run.epoch, tick=lambda: None, tick_s=1.0)
    wait_until(lambda: any(beat.ready for beat in run.heartbeats()))
    assert _incarnation(run) == 1


def test_a_new_epoch_is_obeyed_right_after_a_long_computation(run: Run) -> None:
    # given a worker inside a long call
    run.want("run", 1)
    run.submit("1/1/reward.hold", method="hold")
    run.start()
    wait_until(lambda: any(beat.call == "1/1/reward.hold" for beat in run.heartbeats()))
    # when the controller ends and another begins, which wants something else
    run.calls.end_epoch(run.epoch)
    run.epoch = run.calls.begin_epoch(fingerprint="f", lease_s=60)
    run.want("pause", 2)
    assert run.role is not None
    run.role.go_on.set()
    # then the worker follows at once, and its result counts
    wait_until(lambda: run.heartbeats()[-1].desired == 2)
    assert len(run.calls.results("1/1/reward.hold")) == 1


def test_commands_older_than_one_it_has_seen_are_counted_and_ignored(run: Run) -> None:
    # given a worker that has seen epoch 9 and version 7
    run.want("run", 7)
    run.start()
    wait_until(lambda: run.role is not None and run.role.worked > 0)
    wait_until(lambda: any(beat.ready for beat in run.heartbeats()))
    before = STALE_COMMANDS._value.get()
    run.bus.ring("reward", DesiredBell(Desired(role="reward", version=6, phase="stop", epoch=run.epoch)))
    wait_until(lambda: STALE_COMMANDS._value.get() == before + 1)
    run.bus.ring("reward", DesiredBell(Desired(role="reward", version=8, phase="run", epoch=9)))
    wait_until(lambda: run.heartbeats()[-1].desired == 8)
    # when an older controller rings, with a version that is greater
    run.bus.ring("reward", DesiredBell(Desired(role="reward", version=99, phase="stop", epoch=8)))
    # then nothing follows
    wait_until(lambda: STALE_COMMANDS._value.get() == before + 2)
    run.submit("1/1/reward.echo")
    wait_until(lambda: bool(run.calls.results("1/1/reward.echo")))
    assert run.code is None


def test_a_close_that_fails_is_told_and_the_goodbye_is_said(run: Run) -> None:
    run.start()
    wait_until(lambda: any(beat.ready for beat in run.heartbeats()))
    assert run.role is not None
    run.role.close_fails = RuntimeError("cannot close")
    run.want("stop", 3)
    wait_until(lambda: run.code == 1)
    wait_until(lambda: any("cannot close" in bye.error for bye in run.goodbyes()))


def test_the_first_error_is_told_when_closing_fails_too(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run.start()
    wait_until(lambda: run.role is not None)
    assert run.role is not None
    run.role.close_fails = RuntimeError("cannot close")
    run.submit("1/1/reward.fail", method="fail")
    wait_until(lambda: run.code == 2)
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == ["error: echo: got a wrong call, expected another."]


def start_process(run: Run, drain_s: float, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__).with_name("echo_worker.py")), str(run.folder.path)]
    server = run.calls._client.connection_pool.connection_kwargs["path"]
    env = {**os.environ, **variables}
    return subprocess.Popen([*command, f"unix://{server}", str(drain_s)], stderr=subprocess.DEVNULL, env=env)


def test_systemd_is_told_of_readiness_life_and_end_and_not_of_a_hang(run: Run, tmp_path: Path) -> None:
    # given a service manager that wants a sign of life every 0.4 s
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)

        def told() -> str:
            return manager.recv(4096).decode()

        # when a worker starts, then it is ready, and lives while it is idle
        variables = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        process = start_process(run, drain_s=1, **variables)
        assert "READY=1" in [line for _ in range(2) for line in told().splitlines()]
        assert {told() for _ in range(3)} == {"WATCHDOG=1"}
        # when it hangs in a call, then there is no sign for more than a period
        call = run.submit("1/1/reward.hold", method="hold")
        wait_until(lambda: any(beat.call == call.id for beat in run.heartbeats()), 30)
        manager.setblocking(False)
        with suppress(BlockingIOError):
            while told():
                pass
        manager.settimeout(1.0)
        with pytest.raises(TimeoutError):
            told()
        # when it is told to end, then it says that it does
        manager.settimeout(30)
        process.terminate()
        assert told().startswith("STOPPING=1")
        process.wait(timeout=30)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_makes_an_idle_worker_leave(run: Run, number: int, code: int) -> None:
    process = start_process(run, drain_s=60)
    wait_until(lambda: any(beat.ready for beat in run.heartbeats()), 30)
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    wait_until(lambda: [bye.exit_code for bye in run.goodbyes()] == [code])


def test_work_that_can_be_given_up_is_given_up_on_sigterm(run: Run) -> None:
    # given a worker inside a call with boundaries
    call = run.submit("1/1/reward.hold", method="hold", number=1)
    process = start_process(run, drain_s=60)
    wait_until(lambda: any(beat.call == call.id for beat in run.heartbeats()), 30)
    # when it is told to end, then it leaves well and the call stays open
    process.terminate()
    assert process.wait(timeout=30) == 0
    assert run.calls.next("reward", 0) == call
    wait_until(lambda: [bye.exit_code for bye in run.goodbyes()] == [0])


def test_work_that_goes_on_is_cut_when_the_time_to_drain_is_over(run: Run) -> None:
    call = run.submit("1/1/reward.hold", method="hold")
    process = start_process(run, drain_s=0.3)
    wait_until(lambda: any(beat.call == call.id for beat in run.heartbeats()), 30)
    process.terminate()
    assert process.wait(timeout=30) == 143


def test_a_role_that_cannot_be_built_says_goodbye(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Echo, context: WorkerContext) -> None:
        raise UsageError("echo", got="nothing", expected="something")

    monkeypatch.setattr(Echo, "__init__", refuse)
    run.start()
    wait_until(lambda: run.code == 2)
    wait_until(lambda: any(bye.exit_code == 2 for bye in run.goodbyes()))
