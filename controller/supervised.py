"""One process under supervision, from start to end and to the next start."""

from __future__ import annotations

import contextlib
import time

from rlmq.common.control import Death
from rlmq.common.processes import Child, end_family, last_lines, reap
from rlmq.common.run_folder import RunFolder
from rlmq.controller.commands import ProcessSpec
from rlmq.controller.fork_server import Forks
from rlmq.controller.guard import Guard
from rlmq.controller.history import History
from rlmq.controller.restarts import RestartBudget

_LINES = 8
_GOOD_LIFE_S = 20.0


class Supervised:
    """A process of the run, and what it has left of its restarts."""

    def __init__(self, spec: ProcessSpec, run: RunFolder, history: History, guard: Guard, forks: Forks) -> None:
        self.spec = spec
        self.log = run.logs / f"{spec.name}.log"
        self.log_from_byte = 0
        self.child: Child | None = None
        self.start_at_s: float | None = None
        self.left = False
        """It ended by itself, as one does that was told to stop."""
        self.budget = RestartBudget()
        self._history = history
        self._guard = guard
        self._forks = forks
        self._started_s = 0.0
        self._started_in = 0
        self._killed = ""

    @property
    def name(self) -> str:
        """`rollout-0`."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self.child.pid if self.child is not None else None

    @property
    def age_s(self) -> float:
        """Since the newest start."""
        return time.monotonic() - self._started_s

    def start(self, why: str = "") -> None:
        """Start it now."""
        self.start_at_s, self.left, self._killed = None, False, ""
        self._started_s, self._started_in = time.monotonic(), self._history.step
        with self.log.open("ab") as output:
            self.log_from_byte = output.tell()
            self.child = self._forks.start(self.spec, output)
        self._guard.watch(self.child.pid)
        self._history.write(self.name, "started", self.child.pid, why=why)

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(number)

    def kill(self, why: str) -> None:
        """SIGKILL it and its children; `ended` tells of it."""
        if self.child is not None:
            self._killed = why
            end_family(self.child.pid)

    def ended(self, *, wait: bool = False) -> Death | None:
        """How it ended, once; None while it runs (or, with `wait`, never)."""
        if self.child is None:
            return None
        code = self.child.wait() if wait else reap(self.child)
        if code is None:
            return None
        pid, self.child = self.child.pid, None
        self._guard.unwatch(pid)
        lines = last_lines(self.log, _LINES, from_byte=self.log_from_byte) if code != 0 else ()
        return self._history.write(
            self.name,
            "killed" if self._killed else "ended",
            pid,
            exit_code=code,
            why=self._killed,
            last_lines=lines,
        )

    def spend(self) -> float | None:
        """Seconds to wait before the next start, or None when there were too many.

        After a life that was long enough for the run to train a step, the budget is whole again.
        """
        if self.age_s >= _GOOD_LIFE_S and self._history.step > self._started_in:
            self.budget.spent.clear()
        wait_s = self.budget.spend(time.monotonic())
        if wait_s is not None:
            self.start_at_s = time.monotonic() + wait_s
        return wait_s
