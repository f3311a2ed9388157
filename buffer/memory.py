"""The server's memory limit: a full server is one to wait for, not a broken one."""

from __future__ import annotations

import time

from rlmq.buffer.connection import Link
from rlmq.common.errors import DeadlineExceeded

_PAUSE_S = 0.2
_RESERVE = 0.1  # of maxmemory, kept free by puts
_STEP, _LOOK_S = 0.01, 1.0  # of maxmemory put since the last look, or so long after it: look again


class Memory:
    """What puts know of the server's memory. They leave a part to those who write columns: only they free rows.

    Args:
        run_id, patience_s: named by errors; `patience_s` is how long the callers wait.
    """

    def __init__(self, link: Link, run_id: str, patience_s: float) -> None:
        self._link = link
        self._run_id = run_id
        self._patience_s = patience_s
        self._look_at = 0.0
        self._unseen_bytes, self._most_unseen_bytes = 0, 0.0

    def reserve(self, nbytes: int, now: float, end: float) -> None:
        """Return when a put of so many bytes leaves the reserve; `now` and `end` are `time.monotonic()`.

        Raises:
            DeadlineExceeded: it would not until `end`.
        """
        self._unseen_bytes += nbytes
        if now > self._look_at or self._unseen_bytes > self._most_unseen_bytes:
            while (used := self._look(nbytes)) is not None:
                self._look_at = 0.0
                self.pause("put", used, end)

    def _look(self, nbytes: int) -> str | None:
        """What is used, when so many bytes do not fit."""
        (text,) = self._link.exchange([("INFO", "memory")])
        if isinstance(text, Exception):
            raise text
        memory = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
        most = int(memory["maxmemory"])
        self._look_at = time.monotonic() + _LOOK_S
        self._unseen_bytes, self._most_unseen_bytes = nbytes, most * _STEP if most else float("inf")
        if not most or int(memory["used_memory"]) + nbytes < most * (1 - _RESERVE):
            return None
        return f"{memory['used_memory_human']} of {memory['maxmemory_human']} used"

    def pause(self, verb: str, got: str, end: float) -> None:
        """Sleep before another try.

        Raises:
            DeadlineExceeded: it would begin after `end`.
        """
        if time.monotonic() + _PAUSE_S > end:
            raise DeadlineExceeded(
                f"{verb} in run '{self._run_id}'",
                got=f"a Redis server at its maxmemory ({got}) for {self._patience_s:g} s",
                expected="consumers that free rows",
                remedy="Raise maxmemory, or look at the stages that do not drain",
            )
        time.sleep(_PAUSE_S)
