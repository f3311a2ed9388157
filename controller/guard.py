"""A tiny process that outlives a killed supervisor by an instant, and ends what it left behind.

The kernel ends the supervisor's children with it; *their* children (a compiler that a reward function
started) may know nothing of that. So the supervisor names each session on this program's stdin, `+ID`
when it starts and `-ID` when it has ended; when stdin closes, the sessions that are left are killed and the
socket folder (first argument) is removed. Run as a script with `-I -S`: it imports nothing of rlmq.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


class Guard:
    """The supervisor's end: starts the program and tells it what to end."""

    def __init__(self, sockets: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(sockets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    def watch(self, session: int) -> None:
        """End this session's processes when the supervisor is killed."""
        self._tell(f"+{session}")

    def unwatch(self, session: int) -> None:
        """It has ended."""
        self._tell(f"-{session}")

    def close(self) -> None:
        """Nothing is left to guard."""
        self._tell("done")
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, word: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # without its guard the run goes on
                self._process.stdin.write(f"{word}\n".encode())
                self._process.stdin.flush()


def main() -> None:
    """Follow stdin to its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        if word.startswith("+"):
            sessions.add(int(word[1:]))
        elif word.startswith("-"):
            sessions.discard(int(word[1:]))
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
    for path in Path("/proc").glob("[0-9]*/stat"):  # what left its group
        with contextlib.suppress(OSError):
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[3]) in sessions:
                os.kill(int(path.parent.name), signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
