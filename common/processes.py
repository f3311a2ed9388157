"""Child processes that never outlive their parent, and words for how one ended.

Linux ends a child together with its parent when the child asked for it (`prctl(PR_SET_PDEATHSIG)`), also
when the parent was killed with `-9`. The request belongs to the *thread* that started the child: call
`spawn` from a thread that lives as long as the child should, as a rule the main thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

_PR_SET_PDEATHSIG = 1
# Fields of /proc/PID/stat after the name.
_STATE, _PARENT, _GROUP, _SESSION, _USER, _SYSTEM, _START = 0, 1, 2, 3, 11, 12, 19
_PASSES = 50  # some are born while others are killed; one that the kernel holds is left to it
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends; at once if the parent is gone already.

    Args:
        parent_pid: the parent's pid as the parent saw it; closes the gap between fork and this call.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _child_setup() -> Callable[[], None]:
    parent_pid = os.getpid()

    def setup() -> None:
        die_with_parent(parent_pid)
        # Ignored signals survive exec: a child of `nohup` or of a shell's `&` would never see Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return setup


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | int = subprocess.DEVNULL,
    errors: IO[bytes] | int | None = subprocess.STDOUT,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own that dies with the calling thread.

    stdin is /dev/null, stdout goes to `output`, stderr to `errors` (default: with stdout; None: the caller's).
    The terminal's Ctrl-C does not reach it.
    """
    return subprocess.Popen(
        list(argv),
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        cwd=cwd,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        preexec_fn=_child_setup(),  # noqa: PLW1509 - two system calls, prepared before the fork
    )


def signal_group(process_group: int, signum: int) -> bool:
    """Send a signal to every process of a group; False when there is none left."""
    try:
        os.killpg(process_group, signum)
    except ProcessLookupError:
        return False
    except PermissionError:  # members are zombies or changed their user
        return True
    return True


class Child(Protocol):
    """A child process, as `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its pid."""

    @property
    def returncode(self) -> int | None:
        """How it ended, as far as that is known."""

    def wait(self) -> int:
        """Wait for its end."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal."""


def reap(child: Child) -> int | None:
    """The child's return code when it has ended, else None.

    What is left of its process group and session (its children, and theirs) is killed first, while the pid cannot
    be reused.
    """
    if child.returncode is not None:
        return child.returncode
    with contextlib.suppress(ChildProcessError):
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return None
        end_family(child.pid)
    return child.wait()


def end_family(leader: int) -> None:
    """SIGKILL a process, its group, its session, and all that it or they have started, as far as it is known."""
    for _ in range(_PASSES):
        family = _family(leader)
        signal_group(leader, signal.SIGKILL)
        for pid in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not family:
            return
        time.sleep(0.002)


def _family(leader: int) -> set[int]:
    """Live processes that belong to `leader`; of one that has ended, only its group and session are known."""
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, stat = int(path.parent.name), _stat(path.parent.name)
            if stat[_STATE] not in "ZX":
                children.setdefault(int(stat[_PARENT]), []).append(pid)
                if leader in (pid, int(stat[_GROUP]), int(stat[_SESSION])):
                    found.add(pid)
    open_ends = [leader, *found]
    while open_ends:
        for pid in children.get(open_ends.pop(), ()):
            if pid not in found:
                found.add(pid)
                open_ends.append(pid)
    return found


def describe_exit(returncode: int) -> str:
    """`"exit 3"` or `"signal 9 (SIGKILL)"`."""
    if returncode >= 0:
        return f"exit {returncode}"
    try:
        return f"signal {-returncode} ({signal.Signals(-returncode).name})"
    except ValueError:
        return f"signal {-returncode}"


def last_lines(path: Path, count: int, *, from_byte: int = 0) -> list[str]:
    """The last `count` non-empty lines of a log, from `from_byte` on; empty when it cannot be read."""
    limit_bytes = 64 * 1024
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(from_byte, size), size - limit_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def process_mark() -> str:
    """What tells this process from every other: boot, pid namespace, pid, start; "" where nobody says."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        return f"{boot} {namespace} {os.getpid()} {_stat(os.getpid())[_START]}"
    except OSError:
        return ""


def is_gone(mark: str) -> bool:
    """Whether the process of this mark has certainly ended; False about processes that this one cannot see."""
    known, here = mark.split(), process_mark().split()
    if len(known) != len(here) or known[:2] != here[:2]:
        return False
    pid = int(known[2])
    try:
        os.kill(pid, 0)
        stat = _stat(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return stat[_STATE] in "ZX" or stat[_START] != known[3]


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used; 0 where nobody says."""
    try:
        stat = _stat(pid)
    except OSError:
        return 0.0
    return (int(stat[_USER]) + int(stat[_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat after the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
