"""The one place where a Redis key is spelled.

Every key of a run starts with `rlmq:{<run>…}`. The part in braces is the hash tag: one per table, so that
a table lies in one slot of a cluster and its functions may touch all of its keys, and one for the run's
control records. The functions get the prefix as a declared key and append a suffix from here
(`buffer/library.py` hands them over), for example `rlmq:{math-1:train}:state`.
"""

from __future__ import annotations

import re

from rlmq.common.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")

# Suffixes of a table's keys; `functions/*.lua` document what each holds.
TABLE_SUFFIXES = {
    "state": "state",
    "config": "config",
    "ended": "ended",
    "marks": "marks",
    "clients": "clients",
    "logged": "logged",
    "chunk": "chunk:",
    "payload": "payload:",
    "ready": "ready:",
    "priority": "priority:",
    "open": "open:",
    "since": "since:",
    "groups": "groups:",
    "leases": "leases",
    "trained": "trained",
    "dead": "dead",
    "waiters": "waiters",
    "waiting": "waiting:",
    "wake": "wake:",
    "fetch": "fetch",
}
_PAYLOAD = TABLE_SUFFIXES["payload"]
# Suffixes of a run's control records.
RUN_SUFFIXES = {
    "controller": "controller",
    "home": "home",
    "orders": "orders",
    "incarnations": "incarnations",
    "calls": "calls",
    "call_heads": "call-heads",
    "queue": "queue:",
    "results": "results",
    "desired": "desired",
    "notes": "notes",
}


def checked_name(kind: str, name: str) -> str:
    """`name`, when it can be part of a key: letters, digits, `.`, `_`, `-`, at most 120 characters."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{kind} name",
            got=repr(name),
            expected="letters, digits, '.', '_' or '-', starting with a letter or digit, at most 120",
            remedy="Rename it",
        )
    return name


def table_prefix(run_id: str, table: str) -> str:
    """Prefix of all keys of a table."""
    return f"rlmq:{{{checked_name('run', run_id)}:{checked_name('table', table)}}}:"


def run_prefix(run_id: str) -> str:
    """Prefix of a run's control records."""
    return f"rlmq:{{{checked_name('run', run_id)}}}:"


def payload_key(prefix: str, chunk: str, unit: int, name: str) -> str:
    """Key of one piece of payload: columns of one unit (1-based) as an Arrow record batch without its schema."""
    return f"{prefix}{_PAYLOAD}{chunk}/{unit}.{name}"


def wake_key(prefix: str, waiter: str) -> str:
    """Key of a waiter's wake tokens."""
    return f"{prefix}{TABLE_SUFFIXES['wake']}{waiter}"
