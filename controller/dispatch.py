"""Dispatch: the shell around the plan. Reports, records and time become events, commands writes and bells."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from rlmq.common.bus import ControllerBus
from rlmq.common.calls import Call, CallRecord, CallResult, Calls
from rlmq.common.control import FIXED, OBEYED, Snapshot
from rlmq.common.errors import DeadlineExceeded, ExitCode, Fenced, RlmqError, Terminated
from rlmq.common.joined_nodes import joined_nodes
from rlmq.common.messages import CallBell, DesiredBell, Done, Goodbye, Heartbeat, Ordered, Report
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller import events, plan
from rlmq.controller.control_files import ControlFiles
from rlmq.controller.pulses import Pulses
from rlmq.controller.restarts import FATAL

EPOCH_LEASE_S = 10.0
OPEN_STEP = "open_step"

_POLL_S = 1.0
"""A lost report delays a result by at most this."""
_SHOW_S = 0.5
_REPEAT_S = 5.0
"""What is wanted is stored again: a server that came back older learns it."""
_AWAY_S = 5.0
"""After a longer pause of this process, silence of others means nothing."""


class RunFailed(RlmqError):
    """The plan ended the run, for a worker that ended with an error that a restart cannot mend."""

    def __init__(self, error: str, exit_code: int) -> None:
        super().__init__(error)
        self.exit_code = ExitCode(exit_code)


class Dispatch:
    """The controller's hands and ears. All methods are called on one thread, `stop` apart.

    Args:
        epoch: begun already; its lease is kept from here on.
        pumped: called after each look at what arrived.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        calls: Calls,
        epoch: int,
        log: structlog.stdlib.BoundLogger,
        pumped: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = plan.State()
        self.epoch = epoch
        self.steps = recipe.train.steps
        self._run = run
        self._calls = calls
        self._log = log
        self._pumped = pumped
        self._unix_s = time.time() - time.monotonic()
        self._asked: dict[str, Call] = {}
        self._values: dict[str, dict[int, CallResult]] = {}
        self._resolved: dict[str, list[CallResult]] = {}
        self._orders_told = True
        self._kept: dict[str, Any] = {}
        self._stop_error: RlmqError | None = None
        self._lost_epoch: Fenced | None = None
        self._pumped_at = self._ticked_at = self._shown_at = self._repeated_at = self.now()
        self._renewed_at = time.monotonic()
        self.pulses = Pulses(moved_at=self.now())
        self._files = ControlFiles(run)
        self.bus = ControllerBus(
            run, recipe.control, epoch=epoch, tick=self._renew, tick_s=EPOCH_LEASE_S / 5, quiet=self._is_no_news
        )
        self._began(recipe)

    def now(self) -> float:
        """Unix seconds of a clock that does not jump."""
        return round(self._unix_s + time.monotonic(), 4)

    def _began(self, recipe: Recipe) -> None:
        workers = recipe.workers()
        wishes = self._calls.noted(OBEYED) or {}
        settings = {
            key: [(int(step), str(v)) for step, v in one] for key, one in wishes.get("settings", {}).items()
        }
        own = (*(block.name for block in recipe.critics), *recipe.mesh_nodes)
        self._fixed = FIXED | set(own)
        desired = [self._calls.wanted(role) for role in (*workers, *joined_nodes(self._run))]
        self._feed(
            events.Began(
                at=self.now(),
                epoch=self.epoch,
                step=self.noted_step()[0],
                workers=workers,
                quorum={role: count if role in self._fixed else 1 for role, count in workers.items()},
                fixed=own,
                silence_s=recipe.deadlines.silence_s,
                desired=tuple(one for one in desired if one is not None),
                phase=wishes.get("phase", "run"),
                orders=int(wishes.get("orders", 0)),
                settings=settings,
            )
        )

    # -- what the loop asks for -------------------------------------------------------------------------------

    def submit(
        self,
        call_id: str,
        role: str,
        method: str,
        args: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        *,
        deadline_s: float,
    ) -> str:
        """Queue a call; one that finished before is not run again. Returns its id.

        Raises:
            ControlLoopDiverged: the id is known with other content.
        """
        everyone = ranks is None and role not in self._fixed
        self._asked[call_id] = Call(
            id=call_id, role=role, method=method, ranks=(), args=dict(args), epoch=self.epoch, everyone=everyone
        )
        self._feed(
            events.Asked(
                at=self.now(),
                call_id=call_id,
                role=role,
                method=method,
                deadline_s=deadline_s,
                ranks=None if ranks is None else tuple(ranks),
                args={key: value for key, value in args.items() if isinstance(value, int | float)},
            )
        )
        return call_id

    def wait(self, *call_ids: str) -> list[list[CallResult]]:
        """Results of calls that were submitted, each by rank.

        Raises:
            DeadlineExceeded: nothing moved until a call's deadline; names the calls and who has not answered.
        """
        while True:
            self.pump()
            if all(call_id in self._resolved for call_id in call_ids):
                return [self._resolved.pop(call_id) for call_id in call_ids]
            self.sleep(_SHOW_S)

    def call(
        self,
        call_id: str,
        role: str,
        method: str,
        args: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        *,
        deadline_s: float,
    ) -> list[CallResult]:
        """Submit, when the run is not paused, and wait."""
        self.hold()
        return self.wait(self.submit(call_id, role, method, args, ranks, deadline_s=deadline_s))[0]

    def finished(self, call_id: str) -> bool:
        """Whether the call has its results already (before a crash)."""
        record = self._calls.look(call_id)
        return record is not None and len(record.results) >= len(record.call.ranks)

    def want(self, role: str, policy_version: int) -> None:
        """Let a role follow a policy version."""
        self._feed(events.Wanted(at=self.now(), role=role, policy_version=policy_version))

    def served(self, role: str, ranks: Sequence[int], version: int) -> None:
        """Note that workers have taken the weights of a version."""
        self._feed(events.Served(at=self.now(), role=role, ranks=tuple(ranks), version=version))

    def noted_step(self) -> tuple[int, bool]:
        """The open step by the records, and whether it was begun."""
        note = self._calls.noted(OPEN_STEP) or {"step": 1}
        return int(note["step"]), bool(note.get("begun"))

    def open_step(self, step: int, *, begun: bool) -> None:
        """Note durably that the loop is at this step."""
        self._calls.note(OPEN_STEP, {"step": step, "begun": begun}, epoch=self.epoch)
        if begun:
            self._feed(events.Opened(at=self.now(), step=step))

    def waits(
        self,
        what: str = "",
        on: Sequence[str] = (),
        *,
        deadline_s: float | None = None,
        until: float | None = None,
    ) -> None:
        """Say what the loop waits for beside calls, as `events.Waits`; without `what` it no longer does."""
        known = self.state.wait
        if (what, tuple(on)) == (("", ()) if known is None else (known.what, known.on)):
            return
        now = self.now()
        since = known.since if known is not None and known.what == what else now
        self._feed(events.Waits(at=now, what=what, since=since, on=tuple(on), deadline_s=deadline_s, until=until))

    def moved(self) -> None:
        """Note progress that the loop saw in the store."""
        self.pulses.moved_at = self.now()

    def hold(self) -> None:
        """Stand still while the run is paused."""
        while self.state.phase == "pause":
            self.pump()
            self.sleep(_SHOW_S)

    # -- what arrives --------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take in what arrived.

        Raises:
            RunFailed, DeadlineExceeded: as the plan says. Fenced: another controller took over.
            Interrupted, Terminated: as told by `stop`, or by an operator.
        """
        self._keep_lease()
        now = self.now()
        if now - self._pumped_at > _AWAY_S:
            self.pulses.forgive(now)
        self._pumped_at = now
        for report in self.bus.reports():
            self._take(report, now)
        if self._orders_told or now - self._ticked_at >= _POLL_S:
            self._read_orders(now)
        if now - self._ticked_at >= _POLL_S:
            self._tick(now)
        if now - self._shown_at >= _SHOW_S:
            self.show()
        self._pumped()
        if self._stop_error is not None:
            raise self._stop_error

    def _take(self, report: Report, now: float) -> None:
        match report:
            case Heartbeat():
                self.pulses.heard(report, now)
                heard = _heard(report, now)
                if plan.tells(self.state, heard):
                    self._feed(heard)
            case Done(result):
                self.pulses.moved_at = now
                self._feed(events.Told(at=now, call_id=result.call_id, rank=result.rank))
            case Goodbye():
                self._feed(
                    events.Left(
                        at=now,
                        role=report.role,
                        rank=report.rank,
                        incarnation=report.incarnation,
                        exit_code=report.exit_code,
                        error=report.error,
                        fatal=report.exit_code in FATAL,
                    )
                )
            case Ordered():
                self._orders_told = True

    def _is_no_news(self, report: Report) -> bool:
        """On the bus's thread: a heartbeat that changes nothing wakes nobody."""
        return isinstance(report, Heartbeat) and not plan.tells(self.state, _heard(report, 0.0))

    def _read_orders(self, now: float) -> None:
        self._orders_told = False
        after = self.state.orders
        for number, order in enumerate(self._calls.orders(after), after + 1):
            self._feed(events.Ordered(at=now, number=number, order=order))

    def _tick(self, now: float) -> None:
        self._ticked_at = now
        for silent in self.pulses.silent(now, self.state.silence_s):
            self._feed(silent)
        self._feed(events.Tick(at=now, moved_at=self.pulses.moved_at))
        if now - self._repeated_at >= _REPEAT_S:
            self._repeated_at = now
            for desired in self.state.desired.values():
                self._calls.want(desired)
            if self._kept:
                self._calls.note(OBEYED, self._kept, epoch=self.epoch)

    # -- the plan ------------------------------------------------------------------------------------------------

    def _feed(self, event: events.Event) -> None:
        """Advance the plan and carry its commands out, and so on with the events that these give."""
        waiting = deque((event,))
        while waiting:
            event = waiting.popleft()
            state, commands = plan.advance(self.state, event)
            if state is not self.state or any(not isinstance(one, events.Look) for one in commands):
                line = events.Line(at=event.at, epoch=self.epoch, event=event, commands=commands)
                self._files.append(line)
            self.state = state
            for command in commands:
                follows = self._carry_out(command)
                if follows is not None:
                    waiting.append(follows)

    def _carry_out(self, command: events.Command) -> events.Event | None:
        match command:
            case events.Submit():
                return self._submit(command)
            case events.Look(call_id=call_id):
                return self._looked(call_id, self._calls.look(call_id))
            case events.Release(call_id=call_id, rank=rank, why=why):
                self._log.warning("call released", call_id=call_id, rank=rank, why=why)
                released = CallResult(call_id=call_id, rank=rank, released=why)
                self._calls.release(released, epoch=self.epoch)
                return self._looked(call_id, self._calls.look(call_id))
            case events.Resolve(call_id=call_id, ranks=ranks):
                del self._asked[call_id]
                values = self._values.pop(call_id, {})
                self._resolved[call_id] = [values[rank] for rank in sorted(ranks)]
            case events.Want(desired=desired):
                self._calls.want(desired)
                self.bus.ring(desired.role, DesiredBell(desired))
            case events.Keep():
                self._kept = {"phase": command.phase, "orders": command.orders, "settings": command.settings}
                self._calls.note(OBEYED, self._kept, epoch=self.epoch)
            case events.Lost(role=role, rank=rank, silent_s=silent_s):
                self._log.warning("worker lost", worker=f"{role}-{rank}", silent_s=silent_s)
            case events.Refuse(why=why):
                self._log.warning("order refused", reason=why)
            case events.Fail(error=error, exit_code=code):
                self._stop_error = self._stop_error or _failure(error, code)
        return None

    def _submit(self, command: events.Submit) -> events.Looked:
        asked = self._asked[command.call_id]
        call = Call(
            id=asked.id,
            role=asked.role,
            method=asked.method,
            ranks=command.ranks,
            args=asked.args,
            epoch=self.epoch,
            everyone=asked.everyone,
        )
        record = self._calls.submit(call)
        if len(record.results) < len(record.call.ranks):
            self.bus.ring(call.role, CallBell(record.call))
        return self._looked(call.id, record)

    def _looked(self, call_id: str, record: CallRecord | None) -> events.Looked:
        """The values stay here; of two results of a rank the first counts."""
        if record is None:
            return events.Looked(at=self.now(), call_id=call_id, known=False)
        if call_id in self._asked:
            values = self._values.setdefault(call_id, {})
            for result in record.results:
                values.setdefault(result.rank, result)
        return events.Looked(
            at=self.now(),
            call_id=call_id,
            known=True,
            ranks=record.call.ranks,
            answered=tuple(result.rank for result in record.results),
        )

    # -- the end, and the lease ------------------------------------------------------------------------------------

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a report arrives or the time is over."""
        with contextlib.suppress(InterruptedError):
            select.select([self.bus.wake.fd], [], [], timeout_s)

    def stop(self, error: RlmqError) -> None:
        """Make the next `pump` raise this; callable from a signal handler."""
        self._stop_error = error
        self.bus.wake.set()

    def dismiss(self, exit_code: int, timeout_s: float) -> bool:
        """Tell every worker to stop and wait until they have left; whether each did so with everything done."""
        self._stop_error = None
        self._feed(events.Ended(at=self.now(), exit_code=exit_code))
        deadline = time.monotonic() + timeout_s
        while plan.present(self.state) and time.monotonic() < deadline:
            self.pump()
            self.sleep(0.1)
        for member in plan.present(self.state):
            self._log.warning("did not leave", worker=member.name, activity=member.activity)
        return all(member.gone and member.exit_code == 0 for member in self.state.members.values())

    def close(self) -> None:
        """Close the sockets and the log."""
        self.bus.close()
        self._files.close()
        if self._files.failed:
            self._log.warning("control files are not complete", reason=self._files.failed)

    def show(self, ended: int | None = None) -> None:
        """Rewrite the snapshot."""
        now = self._shown_at = self.now()
        state = self.state
        generating = state.desired.get("rollout") or state.desired.get("actor")
        self._files.show(
            Snapshot(
                at_unix_s=now,
                run_id=self._run.run_id,
                epoch=self.epoch,
                pid=os.getpid(),
                host=socket.gethostname(),
                phase=state.phase,
                step=state.step,
                steps=self.steps,
                policy_version=generating.policy_version if generating is not None else 0,
                members=self.pulses.members(state, now),
                missing=plan.missing(state),
                waits=plan.waits(state, self.pulses.moved_at),
                ended=ended,
            )
        )

    def _keep_lease(self) -> None:
        """A process that was stopped for longer than its lease does nothing before it has it again."""
        if self._lost_epoch is not None:
            raise self._lost_epoch
        if time.monotonic() - self._renewed_at > EPOCH_LEASE_S:
            self._calls.renew_epoch(self.epoch, EPOCH_LEASE_S)
            self._renewed_at = time.monotonic()

    def _renew(self) -> None:
        """On a thread of the bus: keep the lease."""
        began = time.monotonic()
        try:
            self._calls.renew_epoch(self.epoch, EPOCH_LEASE_S)
            self._renewed_at = began
        except Fenced as error:
            self._lost_epoch = error
            self.bus.wake.set()
        except RlmqError as error:  # the server is away: the lease outlives a short restart
            self._log.warning("lease not renewed", error=str(error))


def _heard(beat: Heartbeat, at: float) -> events.Heard:
    return events.Heard(
        at=at,
        role=beat.role,
        rank=beat.rank,
        incarnation=beat.incarnation,
        activity=beat.activity,
        ready=beat.ready,
        serving=beat.serving,
        call=beat.call,
    )


def _failure(error: str, exit_code: int) -> RlmqError:
    kinds = {ExitCode.DEADLINE: DeadlineExceeded, ExitCode.TERMINATED: Terminated}
    kind = kinds.get(ExitCode(exit_code))
    return RunFailed(error, exit_code) if kind is None else kind(error)
