"""A tiny process that outlives a killed supervisor by an instant, and ends what it left behind.

The kernel ends the supervisor's children with it; *their* children (a compiler that a reward function
started) may know nothing of that. So the supervisor names each process group on this program's stdin, `+ID`
when it starts and `-ID` when it has ended; when stdin closes, the groups that are left are killed and the
socket folder (first argument) is removed. Run as a script with `-I -S`: it imports nothing of rlmq.
"""

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    """Follow stdin to its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        if word.startswith("+"):
            groups.add(int(word[1:]))
        elif word.startswith("-"):
            groups.discard(int(word[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
