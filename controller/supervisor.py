"""Starts, watches and ends the processes of a run on this machine. It knows nothing else about the run.

::

    signal      controller                workers                     server
    SIGINT      SIGINT: saves, ends 130   SIGTERM once it has ended   SIGTERM at the end
    SIGTERM     SIGTERM: drains, ends     same                        same
    again       SIGKILL at once           SIGKILL                     SIGKILL

The controller's exit code is the run's. A worker that ends otherwise than asked is judged by
`restarts.judge`: started again within a budget, or the end of the run with its own error message.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rlmq.common.errors import ExitCode
from rlmq.common.processes import describe_exit, last_lines, reap, signal_group, spawn
from rlmq.common.run_folder import RunFolder
from rlmq.controller import guard
from rlmq.controller.commands import ProcessSpec
from rlmq.controller.last_words import failure, indented, used_up
from rlmq.controller.restarts import RestartBudget, judge
from rlmq.controller.server import Server, remove_socket_folder

_TICK_S = 0.25
_SIGNAL_CODES = 128
"""Exit codes from here on mean that a signal asked for the end."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the end of a run may take, in seconds from the order to stop."""

    controller_s: float = 8.3
    workers_s: float = 9.0
    everything_s: float = 9.7
    farewell_s: float = 5.0
    """For workers to end by themselves after a controller that ended by itself."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended: its exit code and, after a failure, one message."""

    exit_code: int
    message: str = ""


@dataclass(slots=True)
class Supervised:
    """One process and its history."""

    spec: ProcessSpec
    log: Path
    child: subprocess.Popen[bytes] | None = None
    log_from_byte: int = 0
    start_at_s: float | None = None
    budget: RestartBudget = field(default_factory=RestartBudget)
    starts: int = 0


def _nothing(_: object = None) -> None:
    pass


