"""Starts, watches and ends the processes of a run on this machine. It knows nothing else about the run.

::

    signal      controller                workers                     server
    SIGINT      SIGINT: saves, ends 130   SIGTERM once it has ended   SIGTERM at the end
    SIGTERM     SIGTERM: drains, ends     same                        same
    again       SIGKILL at once           SIGKILL                     SIGKILL

The controller's exit code is the run's; after SIGTERM it is 0 when everything was done in time. A worker that ends
otherwise than asked is judged by `restarts.judge`: started again within a budget, or the end of the run with its
own error message. One that the controller has lost (stopped, or cut off) is killed and started again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from rlmq.common.control import Death
from rlmq.common.errors import ExitCode
from rlmq.common.processes import cpu_seconds, describe_exit, last_lines, reap
from rlmq.common.run_folder import RunFolder
from rlmq.controller.commands import ProcessSpec
from rlmq.controller.fork_server import Forks
from rlmq.controller.guard import Guard
from rlmq.controller.history import History
from rlmq.controller.last_words import failure, how, indented, used_up
from rlmq.controller.restarts import RestartBudget, judge
from rlmq.controller.server import Server, remove_socket_folder
from rlmq.controller.supervised import Supervised

_TICK_S = 0.25
_LOOK_S = 1.0
_LOOKS = 2
"""So often in a row a lost member's process must have been found idle before it is killed."""
_BUSY = 0.03
"""Who uses this share of a core computes, and may hold up its own heartbeat (one long text to a tokenizer does)."""
_LEFT_S = 3.0
"""A worker that left by itself is started again after this, unless the run ends."""
_SERVER_RETRY_S = 60.0
"""So long the controller may wait for the server, and write no snapshot."""
_SIGNAL_CODES = 128
"""Exit codes from here on mean that a signal asked for the end."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the end of a run may take, in seconds from the order to stop."""

    controller_s: float
    workers_s: float
    everything_s: float
    farewell_s: float = 5.0
    """For workers to end by themselves after a controller that ended by itself."""

    @classmethod
    def within(cls, drain_s: float) -> Patience:
        """Everyone has `drain_s`; the controller, which waits for the workers, and the server a moment more."""
        return cls(controller_s=drain_s + 0.3, workers_s=drain_s + 1.0, everything_s=drain_s + 1.7)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended: its exit code and, after a failure, one message."""

    exit_code: int
    message: str = ""


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
        joined: asked once a second for processes that came to the run; new ones are started.
        modules: what processes that are forked have imported.
        server_deadline_s: how long the server may take until it answers.
        silence_s: after this, and the time in which a lost server is waited for, a silent controller is replaced.
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
        joined: Callable[[], Sequence[ProcessSpec]] = lambda: (),
        modules: Sequence[str] = (),
        server_deadline_s: float = 60.0,
        silence_s: float = 30.0,
        patience: Patience | None = None,
    ) -> None:
        self._run = run
        self._specs = specs
        self._history = History(run)
        self._all: list[Supervised] = []
        self._server = server
        self._server_budget = RestartBudget()
        self._server_start_at_s: float | None = None
        self._server_deadline_s = server_deadline_s
        self._event = event
        self._tick = tick
        self._joined = joined
        self._modules = modules
        self._silence_s = silence_s
        self._patience = patience or Patience.within(8.0)
        self._signals: list[int] = []
        self._stop_signal: int | None = None
        self._stop_at_s = 0.0
        self._failed: Outcome | None = None
        self._looked_at_s = 0.0
        self._lost: dict[int, tuple[int, float]] = {}

    def run(self) -> Outcome:
        """Start everything, supervise until the run ends, end everything.

        Raises:
            RlmqError: the server could not be started; nothing is left running.
        """
        self._run.logs.mkdir(parents=True, exist_ok=True)
        self._guard = Guard(self._run.sockets)
        self._forks = Forks(self._modules, self._run.logs / "fork_server.log", self._event)
        with contextlib.closing(self._guard), contextlib.closing(self._forks), self._armed() as wake_fd:
            self._all = [self._supervised(spec) for spec in self._specs]
            self._controller = next(p for p in self._all if p.spec.role == "controller")
            try:
                self._start_all()
                return self._supervise(wake_fd)
            except BaseException:
                self._kill_all("the supervisor failed")
                raise

    def alive(self) -> dict[str, int]:
        """Names and pids of the processes that run now."""
        return {p.name: p.pid for p in self._all if p.pid is not None}

    def _start_all(self) -> None:
        self._history.look()
        if self._server is not None:
            self._start_server(self._server)
            self._server.wait_ready(self._server_deadline_s, stop=lambda: bool(self._signals))
        for process in sorted(self._all, key=lambda p: p.spec.forked):
            if process.spec.forked:
                self._forks.wait_ready(self._server_deadline_s, stop=lambda: bool(self._signals), tick=self._tick)
            if self._signals:
                break
            process.start()

    def _supervised(self, spec: ProcessSpec) -> Supervised:
        return Supervised(spec, self._run, self._history, self._guard, self._forks)

    def _supervise(self, wake_fd: int) -> Outcome:
        while True:
            outcome = self._follow_signals() or self._look_at_processes() or self._look_at_clock()
            self._tick()
            if outcome is not None:
                return outcome
            select.select([wake_fd], [], [], _TICK_S)
            with contextlib.suppress(BlockingIOError):
                os.read(wake_fd, 4096)

    # -- signals ---------------------------------------------------------------------------------------------

    def _follow_signals(self) -> Outcome | None:
        while self._signals:
            number = self._signals.pop(0)
            if self._stop_signal is not None:
                self._event("stopping at once")
                self._kill_all("a second signal")
                return Outcome(128 + self._stop_signal)
            self._stop_signal, self._stop_at_s = number, time.monotonic()
            self._event(
                f"{signal.Signals(number).name}: saving what was trained, then ending; again to end at once"
            )
            if self._controller.child is None:
                return self._end(Outcome(128 + number))
            self._controller.signal(number)
        return None

    # -- ends ------------------------------------------------------------------------------------------------

    def _look_at_processes(self) -> Outcome | None:
        # The controller first: what the others do after its end is part of the end.
        for process in sorted(self._all, key=lambda p: p is not self._controller):
            death = process.ended()
            if death is None:
                continue
            outcome = (
                self._controller_ended(process, death)
                if process is self._controller
                else self._worker_ended(process, death)
            )
            if outcome is not None:
                return outcome
        return self._look_at_server()

    def _controller_ended(self, process: Supervised, death: Death) -> Outcome | None:
        code = _code(death)
        if self._failed is not None:
            return self._end(self._failed)
        if self._stop_signal is not None:
            return self._end(self._as_asked(process, death, self._stop_signal))
        verdict = judge(code, controller=True)
        if verdict == "restart":
            return self._restart(process, death)
        if verdict == "fatal" and code < _SIGNAL_CODES:
            return self._end(Outcome(code, failure(death, process.log, process.log_from_byte)))
        return self._end(Outcome(code))

    def _as_asked(self, process: Supervised, death: Death, number: int) -> Outcome:
        """The end after a signal: 130 for Ctrl-C; after SIGTERM 0 when all was done in time, else 143."""
        asked, code = 128 + number, _code(death)
        if code < 0 or code >= _SIGNAL_CODES or code == ExitCode.RESTART:
            return Outcome(asked)
        if code == 0:
            return Outcome(asked if number == signal.SIGINT else 0)
        return Outcome(code, failure(death, process.log, process.log_from_byte))

    def _worker_ended(self, process: Supervised, death: Death) -> Outcome | None:
        if self._stop_signal is not None or self._failed is not None:
            return None
        match judge(_code(death), controller=False):
            case "finished":
                process.left, process.start_at_s = True, time.monotonic() + _LEFT_S
                return None
            case "restart":
                return self._restart(process, death)
            case _ if process.spec.joined:
                return self._go_on_without(process, death)
            case _:
                # The controller heard of it too: a moment for it to write the run's summary and end.
                self._failed = Outcome(_code(death), failure(death, process.log, process.log_from_byte))
                self._stop_at_s = time.monotonic()
                return None

    def _restart(self, process: Supervised, death: Death) -> Outcome | None:
        budget = process.budget
        if process.spend() is None:
            if process.spec.joined:
                return self._go_on_without(process, death)
            code = _code(death)
            restarts = f"{budget.limit} restarts within {budget.window_s / 60:g} minutes"
            words = used_up(death, process.log, process.spec.argv, restarts)
            return self._end(Outcome(code if code > 0 else int(ExitCode.RESTART), words))
        used = f"{len(budget.spent)} of {budget.limit}"
        self._event(f"{process.name} ended with {how(death)}; starting it again ({used})")
        return None

    def _go_on_without(self, process: Supervised, death: Death) -> Outcome | None:
        self._event(f"{process.name} ended with {how(death)}; the run goes on without it, see {process.log}")
        return None

    def _look_at_server(self) -> Outcome | None:
        server = self._server
        if server is None or server.child is None or self._stop_signal is not None or self._failed is not None:
            return None
        pid, code = server.child.pid, reap(server.child)
        if code is None:
            return None
        self._guard.unwatch(pid)
        server.child = None
        lines = last_lines(server.log, 5, from_byte=server.log_from)
        death = self._history.write("redis-0", "ended", pid, exit_code=code, last_lines=lines)
        now = time.monotonic()
        wait_s = self._server_budget.spend(now)
        if wait_s is None:
            got = f"{describe_exit(code)} again and again; its last lines:\n{indented(death.last_lines)}\n"
            message = f"Redis server: got {got}See {server.log}."
            return self._end(Outcome(int(ExitCode.DEPENDENCY), message))
        self._server_start_at_s = now + wait_s
        self._event(f"the Redis server ended with {describe_exit(code)}; starting it again")
        return None

    # -- time ------------------------------------------------------------------------------------------------

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
            self._start_server(self._server)
        for process in self._all:
            if process.start_at_s is not None and now >= process.start_at_s:
                self._start_again(process)
        if now - self._looked_at_s >= _LOOK_S:
            self._looked_at_s = now
            self._history.look()
            self._kill_silent()
            self._start_joined()
        return None

    def _start_joined(self) -> None:
        names = {process.name for process in self._all}
        for spec in self._joined():
            if spec.name not in names:
                self._event(f"{spec.name} joins the run")
                self._all.append(self._supervised(spec))
                self._all[-1].start()

    def _start_again(self, process: Supervised) -> None:
        if process.left and not self._history.goes_on:  # yet: the next controller may want it
            process.start_at_s = time.monotonic() + _LEFT_S
            return
        spent, limit = len(process.budget.spent), process.budget.limit
        process.start("it had left" if process.left else f"restart {spent} of {limit}")

    def _start_server(self, server: Server) -> None:
        self._server_start_at_s = None
        pid = server.start().pid
        self._guard.watch(pid)
        self._history.write("redis-0", "started", pid)

    def _kill_silent(self) -> None:
        """So that they are started again: workers that the controller has lost, and a controller without a word."""
        controller = self._controller
        if controller.pid is None:
            return
        lost = {member.pid: member.silent_s for member in self._history.lost(controller.pid)}
        before, self._lost = self._lost, {}
        for process in self._all:
            if process.pid is None or process.pid not in lost:
                continue
            cpu_s = cpu_seconds(process.pid)
            looks, cpu_before_s = before.get(process.pid, (0, cpu_s))
            idle = cpu_s - cpu_before_s < _BUSY * _LOOK_S
            self._lost[process.pid] = (looks + 1 if idle else 0, cpu_s)
            if looks >= _LOOKS and idle:
                process.kill(f"silent for {lost[process.pid]:.0f} s")
        silent_s = min(controller.age_s, self._history.silent_s)
        if silent_s > self._silence_s + _SERVER_RETRY_S:
            controller.kill(f"no snapshot for {silent_s:.0f} s")

    # -- the end ---------------------------------------------------------------------------------------------

    def _end(self, outcome: Outcome) -> Outcome:
        """End what still runs: workers first ask themselves to, then SIGTERM, then SIGKILL; the server last."""
        now = time.monotonic()
        began = self._stop_at_s if self._stop_signal is not None else now
        by_itself = outcome.exit_code == 0 and self._stop_signal is None
        grace_s = self._patience.farewell_s if by_itself else 0.0
        began += grace_s
        self._wait_for_end(now + grace_s)
        for process in self._all:
            process.signal(signal.SIGTERM)
        self._wait_for_end(began + self._patience.workers_s)
        self._kill_processes("did not end in time")
        self._stop_server(max(0.1, began + self._patience.everything_s - time.monotonic()))
        return outcome

    def _wait_for_end(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            for process in self._all:
                process.ended()
            if not self.alive():
                return
            if self._signals and self._stop_signal is not None:  # a second one: at once
                return
            self._tick()
            time.sleep(0.02)

    def _kill_all(self, why: str) -> None:
        self._kill_processes(why)
        self._stop_server(0.5)

    def _kill_processes(self, why: str) -> None:
        for process in self._all:
            process.kill(why)
        for process in self._all:
            process.ended(wait=True)

    def _stop_server(self, within_s: float) -> None:
        server = self._server
        if server is not None and server.child is not None:
            child = server.child
            server.stop(within_s)
            self._history.write("redis-0", "ended", child.pid, exit_code=child.returncode, why="the run ended")
        remove_socket_folder(self._run)

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


def _on_child(_number: int, _frame: FrameType | None) -> None:
    """Only wakes the loop."""


def _code(death: Death) -> int:
    return death.exit_code or 0
