"""Who waits for whom: the wait graph of a run, a pure function of what is known of it.

::

    controller --waits for--> workers to be ready
                              a call        --on--> workers that have not answered --wait for--> rows, or nothing
                              rows of stage --lacking in--> earlier stages --leased to--> workers
    everybody  --waits for--> the Redis server, and for the supervisor when a process has died
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlmq.buffer.store import Waiting
from rlmq.common.control import Wait
from rlmq.controller.evidence import CONTROLLER, Evidence, StageRows

WORKERS = "workers"
"""What a controller waits for at the start."""
_STAGE = re.compile(r"stage (\S+) in table (\S+)")


@dataclass(frozen=True, slots=True)
class Edge:
    """`who` waits for `what`, which `on` owns; seconds from now (`left_s` None: no end)."""

    who: str
    what: str
    on: tuple[str, ...]
    since_s: float
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class Suspect:
    """Somebody that others wait for, and for how long it made no progress."""

    name: str
    doing: str
    still_s: float
    left_s: float | None = None


def edges(evidence: Evidence) -> Iterator[Edge]:
    """Who waits for what: the controller, the leases that are out, then the workers."""
    snapshot, now = evidence.snapshot, evidence.now_unix_s
    for wait in snapshot.waits if snapshot is not None else ():
        left_s = None if wait.until_unix_s is None else wait.until_unix_s - now
        yield Edge(wait.who, wait.what, wait.on, now - wait.since_unix_s, left_s)
    for rows in evidence.stages:
        for lease in sorted(rows.leases, key=lambda one: one.left_s):
            what = f"{_rows(lease.rows)} that {'is' if lease.rows == 1 else 'are'} leased"
            who = f"stage {rows.stage} of {rows.table}"
            yield Edge(who, what, (lease.worker,), rows.lease_s - lease.left_s, lease.left_s)
    waiters = dict.fromkeys(one.worker for one in evidence.waiting if one.worker != CONTROLLER)
    for worker in waiters:
        yield _sleeper(evidence, [one for one in evidence.waiting if one.worker == worker])
    for member in snapshot.members if snapshot is not None else ():
        if member.wait and member.name not in waiters:
            on = (CONTROLLER,) if member.wait == "a call" else ()
            yield Edge(member.name, member.wait, on, member.wait_s + evidence.age_s)


def _sleeper(evidence: Evidence, waiting: Sequence[Waiting]) -> Edge:
    """A worker that sleeps in the store, for rows or room in one of several places."""
    owners = [name for one in waiting if one.stage for name in _owners(evidence, one.table, one.stage)]
    wishes = dict.fromkeys(_wish(one) for one in waiting)
    tables = " or ".join(dict.fromkeys(one.table for one in waiting))
    what = f"{' or '.join(wishes)} in table {tables}"
    return Edge(waiting[0].worker, what, tuple(dict.fromkeys(owners)), max(one.since_s for one in waiting))


def _wish(one: Waiting) -> str:
    what = "rows" if one.for_what == "1 ready rows" else one.for_what
    return f"{what} of stage {one.stage}" if one.stage else what


def suspects(evidence: Evidence) -> Iterator[Suspect]:
    """Whom the controller waits for, at the ends of its chains."""
    snapshot = evidence.snapshot
    for wait in snapshot.waits if snapshot is not None else ():
        if wait.what != WORKERS:
            yield from _behind(evidence, wait)


def _behind(evidence: Evidence, wait: Wait) -> Iterator[Suspect]:
    stage = _STAGE.search(wait.what)
    if stage is not None:
        found = list(_holders(evidence, stage[2], stage[1]))
        if found:
            yield from found
            return
    left_s = None if wait.until_unix_s is None else wait.until_unix_s - evidence.now_unix_s
    members = evidence.snapshot.members if evidence.snapshot is not None else ()
    busy = [one.name for one in members if one.role in wait.on and one.activity != "idle"]
    for name in wait.on if stage is None else busy:
        member = evidence.member(name)
        still_s = member.still_s if member is not None else evidence.now_unix_s - wait.since_unix_s
        doing = f"works on {wait.what}" if stage is None or member is None else f"is {member.activity}"
        yield Suspect(name, doing, still_s, left_s)
        needed = _STAGE.search(member.wait) if member is not None else None
        if needed is not None:  # inside its call it sleeps for rows
            yield from (one for one in _holders(evidence, needed[2], needed[1]) if one.name != name)


def _holders(evidence: Evidence, table: str, stage: str) -> Iterator[Suspect]:
    """Who holds rows that this stage lacks, and who leaves them unclaimed."""
    by_name = {rows.stage: rows for rows in evidence.stages if rows.table == table}
    wanted = by_name.get(stage)
    for name in (*wanted.after, stage) if wanted is not None else ():
        rows = by_name.get(name)
        if rows is None:
            continue
        for lease in rows.leases:
            member = evidence.member(lease.worker)
            sleeps = f", waits for {member.wait}" if member is not None and member.wait else ""
            doing = f"holds {_rows(lease.rows)} of stage {name}{sleeps}"
            yield Suspect(lease.worker, doing, rows.lease_s - lease.left_s, lease.left_s)
        if name != stage and rows.ready and not rows.leases:
            yield from _idlers(evidence, rows)


def _idlers(evidence: Evidence, rows: StageRows) -> Iterator[Suspect]:
    members = evidence.snapshot.members if evidence.snapshot is not None else ()
    doing = f"leaves {_rows(rows.ready)} of stage {rows.stage} unclaimed"
    for member in members:
        if member.role == rows.stage:
            yield Suspect(member.name, doing, member.still_s)


def _owners(evidence: Evidence, table: str, stage: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.name for one in _holders(evidence, table, stage))) if stage else ()


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"


def age(seconds: float) -> str:
    """`0.4 s`, `41 s`, `12 min`, `3 h`, `2 days`."""
    for unit, length_s, below in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < below:
            value = max(0.0, seconds) / length_s
            return f"{value:.1f} {unit}" if value < 10 and unit == "s" else f"{value:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