class Supervisor:
    """Supervises one run; `run()` returns when all its processes are gone.

    Args:
        run: its folder; logs go to `run.logs`.
        specs: the processes; the one with role `controller` ends the run by ending.
        server: the server to start first and end last; None when the user runs one.
        event: told one line about each restart and signal.
        tick: called about four times a second, on the calling thread.
        server_deadline_s: how long the server may take until it answers.
        patience: limits on the end.
    """

    def __init__(
        self,
        run: RunFolder,
        specs: Sequence[ProcessSpec],
        *,
        server: Server | None = None,
        event: Callable[[str], None] = _nothing,
        tick: Callable[[], None] = _nothing,
        server_deadline_s: float = 60.0,
        patience: Patience | None = None,
    ) -> None:
        self._run = run
        self._all = [Supervised(spec, run.logs / f"{spec.name}.log") for spec in specs]
        self._controller = next(p for p in self._all if p.spec.role == "controller")
        self._server = server
        self._server_budget = RestartBudget()
        self._server_start_at_s: float | None = None
        self._server_deadline_s = server_deadline_s
        self._event = event
        self._tick = tick
        self._patience = patience or Patience()
        self._signals: list[int] = []
        self._stop_signal: int | None = None
        self._stop_at_s = 0.0
        self._failed: Outcome | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def run(self) -> Outcome:
        """Start everything, supervise until the run ends, end everything.

        Raises:
            RlmqError: the server could not be started; nothing is left running.
        """
        with self._armed() as wake_fd:
            try:
                self._start_guard()
                outcome = self._start_all() or self._supervise(wake_fd)
            except BaseException:
                self._kill_all()
                raise
            finally:
                self._end_guard()
            return outcome

    def alive(self) -> dict[str, int]:
        """Names and pids of the processes that run now."""
        return {p.spec.name: p.child.pid for p in self._all if p.child is not None}

    def _start_all(self) -> Outcome | None:
        self._run.logs.mkdir(parents=True, exist_ok=True)
        if self._server is not None:
            self._watch_group(self._server.start().pid)
            self._server.wait_ready(self._server_deadline_s, stop=lambda: bool(self._signals))
        for process in self._all:
            if self._signals:
                break
            self._start(process)
        return None

    def _start(self, process: Supervised) -> None:
        process.start_at_s = None
        process.starts += 1
        with process.log.open("ab") as output:
            process.log_from_byte = output.tell()
            process.child = spawn(process.spec.argv, env=process.spec.full_environment(), output=output)
        self._watch_group(process.child.pid)

    def _supervise(self, wake_fd: int) -> Outcome:
        while True:
            outcome = self._follow_signals() or self._look_at_processes() or self._look_at_clock()
            self._tick()
            if outcome is not None:
                return outcome
            select.select([wake_fd], [], [], _TICK_S)
            with contextlib.suppress(BlockingIOError):
                os.read(wake_fd, 4096)

    def _follow_signals(self) -> Outcome | None:
        while self._signals:
            number = self._signals.pop(0)
            if self._stop_signal is not None:
                self._event("stopping at once")
                self._kill_all()
                return Outcome(128 + self._stop_signal)
            self._stop_signal, self._stop_at_s = number, time.monotonic()
            self._event(
                f"{signal.Signals(number).name}: saving what was trained, then ending; again to end at once"
            )
            if self._controller.child is None:
                return self._end(Outcome(128 + number))
            self._controller.child.send_signal(number)
        return None

    def _look_at_processes(self) -> Outcome | None:
        # The controller first: what the others do after its end is part of the end.
        for process in sorted(self._all, key=lambda p: p is not self._controller):
            code = self._ended(process)
            if code is None:
                continue
            outcome = (
                self._controller_ended(process, code)
                if process is self._controller
                else self._worker_ended(process, code)
            )
            if outcome is not None:
                return outcome
        return self._look_at_server()

    def _ended(self, process: Supervised) -> int | None:
        if process.child is None:
            return None
        code = reap(process.child)
        if code is not None:
            self._unwatch_group(process.child.pid)
            process.child = None
        return code

    def _controller_ended(self, process: Supervised, code: int) -> Outcome | None:
        if self._failed is not None:
            return self._end(self._failed)
        if self._stop_signal is not None:
            return self._end(self._as_asked(process, code, self._stop_signal))
        verdict = judge(code, controller=True)
        if verdict == "restart":
            return self._restart(process, code)
        told = verdict == "fatal" and code < _SIGNAL_CODES
        return self._end(Outcome(code, self._failure(process, code) if told else ""))

    def _as_asked(self, process: Supervised, code: int, number: int) -> Outcome:
        """The end after a signal: 130 for Ctrl-C; after SIGTERM 0 when the run was finished, else 143."""
        asked = 128 + number
        if code < 0 or code >= _SIGNAL_CODES or code == ExitCode.RESTART:
            return Outcome(asked)
        if code == 0:
            return Outcome(asked if number == signal.SIGINT else 0)
        return Outcome(code, self._failure(process, code))

    def _worker_ended(self, process: Supervised, code: int) -> Outcome | None:
        if self._stop_signal is not None or self._failed is not None:
            return None
        match judge(code, controller=False):
            case "finished":
                return None
            case "restart":
                return self._restart(process, code)
            case _:
                # The controller heard of it too: a moment for it to write the run's summary and end.
                self._failed = Outcome(code, self._failure(process, code))
                self._stop_at_s = time.monotonic()
                return None

    def _restart(self, process: Supervised, code: int) -> Outcome | None:
        now = time.monotonic()
        wait_s = process.budget.spend(now)
        if wait_s is None:
            exit_code = code if code > 0 else int(ExitCode.RESTART)
            budget = process.budget
            restarts = f"{budget.limit} restarts within {budget.window_s / 60:g} minutes"
            spec = process.spec
            words = used_up(spec.name, process.log, process.log_from_byte, code, spec.argv, restarts)
            return self._end(Outcome(exit_code, words))
        process.start_at_s = now + wait_s
        used, limit = len(process.budget.spent), process.budget.limit
        self._event(f"{process.spec.name} ended with {describe_exit(code)}; starting it again ({used} of {limit})")
        return None

    def _look_at_server(self) -> Outcome | None:
        server = self._server
        if server is None or server.child is None or self._stop_signal is not None or self._failed is not None:
            return None
        code = reap(server.child)
        if code is None:
            return None
        self._unwatch_group(server.child.pid)
        server.child = None
        now = time.monotonic()
        wait_s = self._server_budget.spend(now)
        if wait_s is None:
            tail = indented(last_lines(server.log, 5))
            got = f"{describe_exit(code)} again and again; its last lines:\n{tail}\n"
            message = f"Redis server: got {got}See {server.log}."
            return self._end(Outcome(int(ExitCode.DEPENDENCY), message))
        self._server_start_at_s = now + wait_s
        self._event(f"the Redis server ended with {describe_exit(code)}; starting it again")
        return None

    def _look_at_clock(self) -> Outcome | None:
        now = time.monotonic()
        if self._stop_signal is not None:
            if now - self._stop_at_s >= self._patience.controller_s:
                self._event("the controller did not end in time")
                return self._end(Outcome(128 + self._stop_signal))
            return None
        if self._failed is not None:
            return self._end(self._failed) if now - self._stop_at_s >= self._patience.farewell_s else None
        if self._server is not None and self._server_start_at_s is not None and now >= self._server_start_at_s:
            self._server_start_at_s = None
            self._watch_group(self._server.start().pid)
        for process in self._all:
            if process.start_at_s is not None and now >= process.start_at_s:
                self._start(process)
        return None

    def _end(self, outcome: Outcome) -> Outcome:
        """End what still runs: workers first ask themselves to, then SIGTERM, then SIGKILL; the server last."""
        now = time.monotonic()
        began = self._stop_at_s if self._stop_signal is not None else now
        by_itself = outcome.exit_code == 0 and self._stop_signal is None
        grace_s = self._patience.farewell_s if by_itself else 0.0
        began += grace_s
        self._wait_for_end(now + grace_s)
        self._signal_all(signal.SIGTERM)
        self._wait_for_end(began + self._patience.workers_s)
        self._kill_workers()
        if self._server is not None:
            self._server.stop(max(0.1, began + self._patience.everything_s - time.monotonic()))
        remove_socket_folder(self._run)
        return outcome

    def _wait_for_end(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            if not any(self._ended(p) is None and p.child is not None for p in self._all):
                return
            if self._signals and self._stop_signal is not None:  # a second one: at once
                return
            self._tick()
            time.sleep(0.02)

    def _signal_all(self, number: int) -> None:
        for process in self._all:
            if process.child is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.child.send_signal(number)

    def _kill_workers(self) -> None:
        for process in self._all:
            if process.child is not None:
                signal_group(process.child.pid, signal.SIGKILL)
                process.child.wait()
                self._unwatch_group(process.child.pid)
                process.child = None

    def _kill_all(self) -> None:
        self._kill_workers()
        if self._server is not None:
            self._server.stop(0.5)
        remove_socket_folder(self._run)

    def _failure(self, process: Supervised, code: int) -> str:
        return failure(process.spec.name, process.log, process.log_from_byte, code)

    @contextlib.contextmanager
    def _armed(self) -> Iterator[int]:
        """Take the signals for the time of the run; yields a descriptor that is readable after one."""
        read_fd, write_fd = os.pipe()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _on_child)
        wakeup = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        try:
            yield read_fd
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(read_fd)
            os.close(write_fd)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(signal.SIGTERM if number == signal.SIGHUP else number)

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(guard.__file__), str(self._run.sockets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    def _tell_guard(self, word: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):  # without its guard the run goes on
                self._guard.stdin.write(f"{word}\n".encode())
                self._guard.stdin.flush()

    def _watch_group(self, group: int) -> None:
        self._tell_guard(f"+{group}")

    def _unwatch_group(self, group: int) -> None:
        self._tell_guard(f"-{group}")

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._tell_guard("done")
            if self._guard.stdin is not None:
                with contextlib.suppress(OSError):
                    self._guard.stdin.close()
            self._guard.wait()
            self._guard = None


def _on_child(_number: int, _frame: FrameType | None) -> None:
    """Only wakes the loop."""
