"""Runs one role in this process: join, build the role, then calls and row work until told to stop."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import structlog

from rlmq.common.bus import WorkerBus
from rlmq.common.calls import Activity, Call, CallResult, Calls, Desired
from rlmq.common.closing import Closing
from rlmq.common.errors import ExitCode, RestartRequired, RlmqError, Terminated
from rlmq.common.messages import Beat, CallBell, DesiredBell, Done, Doorbell, Goodbye, Heartbeat
from rlmq.common.metrics import CALLS_HANDLED, STALE_COMMANDS
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.service import Service
from rlmq.common.watch import LinkWatch, SignalWatch
from rlmq.common.worker import CallHandler, Role, WorkerContext
from rlmq.common.worker_state import WorkerState

_POLL_S = 1.0
"""Who missed a doorbell reads the records within this time."""

_LEAST_WINDOW_S = 12.0
"""The lease of a controller that died is live for a while: shorter silence says nothing of the link."""

MakeRole = Callable[[WorkerContext], Role]


class Worker:
    """The process's own part: identity, doorbells, the loop."""

    def __init__(
        self,
        recipe: Recipe,
        recipe_folder: Path,
        run: RunFolder,
        role: str,
        rank: int,
        calls: Calls,
        fingerprint: str,
        log: structlog.stdlib.BoundLogger,
        *,
        window_s: float | None = None,
    ) -> None:
        self._run = run
        self._calls = calls
        self._role_name = role
        self._rank = rank
        self._fingerprint = fingerprint
        self._log = log
        self._service = Service()
        self._state = WorkerState(role, rank, self._service.alive)
        self._halt = threading.Event()
        self._cut_off = False
        self._bell_rang = threading.Event()
        self._learning = threading.Lock()
        self._desired = _without_old_stop(calls.wanted(role))
        self._epoch = 0
        self._control = recipe.control
        limits = recipe.deadlines
        self._signals = SignalWatch(halt=self._stop, drain_s=limits.drain_s, log=log)
        self._link = LinkWatch(
            controller=calls.controller,
            broken=self._lost_link,
            window_s=window_s or max(_LEAST_WINDOW_S, limits.silence_s / 2),
        )
        self._bus = self._join()
        self.context = WorkerContext(
            recipe=recipe,
            recipe_folder=recipe_folder,
            run=run,
            role=role,
            rank=rank,
            world_size=recipe.workers().get(role, 1),
            incarnation=self._state.incarnation,
            calls=calls,
            log=log,
            activity=self._set_activity,
            progress=self._state.progress,
            serving=self._set_serving,
            desired=lambda: self._desired,
            stopping=self._halt.is_set,
            waits=self._state.waits,
            call=lambda: self._state.call,
        )

    def run(self, make_role: MakeRole) -> int:
        """Build the role and work until a stop; returns the exit code, having told the controller why."""
        failure: BaseException | None = None
        try:
            with Closing(self._log) as closing:
                for watch in (self._signals, self._link):
                    closing.add(watch.close)
                    watch.start()
                role = make_role(self.context)
                closing.add(role.close)
                self._state.ready = True
                self._bus.beat()
                self._service.ready(f"{self._role_name}-{self._rank} works")
                self._log.info("ready", incarnation=self._state.incarnation)
                self._loop(role)
                while self._cut_off and not self._told_to_stop():
                    self._join_anew()
                    self._loop(role)
        except Exception as error:  # noqa: BLE001 - the supervised loop: an unexpected end is told, then restarted
            failure = error
        code, message = self._verdict(failure)
        self._service.stopping(message or "ended")
        self._bus.leave(self._goodbye(code, message))
        if message:
            self._log.error("ended", exit_code=code, error=message)
            os.write(2, f"error: {message}\n".encode())
        return code

    def _verdict(self, failure: BaseException | None) -> tuple[int, str]:
        """Exit code, and the message of a failure. Work that was given back on a signal is no failure."""
        given_up = isinstance(failure, Terminated | RestartRequired)
        if failure is None or (given_up and self._halt.is_set() and not self._cut_off):
            return (int(ExitCode.INTERRUPTED) if self._signals.number == signal.SIGINT else 0), ""
        if given_up and self._cut_off:
            return int(ExitCode.RESTART), "the link to the controller is broken"
        if isinstance(failure, RlmqError):
            return int(failure.exit_code), str(failure)
        self._log.error("crashed", traceback="".join(traceback.format_exception(failure)))
        return 1, f"{type(failure).__name__}: {failure}"

    def _goodbye(self, code: int, error: str) -> Goodbye:
        return Goodbye(
            role=self._role_name, rank=self._rank, incarnation=self._state.incarnation, exit_code=code, error=error
        )

    # -- the link --------------------------------------------------------------------------------------------

    def _join(self) -> WorkerBus:
        self._state.incarnation = self._calls.join(self._role_name, self._rank, fingerprint=self._fingerprint)
        return WorkerBus(
            self._run,
            self._control,
            role=self._role_name,
            heard=self._heard,
            heartbeat=self._heartbeat,
        )

    def _join_anew(self) -> None:
        """As a new incarnation over a new link; the role keeps what it has loaded, and holds no rows or calls."""
        before = self._goodbye(int(ExitCode.RESTART), "the link to the controller is broken")
        old, self._bus = self._bus, self._join()
        self.context.incarnation = self._state.incarnation
        old.leave(before)
        self._cut_off = False
        self._halt.clear()
        if self._told_to_stop():
            self._halt.set()
        self._log.info("joined anew", incarnation=self._state.incarnation)

    def _told_to_stop(self) -> bool:
        return bool(self._signals.number) or (self._desired is not None and self._desired.phase == "stop")

    def _lost_link(self, epoch: int) -> None:
        """On the link's thread."""
        self._log.warning("no beat of a controller that lives", epoch=epoch)
        self._cut_off = True
        self._stop()

    def _stop(self) -> None:
        """On any thread: the work in hand ends at its next boundary."""
        self._service.stopping()
        self._halt.set()
        self._bus.wake.set()

    def _heard(self, bell: Doorbell) -> None:
        """On the bus thread: note what rang; the compute thread reads the records."""
        epoch = _epoch_of(bell)
        if epoch < self._epoch:  # a controller that was replaced
            STALE_COMMANDS.inc(0 if isinstance(bell, Beat) else 1)
            return
        self._epoch = epoch
        match bell:
            case Beat():
                self._link.beat()
                return
            case DesiredBell(desired):
                if self._desired is not None and desired.version < self._desired.version:
                    STALE_COMMANDS.inc()
                self._learn(desired)
            case CallBell(call) if self._rank not in call.ranks:
                return
        self._bell_rang.set()

    def _learn(self, desired: Desired | None) -> None:
        with self._learning:  # the bus thread and the compute thread learn
            if desired is None or (self._desired is not None and desired.version <= self._desired.version):
                return
            self._desired = desired
        if desired.phase == "stop":
            self._halt.set()

    def _heartbeat(self) -> Heartbeat:
        return self._state.heartbeat(self._desired.version if self._desired is not None else 0)

    # -- work ------------------------------------------------------------------------------------------------

    def _loop(self, role: Role) -> None:
        handlers = role.handlers()
        looked_at = 0.0
        while not self._halt.is_set():
            self._bus.check()
            self._service.alive()
            rang = self._bell_rang.is_set()
            if rang or time.monotonic() - looked_at >= _POLL_S:
                self._bell_rang.clear()
                self._bus.wake.clear()
                self._learn(self._calls.wanted(self._role_name))
                while not self._halt.is_set() and (call := self._calls.next(self._role_name, self._rank)):
                    self._handle(handlers, call)
                looked_at = time.monotonic()
            elif not self._works():
                self._set_activity("idle")
                self._state.waits("phase run" if self._desired else "a controller")
                select.select([self._bus.wake.fd], [], [], _POLL_S)
            elif not role.work():
                self._set_activity("idle")
                role.wait(_POLL_S, self._bus.wake.fd)

    def _works(self) -> bool:
        """Whether row work is wanted; a run that drains ends what it has begun."""
        return self._desired is not None and self._desired.phase in ("run", "drain")

    def _handle(self, handlers: Mapping[str, CallHandler], call: Call) -> None:
        handler = handlers.get(call.method)
        if handler is None:
            raise RlmqError(f"call {call.id}", got=call.method, expected=f"a method of role {self._role_name}")
        began = time.monotonic()
        self._state.takes(call.id)
        value = handler(call.args)
        result = CallResult(call_id=call.id, rank=self._rank, value=value)
        self._calls.complete(result, incarnation=self._state.incarnation)
        self._state.takes("")
        CALLS_HANDLED.labels(method=call.method).inc()
        self._set_activity("idle")
        self._bus.report(Done(result))
        self._log.info("call done", call_id=call.id, seconds=round(time.monotonic() - began, 3))

    def _set_activity(self, activity: Activity) -> None:
        if self._state.set_activity(activity):
            self._bus.beat()

    def _set_serving(self, version: int) -> None:
        self._state.serving = version
        self._bus.beat()


def _epoch_of(bell: Doorbell) -> int:
    match bell:
        case Beat(epoch):
            return epoch
        case CallBell(call):
            return call.epoch
        case DesiredBell(desired):
            return desired.epoch


def _without_old_stop(desired: Desired | None) -> Desired | None:
    """A stop that was there before this process joined was meant for others: wait for the next version."""
    if desired is not None and desired.phase == "stop":
        return msgspec.structs.replace(desired, phase="pause")
    return desired


def raise_if_stopping(context: WorkerContext) -> None:
    """Give up long work at a boundary.

    Raises:
        Terminated: the process was told to end.
    """
    if context.stopping():
        raise Terminated(f"{context.role}-{context.rank}", got="the order to stop")
