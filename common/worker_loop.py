"""Runs one role in this process: join, build the role, then calls and row work until told to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import msgspec
import structlog

from rlmq.common.bus import WorkerBus
from rlmq.common.calls import Activity, Call, CallResult, Calls, Desired
from rlmq.common.errors import ExitCode, RlmqError, Terminated
from rlmq.common.messages import CallBell, DesiredBell, Done, Doorbell, Goodbye, Heartbeat
from rlmq.common.metrics import ACTIVITY_SECONDS, CALLS_HANDLED
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import CallHandler, Role, WorkerContext

_POLL_S = 1.0
"""Who missed a doorbell reads the records within this time."""

MakeRole = Callable[[WorkerContext], Role]


class Worker:
    """The process's own part: identity, clock of activities, doorbells, the loop."""

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
    ) -> None:
        self._calls = calls
        self._role_name = role
        self._rank = rank
        self._log = log
        self._stop = threading.Event()
        self._bell_rang = threading.Event()
        self._desired = _without_old_stop(calls.wanted(role))
        self._progress = 0
        self._ready = False
        self._serving = -1
        self._activity: Activity = "idle"
        self._activity_since = time.monotonic()
        self._activity_s: dict[str, float] = {}
        self._incarnation = calls.join(role, rank, fingerprint=fingerprint)
        self._bus = WorkerBus(
            run,
            role=role,
            identity=f"{role}-{rank}-{self._incarnation}",
            heard=self._heard,
            heartbeat=self._heartbeat,
        )
        self.context = WorkerContext(
            recipe=recipe,
            recipe_folder=recipe_folder,
            run=run,
            role=role,
            rank=rank,
            world_size=recipe.workers()[role],
            incarnation=self._incarnation,
            calls=calls,
            log=log,
            activity=self._set_activity,
            progress=self._made_progress,
            serving=self._set_serving,
            desired=lambda: self._desired,
            stopping=self._stop.is_set,
        )

    def run(self, make_role: MakeRole) -> int:
        """Build the role and work until a stop; returns the exit code, having told the controller why."""
        self._arm_signals()
        code: int = ExitCode.OK
        error = ""
        role: Role | None = None
        try:
            role = make_role(self.context)
            self._ready = True
            self._bus.beat()
            self._log.info("ready", incarnation=self._incarnation)
            self._loop(role)
        except RlmqError as failure:
            code, error = failure.exit_code, str(failure)
        except Exception as failure:  # noqa: BLE001 - the supervised loop: an unexpected end is told, then restarted
            self._log.error("crashed", traceback=traceback.format_exc())
            code, error = 1, f"{type(failure).__name__}: {failure}"
        finally:
            if role is not None:
                code, error = self._close_role(role, code, error)
            goodbye = Goodbye(
                role=self._role_name, rank=self._rank, incarnation=self._incarnation, exit_code=code, error=error
            )
            self._disarm_signals()
            self._bus.leave(goodbye)
        if error:
            self._log.error("ended", exit_code=int(code), error=error)
        return self._exit(code, error)

    def _exit(self, code: int, error: str) -> int:
        if error and code not in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            os.write(2, f"error: {error}\n".encode())
        return int(code)

    def _close_role(self, role: Role, code: int, error: str) -> tuple[int, str]:
        try:
            role.close()
        except RlmqError as failure:
            if not error:
                return failure.exit_code, str(failure)
            self._log.error("close failed", error=str(failure))
        return code, error

    def _loop(self, role: Role) -> None:
        handlers = role.handlers()
        looked_at = 0.0
        while not self._stop.is_set():
            rang = self._bell_rang.is_set()
            if rang or time.monotonic() - looked_at >= _POLL_S:
                self._bell_rang.clear()
                self._bus.wake.clear()
                self._learn(self._calls.wanted(self._role_name))
                while not self._stop.is_set() and (call := self._calls.next(self._role_name, self._rank)):
                    self._handle(handlers, call)
                looked_at = time.monotonic()
                continue
            running = self._desired is not None and self._desired.phase == "run"
            if not (running and role.work()):
                self._set_activity("idle")
                role.wait(_POLL_S, self._bus.wake.fd)

    def _handle(self, handlers: Mapping[str, CallHandler], call: Call) -> None:
        handler = handlers.get(call.method)
        if handler is None:
            raise RlmqError(f"call {call.id}", got=call.method, expected=f"a method of role {self._role_name}")
        began = time.monotonic()
        value = handler(call.args)
        result = CallResult(call_id=call.id, rank=self._rank, value=value)
        self._calls.complete(result, incarnation=self._incarnation)
        CALLS_HANDLED.labels(method=call.method).inc()
        self._set_activity("idle")
        self._bus.report(Done(result))
        self._log.info("call done", call_id=call.id, seconds=round(time.monotonic() - began, 3))

    def _heard(self, bell: Doorbell) -> None:
        """On the bus thread: note what rang; the compute thread reads the records."""
        match bell:
            case DesiredBell(desired):
                self._learn(desired)
            case CallBell(call) if self._rank in call.ranks:
                pass
            case _:
                return
        self._bell_rang.set()

    def _learn(self, desired: Desired | None) -> None:
        if desired is None or (self._desired is not None and desired.version <= self._desired.version):
            return
        self._desired = desired
        if desired.phase == "stop":
            self._stop.set()

    def _heartbeat(self) -> Heartbeat:
        seconds = dict(self._activity_s)
        seconds[self._activity] = seconds.get(self._activity, 0.0) + time.monotonic() - self._activity_since
        return Heartbeat(
            role=self._role_name,
            rank=self._rank,
            incarnation=self._incarnation,
            activity=self._activity,
            ready=self._ready,
            serving=self._serving,
            progress=self._progress,
            activity_s=seconds,
            desired=self._desired.version if self._desired is not None else 0,
        )

    def _set_activity(self, activity: Activity) -> None:
        if activity == self._activity:
            return
        now = time.monotonic()
        spent = now - self._activity_since
        self._activity_s[self._activity] = self._activity_s.get(self._activity, 0.0) + spent
        ACTIVITY_SECONDS.labels(activity=self._activity).inc(spent)
        self._activity, self._activity_since = activity, now
        self._bus.beat()

    def _made_progress(self) -> None:
        self._progress += 1

    def _set_serving(self, version: int) -> None:
        self._serving = version
        self._bus.beat()

    def _arm_signals(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    @staticmethod
    def _disarm_signals() -> None:
        """The handler writes to the bus's pipe, which is about to be closed."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._stop.is_set():
            os._exit(128 + number)
        self._stop.set()
        self._bus.wake.set()


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
