"""What is told about a process that ended a run: one message, from its own log."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from rlmq.common.control import Death
from rlmq.common.processes import describe_exit, last_lines


def how(death: Death) -> str:
    """`"signal 9 (SIGKILL) in call 3/4/actor.train, silent for 31 s"`, as far as there is something to say."""
    words = "nothing" if death.exit_code is None else describe_exit(death.exit_code)
    words += f" in call {death.call}" if death.call else ""
    return f"{words}, {death.why}" if death.why else words


def failure(death: Death, log: Path, from_byte: int) -> str:
    """The process's own `error:` line, else its last lines; with its name and log.

    Args:
        death: the process and how it ended.
        log: its log file.
        from_byte: where the log of this start begins.
    """
    lines = last_lines(log, 200, from_byte=from_byte)
    said = [n for n, line in enumerate(lines) if line.startswith("error: ")]
    if said:
        text = "\n".join([lines[said[-1]].removeprefix("error: "), *lines[said[-1] + 1 :]])
    else:
        text = f"it ended with {how(death)}; its last lines:\n{indented(lines[-5:])}\n"
    return f"{death.name}: {text} (log: {log})"


def used_up(death: Death, log: Path, argv: Sequence[str], restarts: str) -> str:
    """The end of a process that was restarted too often: how it ended, its command, its last lines."""
    short = death.exit_code == -signal.SIGKILL and not death.why
    memory = " The kernel does this when memory is short: see `dmesg`." if short else ""
    return (
        f"{death.name}: got {how(death)} after {restarts}, expected a process that stays.{memory}\n"
        f"command: {shlex.join(argv)}\nlast lines of {log}:\n{indented(death.last_lines)}"
    )


def indented(lines: Sequence[str]) -> str:
    """Lines two spaces in."""
    return "\n".join(f"  {line}" for line in lines)
