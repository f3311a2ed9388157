"""What is told about a process that ended a run: one message, from its own log."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from rlmq.common.processes import describe_exit, last_lines


def failure(name: str, log: Path, from_byte: int, code: int) -> str:
    """The process's own `error:` line, else its last lines; with its name and log.

    Args:
        name: `rollout-0`.
        log: its log file.
        from_byte: where the log of this start begins.
        code: its return code.
    """
    lines = last_lines(log, 200, from_byte=from_byte)
    said = [n for n, line in enumerate(lines) if line.startswith("error: ")]
    if said:
        text = "\n".join([lines[said[-1]].removeprefix("error: "), *lines[said[-1] + 1 :]])
    else:
        text = f"it ended with {describe_exit(code)}; its last lines:\n{indented(lines[-5:])}\n"
    return f"{name}: {text} (log: {log})"


def used_up(name: str, log: Path, from_byte: int, code: int, argv: Sequence[str], restarts: str) -> str:
    """The end of a process that was restarted too often: how it ended, its command, its last lines."""
    memory = " The kernel does this when memory is short: see `dmesg`." if code == -signal.SIGKILL else ""
    return (
        f"{name}: got {describe_exit(code)} after {restarts}, expected a process that stays.{memory}\n"
        f"command: {shlex.join(argv)}\nlast lines of {log}:\n{indented(last_lines(log, 8, from_byte=from_byte))}"
    )


def indented(lines: Sequence[str]) -> str:
    """Lines two spaces in."""
    return "\n".join(f"  {line}" for line in lines)
