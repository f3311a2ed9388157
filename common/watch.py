"""What can end a worker's work from outside: signals, and a broken link to the controller; a thread for each.

::

    SIGTERM, SIGINT         the work in hand is finished or given back; after `drain_s` the process ends as it is
    a second one            it ends at once
    no beat for `window_s`  though the controller's lease is live: the link is broken; the worker joins anew
    no live controller      it waits on
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import structlog

from rlmq.common.errors import RlmqError

_TICK_S = 1.0
_JOIN_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalWatch:
    """Takes SIGTERM and SIGINT, also while a long computation outside of Python holds up the main thread.

    Args:
        halt: told to stop the work at its next boundary, on the watch's thread.
        drain_s: how long the end may take after a signal.
    """

    def __init__(self, *, halt: Callable[[], None], drain_s: float, log: structlog.stdlib.BoundLogger) -> None:
        self._halt = halt
        self._drain_s = drain_s
        self._log = log
        self._deadline: float | None = None
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self.number = 0
        """The signal that came; 0: none yet."""

    def start(self) -> None:
        """Begin to watch; only the main thread can take signals."""
        self._thread.start()
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, _told_by_the_pipe)
            signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)  # written by the kernel's own handler

    def close(self) -> None:
        """End the thread; signals have their default effect again."""
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        os.close(self._write_fd)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._read_fd)

    def _watch(self) -> None:
        while True:
            left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            if not select.select([self._read_fd], [], [], left_s)[0]:
                self._log.warning("not done in time", drain_s=self._drain_s)
                os._exit(128 + self.number)
            numbers = os.read(self._read_fd, 64)
            if not numbers:
                return
            for number in filter(_SIGNALS.__contains__, numbers):  # a library may handle others
                self._took(number)

    def _took(self, number: int) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        self._deadline = time.monotonic() + self._drain_s
        self._log.info("ending", signal=signal.Signals(number).name)
        self._halt()


class LinkWatch:
    """Misses the controller's beat.

    Args:
        controller: the newest epoch and whether its lease is live, from the records.
        broken: called when the link is broken, on the watch's thread.
        window_s: how long the beat may be missed; longer than the lease of a controller that died.
    """

    def __init__(
        self, *, controller: Callable[[], tuple[int, bool]], broken: Callable[[int], None], window_s: float
    ) -> None:
        self._controller = controller
        self._broken = broken
        self._window_s = window_s
        self._heard = threading.Event()
        self._closing = threading.Event()
        self._epoch = 0
        self._quiet_s = 0.0
        self._thread = threading.Thread(target=self._watch, name="link", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def beat(self) -> None:
        """The beat was heard."""
        self._heard.set()

    def close(self) -> None:
        """End the thread, or leave it to end when the server answers; `broken` is not called any more."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._closing.wait(_TICK_S):
            now = time.monotonic()
            # Time in which this process itself stood still is no silence of the controller.
            self._quiet_s += min(now - looked_at, 2 * _TICK_S)
            looked_at = now
            if self._heard.is_set():
                self._heard.clear()
                self._quiet_s = 0.0
            elif self._quiet_s > 2 * _TICK_S:
                self._look()

    def _look(self) -> None:
        try:
            epoch, live = self._controller()
        except RlmqError:  # without the records nobody can tell
            self._quiet_s = 0.0
            return
        if not live or epoch != self._epoch:
            self._epoch, self._quiet_s = epoch, 0.0
        elif self._quiet_s >= self._window_s and not self._heard.is_set() and not self._closing.is_set():
            self._quiet_s = 0.0
            self._broken(epoch)


def _told_by_the_pipe(_number: int, _frame: FrameType | None) -> None:
    """Python's own part of a signal: nothing is left to do."""
