"""What the supervisor knows of a run's past and presence: it writes `supervisor.jsonl` and reads `control.json`."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from rlmq.common.control import Death, Member, Snapshot
from rlmq.common.run_folder import RunFolder
from rlmq.controller.records import read_snapshot

_FRESH_S = 5.0


class History:
    """The supervisor's records of one run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._host = platform.node()
        self._newest: Snapshot | None = None
        self._changed_s = time.monotonic()

    def write(
        self,
        name: str,
        what: Literal["started", "ended", "killed"],
        pid: int,
        *,
        exit_code: int | None = None,
        why: str = "",
        last_lines: Sequence[str] = (),
    ) -> Death:
        """Append a line; `call` is what the process worked on when the controller last heard of it."""
        member = None if what == "started" else self._member(pid)
        death = Death(
            at_unix_s=round(time.time(), 3),
            name=name,
            what=what,
            pid=pid,
            exit_code=exit_code,
            why=why,
            call=member.call if member is not None else "",
            last_lines=tuple(last_lines),
        )
        with contextlib.suppress(OSError), self._run.supervisor_log.open("ab") as file:  # a full disk ends no run
            file.write(msgspec.json.encode(death) + b"\n")
        return death

    def look(self) -> None:
        """Read the newest snapshot."""
        found = read_snapshot(self._run)
        if found is not None and found != self._newest:
            self._newest, self._changed_s = found, time.monotonic()

    @property
    def step(self) -> int:
        """The run's step."""
        return self._newest.step if self._newest is not None else 0

    @property
    def goes_on(self) -> bool:
        """Whether the controller is known to want its workers."""
        return self._newest is not None and self._newest.ended is None and self._newest.phase != "stop"

    @property
    def silent_s(self) -> float:
        """Seconds since the controller wrote another snapshot; no clock but our own counts."""
        return time.monotonic() - self._changed_s

    def lost(self, controller_pid: int) -> list[Member]:
        """Members on this host that the controller, of this pid and at work now, calls lost."""
        found = self._newest
        if found is None or found.pid != controller_pid or self.silent_s > _FRESH_S:
            return []
        return [member for member in found.members if member.lost and member.host == self._host]

    def _member(self, pid: int) -> Member | None:
        self.look()
        members = self._newest.members if self._newest is not None else ()
        return next((m for m in members if m.pid == pid and m.host == self._host), None)
