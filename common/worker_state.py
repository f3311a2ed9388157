"""What a worker does now, as its heartbeats tell it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

from rlmq.common.calls import Activity
from rlmq.common.messages import Heartbeat
from rlmq.common.metrics import ACTIVITY_SECONDS


class WorkerState:
    """Written by the compute thread; the bus thread reads it for a heartbeat, which may be a moment old.

    Args:
        moved: called whenever work moves on.
    """

    def __init__(self, role: str, rank: int, moved: Callable[[], None] = lambda: None) -> None:
        self._moved = moved
        self._role = role
        self._rank = rank
        self._host = platform.node()
        self._activity: Activity = "idle"
        self._activity_since = self._moved_at = self._wait_since = time.monotonic()
        self._activity_s: dict[str, float] = {}
        self._progress = 0
        self._wait = ""
        self._call = ""
        self.incarnation = 0
        self.ready = False
        self.serving = -1

    def set_activity(self, activity: Activity) -> bool:
        """From now on this worker does something else; False when it did that already."""
        if activity != "idle":
            self._wait = ""
        if activity == self._activity:
            return False
        now = time.monotonic()
        spent = now - self._activity_since
        self._activity_s[self._activity] = self._activity_s.get(self._activity, 0.0) + spent
        ACTIVITY_SECONDS.labels(activity=self._activity).inc(spent)
        self._activity, self._activity_since = activity, now
        return True

    def progress(self) -> None:
        """Work moved on."""
        self._progress += 1
        self._moved_at = time.monotonic()
        self._wait = ""
        self._moved()

    def waits(self, what: str) -> None:
        """It sleeps for this; the same words again go on with the same wait."""
        if what != self._wait:
            self._wait, self._wait_since = what, time.monotonic()

    @property
    def call(self) -> str:
        """The call that it works on; "" where there is none."""
        return self._call

    def takes(self, call_id: str) -> None:
        """It works on this call; "" when it is done."""
        self._call, self._wait, self._moved_at = call_id, "", time.monotonic()

    def heartbeat(self, desired_version: int) -> Heartbeat:
        """The newest state; `desired_version` is that of the desired state which the worker follows."""
        now = time.monotonic()
        seconds = dict(self._activity_s)
        seconds[self._activity] = seconds.get(self._activity, 0.0) + now - self._activity_since
        wait = self._wait
        return Heartbeat(
            role=self._role,
            rank=self._rank,
            incarnation=self.incarnation,
            activity=self._activity,
            ready=self.ready,
            serving=self.serving,
            progress=self._progress,
            activity_s=seconds,
            desired=desired_version,
            pid=os.getpid(),
            host=self._host,
            call=self._call,
            still_s=round(now - self._moved_at, 3),
            wait=wait,
            wait_s=round(now - self._wait_since, 3) if wait else 0.0,
        )
