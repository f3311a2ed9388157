"""What a run's control plane left in its folder: `control.json`, the supervisor's log, who supervises it.

Readers never wait for writers: a file that is not there, or a line that is half written, is left out.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rlmq.common.control import Death, Snapshot
from rlmq.common.run_folder import RunFolder

_TAIL_BYTES = 1 << 20


def read_snapshot(run: RunFolder) -> Snapshot | None:
    """The newest snapshot, or None when no controller has written one."""
    try:
        return msgspec.json.decode(run.control.read_bytes(), type=Snapshot)
    except (OSError, msgspec.MsgspecError):
        return None


def read_deaths(run: RunFolder) -> list[Death]:
    """Starts and ends of the run's processes, oldest first; of a very long history the newest part."""
    found = []
    for line in _tail(run.supervisor_log):
        try:
            found.append(msgspec.json.decode(line, type=Death))
        except msgspec.MsgspecError:
            continue
    return found


def supervisor_of(run: RunFolder) -> tuple[int, float] | None:
    """Pid of the newest `rlmq up` of the run's name, and when it began (Unix time); None when there was none."""
    stem = run.run_id.rpartition("-")[0]
    lock = run.path.resolve().parent / f".{stem}.lock"
    try:
        return int(lock.read_text()), lock.stat().st_mtime
    except (OSError, ValueError):
        return None


def _tail(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []
