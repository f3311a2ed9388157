"""What a worker may do: the ACL rules of a user that serves one run."""

from __future__ import annotations

import re

from rlmq.buffer import library
from rlmq.buffer.keys import run_prefix

_COMMANDS = (
    *("multi", "set", "exec", "fcall", "sort_ro", "mget", "hmget", "blpop"),
    *("info", "function|list", "select"),  # when connecting
)
_CALL = re.compile(r"\bp?call\('([A-Z]+)'")


def acl_rules(run_id: str) -> list[str]:
    """Rules for `ACL SETUSER name on >password …`: all that a worker of the run needs, and no more.

    The functions run with their caller's rights, so the commands that they call are among them. To load the
    functions is not: the controller does it, as a user that also has `+function|load`.

    Raises:
        UsageError: not a run's name.

    Example:
        >>> acl_rules("math-1")[:5]
        ['resetkeys', 'resetchannels', '-@all', '~rlmq:{math-1}:*', '~rlmq:{math-1:*']
    """
    run = run_prefix(run_id)
    commands = {*_COMMANDS, *(name.lower() for name in _CALL.findall(library.library_text()))}
    keys = (f"~{run}*", f"~{run.removesuffix('}:')}:*")
    return ["resetkeys", "resetchannels", "-@all", *keys, *(f"+{name}" for name in sorted(commands))]
