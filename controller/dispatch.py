"""Dispatch: submits calls, rings doorbells, waits for results, and keeps the roster while it waits."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from rlmq.common.bus import ControllerBus
from rlmq.common.calls import Call, CallResult, Calls, Desired, Phase
from rlmq.common.errors import DeadlineExceeded, ExitCode, Fenced, RlmqError
from rlmq.common.messages import CallBell, DesiredBell, Done, Goodbye, Heartbeat
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.restarts import FATAL
from rlmq.controller.roster import Roster

_POLL_S = 1.0
"""A lost report delays a result by at most this."""

EPOCH_LEASE_S = 10.0


class WorkerFailed(RlmqError):
    """A worker ended with an error that a restart cannot mend; carries its exit code."""

    def __init__(self, name: str, goodbye: Goodbye) -> None:
        super().__init__(goodbye.error or f"{name} ended with exit code {goodbye.exit_code}")
        self.exit_code = ExitCode(goodbye.exit_code)


class Dispatch:
    """The controller's hands: everything that crosses to the workers goes through here."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        calls: Calls,
        epoch: int,
        log: structlog.stdlib.BoundLogger,
        pumped: Callable[[Roster], None],
    ) -> None:
        self._recipe = recipe
        self._calls = calls
        self.epoch = epoch
        self._log = log
        self._pumped = pumped
        self.roster = Roster(recipe.workers())
        self._done_hint: set[str] = set()
        self._versions: dict[str, int] = {}
        self._stop_error: RlmqError | None = None
        self._lost_epoch: Fenced | None = None
        self.bus = ControllerBus(run, epoch=epoch, tick=self._renew, tick_s=EPOCH_LEASE_S / 5)

    # -- desired states -----------------------------------------------------------------------------------

    def want(self, role: str, phase: Phase, *, policy_version: int = 0) -> None:
        """Set a role's desired state and ring."""
        stored = self._calls.wanted(role)
        version = max(stored.version if stored else 0, self._versions.get(role, 0)) + 1
        self._versions[role] = version
        desired = Desired(role=role, version=version, phase=phase, policy_version=policy_version, epoch=self.epoch)
        self._calls.want(desired)
        self.bus.ring(role, DesiredBell(desired))

    # -- calls --------------------------------------------------------------------------------------------

    def submit(
        self, call_id: str, role: str, method: str, args: Mapping[str, Any], ranks: Sequence[int] | None = None
    ) -> Call:
        """Queue a call and ring; a finished call is not run again."""
        everyone = range(self._recipe.workers()[role])
        call = Call(
            id=call_id,
            role=role,
            method=method,
            ranks=tuple(everyone if ranks is None else ranks),
            args=dict(args),
            epoch=self.epoch,
        )
        self._calls.submit(call)
        self.bus.ring(role, CallBell(call))
        return call

    def wait(self, *calls: Call, deadline_s: float) -> list[list[CallResult]]:
        """Results of the calls, by rank.

        Raises:
            DeadlineExceeded: nothing moved for `deadline_s`; names the calls and who has not answered.
        """
        pending = {call.id: call for call in calls}
        found: dict[str, list[CallResult]] = {}
        asked_at = 0.0
        self.roster.moved()
        while True:
            self.pump()
            ask_all = time.monotonic() - asked_at >= _POLL_S
            for call in list(pending.values()):
                if ask_all or call.id in self._done_hint:
                    results = self._calls.results(call.id)
                    self._done_hint.discard(call.id)
                    if len(results) >= len(call.ranks):
                        found[call.id] = sorted(results, key=lambda r: r.rank)
                        del pending[call.id]
            if ask_all:
                asked_at = time.monotonic()
            if not pending:
                return [found[call.id] for call in calls]
            if self.roster.still_s > deadline_s:
                raise self._overdue(pending.values(), deadline_s)
            self.sleep(_POLL_S)

    def call(
        self,
        call_id: str,
        role: str,
        method: str,
        args: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        *,
        deadline_s: float,
    ) -> dict[str, Any]:
        """Submit, wait, and return the value of the first rank."""
        [results] = self.wait(self.submit(call_id, role, method, args, ranks), deadline_s=deadline_s)
        return results[0].value

    def finished(self, call_id: str, ranks: int = 1) -> bool:
        """Whether the call has its results already (before a crash)."""
        return len(self._calls.results(call_id)) >= ranks

    def _overdue(self, pending: Any, deadline_s: float) -> DeadlineExceeded:
        lines = []
        for call in pending:
            answered = {r.rank for r in self._calls.results(call.id)}
            silent = [f"{call.role}-{rank}" for rank in call.ranks if rank not in answered]
            lines.append(f"{call.id} waits for {', '.join(silent)}")
        return DeadlineExceeded(
            "call", got=f"no progress for {deadline_s:.0f} s: {'; '.join(lines)}", remedy="Read that worker's log"
        )

    # -- waiting ------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take in what arrived.

        Raises:
            WorkerFailed: a worker ended for good. Fenced: another controller took over.
            Interrupted, Terminated: as told by `stop`.
        """
        for report in self.bus.reports():
            match report:
                case Heartbeat():
                    self.roster.heard(report)
                case Done(result):
                    self._done_hint.add(result.call_id)
                    self.roster.moved()
                case Goodbye():
                    self._goodbye(report)
        self._pumped(self.roster)
        if self._lost_epoch is not None:
            raise self._lost_epoch
        if self._stop_error is not None:
            raise self._stop_error

    def _goodbye(self, goodbye: Goodbye) -> None:
        self.roster.left(goodbye)
        if goodbye.exit_code in FATAL and self._stop_error is None:
            raise WorkerFailed(f"{goodbye.role}-{goodbye.rank}", goodbye)

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a report arrives or the time is over."""
        with contextlib.suppress(InterruptedError):
            select.select([self.bus.wake.fd], [], [], timeout_s)

    def stop(self, error: RlmqError) -> None:
        """Make the next `pump` raise this; callable from a signal handler."""
        self._stop_error = error
        self.bus.wake.set()

    def dismiss(self, timeout_s: float) -> None:
        """Tell every worker to stop and wait until they have left."""
        self._stop_error = None
        for role in self._recipe.workers():
            self.want(role, "stop")
        deadline = time.monotonic() + timeout_s
        while not self.roster.all_gone() and time.monotonic() < deadline:
            with contextlib.suppress(WorkerFailed):
                self.pump()
            self.sleep(0.1)
        for member in self.roster.present():
            self._log.warning("did not leave", worker=member.name, activity=member.activity)

    def _renew(self) -> None:
        """On the bus thread: keep the lease."""
        try:
            self._calls.renew_epoch(self.epoch, EPOCH_LEASE_S)
        except Fenced as error:
            self._lost_epoch = error
            self.bus.wake.set()
        except RlmqError as error:  # the server is away: the lease outlives a short restart
            self._log.warning("lease not renewed", error=str(error))
