"""What the kernel says of processes on this host (`/proc/PID/stat`): running, asleep, stopped, gone, how busy."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Standing = Literal["runs", "sleeps", "stopped", "disk", "gone", "elsewhere"]

_STANDINGS: Mapping[str, Standing] = {
    "R": "runs",
    "T": "stopped",
    "t": "stopped",
    "D": "disk",
    "X": "gone",
}
_LEAST_WINDOW_S = 0.15
_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process now.

    It `runs` when one of its threads wants a core; `busy` is the share of one core that it got (more than 1.0:
    several threads). `stopped_child` and `busy_child` are pids of processes below it, if one is so. `unreaped_s` is
    how long its parent was seen not to notice that it ended. A process on another host is `elsewhere`: only its
    messages tell of it.
    """

    pid: int
    standing: Standing
    busy: float = 0.0
    stopped_child: int | None = None
    busy_child: int | None = None
    unreaped_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    letter: str
    cpu_ticks: int
    began_ticks: int


class ProcessTable:
    """Looks twice: at once, and when `states` is asked, so that what happens in between shows how busy they are.

    Args:
        known: name → (pid, Unix time at which it ran; 0: it ended); a process that began later is another one.
    """

    def __init__(self, known: Mapping[str, tuple[int, float]]) -> None:
        self._known = dict(known)
        self._first = {pid: _stat(pid) for pid, _ in self._known.values()}
        self._looked_at = time.monotonic()

    def states(self, *, after_s: float = _LEAST_WINDOW_S) -> dict[str, ProcessState]:
        """The state of each process now; waits until the first look was at least so long ago."""
        time.sleep(max(0.0, self._looked_at + after_s - time.monotonic()))
        everything = _everything()
        window_s = time.monotonic() - self._looked_at
        return {name: self._state(pid, at, everything, window_s) for name, (pid, at) in self._known.items()}

    def _state(self, pid: int, at: float, everything: Mapping[int, _Stat], window_s: float) -> ProcessState:
        now, before = everything.get(pid), self._first.get(pid)
        if now is None or _began_unix_s(now) > at + _CLOCK_SLACK_S:
            return ProcessState(pid, "gone")
        ticks = now.cpu_ticks - before.cpu_ticks if before and before.began_ticks == now.began_ticks else 0
        if now.letter == "Z":
            return ProcessState(
                pid, "gone", unreaped_s=window_s if before is not None and before.letter == "Z" else 0.0
            )
        standing = _STANDINGS.get(now.letter, "sleeps")
        return ProcessState(
            pid,
            "runs" if standing == "sleeps" and _a_thread_runs(pid) else standing,
            round(ticks / os.sysconf("SC_CLK_TCK") / window_s, 2),
            _below(pid, everything, "Tt"),
            _below(pid, everything, "R"),
        )


def _a_thread_runs(pid: int) -> bool:
    """Whether one of its threads has work for a core now, whether or not it gets one."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    return any((stat := _stat(f"{pid}/task/{task.name}")) is not None and stat.letter == "R" for task in tasks)


def _below(pid: int, everything: Mapping[int, _Stat], letters: str) -> int | None:
    """A process in one of these states among those that `pid` started, and those that they started."""
    below = [child for child, stat in everything.items() if stat.parent == pid]
    for child in below:
        if everything[child].letter in letters:
            return child
    return next((found for child in below if (found := _below(child, everything, letters)) is not None), None)


def _everything() -> dict[int, _Stat]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid: stat for pid in pids if (stat := _stat(pid)) is not None}


def _stat(pid: int | str) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    letter, parent, *rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return _Stat(int(parent), letter, int(rest[9]) + int(rest[10]), int(rest[17]))


def _began_unix_s(stat: _Stat) -> float:
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot_s + stat.began_ticks / os.sysconf("SC_CLK_TCK")
