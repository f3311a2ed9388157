"""What a process tells systemd: that it is ready, that its work moves on, that it ends.

The protocol of sd_notify(3): datagrams to the socket in `NOTIFY_SOCKET`; without it nothing is sent. The watchdog
is fed by work that moves and by loops that turn, never by a timer: a process that hangs misses it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

_PER_PERIOD = 4
"""Signs of life in one `WatchdogSec`."""


class Service:
    """This process as systemd sees it; every method is cheap and may be called by any thread."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = int(os.environ.get("WATCHDOG_USEC", "0")) if watched and self._address else 0
        self._every_s = usec / 1e6 / _PER_PERIOD if usec else float("inf")
        self._told_at = -float("inf")

    def ready(self, status: str) -> None:
        """Start-up is over."""
        self._send(f"READY=1\nSTATUS={status}")

    def alive(self) -> None:
        """Work has moved on, or there is none: feeds the watchdog, a few times per period at most."""
        now = time.monotonic()
        if now - self._told_at >= self._every_s:
            self._told_at = now
            self._send("WATCHDOG=1")

    def stopping(self, status: str = "ends") -> None:
        """The process begins to end."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(text.encode(), self._address)
