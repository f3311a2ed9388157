"""The invariants of a table, recomputed from its chunks, leases and payload."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import redis

from rlmq.buffer.connection import Link
from rlmq.buffer.keys import TABLE_SUFFIXES
from rlmq.buffer.layout import Layout
from rlmq.buffer.store import ExperienceStore, RowRange

_ATTEMPTS = 5
_PAUSE_S = 0.2
_AT_ONCE = 128
_CLASSES = {"w": "waiting", "c": "waiting", "r": "ready", "l": "leased", "a": "past", "s": "past"}


def verify(
    store: ExperienceStore, client: redis.Redis, link: Link, layout: Layout, prefix: str, target: str
) -> list[str]:
    """Every broken invariant, as a sentence.

    A table that changes while it is looked at is looked at again; when it never holds still, what every look
    found alike is broken.
    """
    always: dict[str, str] | None = None
    for _ in range(_ATTEMPTS):
        found, moved = _look(store, client, link, layout, prefix, target)
        if not moved:
            return list(found.broken.values())
        kept = found.broken if always is None else always
        always = {key: text for key, text in kept.items() if key in found.broken}
        time.sleep(_PAUSE_S)
    return list((always or {}).values())


@dataclass
class _Look:
    broken: dict[str, str] = field(default_factory=dict)  # what is the same in every look, to its sentence
    live: int = 0
    bytes: int = 0
    rows: Counter[tuple[str, str]] = field(default_factory=Counter)  # (stage, class) to rows
    leased: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=dict)  # (stage, chunk) to runs
    payload: dict[str, int] = field(default_factory=dict)

    def note(self, text: str, key: str = "") -> None:
        """An invariant is broken."""
        self.broken[key or text] = text


def _look(
    store: ExperienceStore, client: redis.Redis, link: Link, layout: Layout, prefix: str, target: str
) -> tuple[_Look, bool]:
    look = _Look()
    commits = _commits(link, target)
    chunks = _names(client, prefix + TABLE_SUFFIXES["chunk"])
    held: set[str] = set()
    while some := list(itertools.islice(chunks, _AT_ONCE)):
        for chunk in link.call("chunks", target, *(name for name in some if name not in held))[2]:
            held.add(chunk[0].decode())
            _look_at_chunk(look, layout, chunk)
    _look_at_counts(look, store, layout)
    _look_at_leases(look, link, layout, target)
    _look_at_payload(look, client, prefix)
    return look, _commits(link, target) != commits


def held(client: redis.Redis, link: Link, prefix: str, target: str) -> Iterator[RowRange]:
    """The rows of every chunk whose payload is there."""
    chunks = _names(client, prefix + TABLE_SUFFIXES["chunk"])
    while some := list(itertools.islice(chunks, _AT_ONCE)):
        for name, rows, *_ in link.call("chunks", target, *dict.fromkeys(some))[2]:
            if rows:
                yield RowRange(name.decode(), 0, int(rows))


def _commits(link: Link, target: str) -> int:
    return int(link.call("chunks", target)[1])


def _names(client: redis.Redis, start: str) -> Iterator[str]:
    for key in client.scan_iter(match=start.replace("[", "\\[") + "*", count=1000):
        yield key.decode()[len(start) :]


def _look_at_chunk(look: _Look, layout: Layout, chunk: list[Any]) -> None:
    name, rows, group, nbytes, pieces, flat, indexed = chunk
    name = name.decode()
    runs = [(flat[k], flat[k + 1].decode()) for k in range(0, len(flat), 2)]
    if sum(count for count, _ in runs) != rows:
        look.note(f"rows: chunk {name} has runs of {sum(c for c, _ in runs)} rows, not {rows}")
    sizes = {pieces[k].decode(): int(pieces[k + 1]) for k in range(0, len(pieces), 2)}
    if sum(sizes.values()) != nbytes:
        look.note(f"bytes: chunk {name} counts {nbytes} bytes, its pieces have {sum(sizes.values())}")
    look.bytes += int(nbytes)
    look.payload |= {f"{name}/{piece}": size for piece, size in sizes.items()}
    width = 2 + len(layout.units)
    first = 0
    for count, signature in runs:
        live = signature[0] == "o"
        look.live += count if live else 0
        for index, stage in enumerate(layout.table.stages):
            state = signature[width + 2 * index]
            look.rows[stage.name, _CLASSES[state]] += count
            if not stage.ended and (state in "wcrl") != live and not (live and state == "a"):
                look.note(
                    f"end: chunk {name} rows {first}+{count} are '{signature[0]}' but '{state}' for {stage.name}"
                )
            if state == "l":
                look.leased.setdefault((index + 1, name), []).append((first, count))
            if state in "rl" and not stage.ended:
                missing = [c for c in stage.needs if signature[2 + layout.place[c][0]] != "1"]
                if missing:
                    look.note(f"ready: chunk {name} rows {first}+{count} lack {missing} of {stage.name}")
        first += count
    for index, stage in enumerate(layout.table.stages):
        ready = [(a, n) for a, n, s in _placed(runs) if s[width + 2 * index] == "r"]
        if stage.selector in ("fifo", "fresh_first"):
            right = "yes" if ready else ""
        else:
            size = 1 if stage.scope == "row" else group
            units = sorted({u for a, n in ready for u in range(a // size, (a + n - 1) // size + 1)})
            right = ",".join(map(str, units))
        if indexed[index].decode() != right:
            got = indexed[index].decode()
            look.note(f"index: chunk {name} is indexed '{got}' for {stage.name}, its rows say '{right}'")


def _placed(runs: list[tuple[int, str]]) -> Iterator[tuple[int, int, str]]:
    first = 0
    for count, signature in runs:
        yield first, count, signature
        first += count


def _look_at_counts(look: _Look, store: ExperienceStore, layout: Layout) -> None:
    counts = store.counts(layout.table.name)

    def compare(what: str, counted: int, found: int) -> None:
        if counted != found:
            look.note(f"counts: {what} counts {counted}, the chunks have {found}", f"{what} {counted - found}")

    compare("live", counts.live, look.live)
    compare("bytes", counts.payload_bytes, look.bytes)
    ended = sum(counts.ended.values())
    if ended != counts.admitted - counts.live:
        look.note(f"counts: {ended} rows ended by state, {counts.admitted - counts.live} by the counters")
    for stage in layout.table.stages:
        for kind, by_stage in (("waiting", counts.waiting), ("ready", counts.ready), ("leased", counts.leased)):
            compare(f"{kind} of {stage.name}", by_stage[stage.name], look.rows[stage.name, kind])
    if counts.live > layout.table.capacity_rows:
        look.note(f"capacity: {counts.live} rows live of {layout.table.capacity_rows}")
    if min(counts.waiting.values(), default=0) < 0:
        look.note(f"counts: a negative number of rows waits: {dict(counts.waiting)}")


def _look_at_leases(look: _Look, link: Link, layout: Layout, target: str) -> None:
    held: dict[tuple[int, str], set[int]] = {}
    for lease, index, _, _, _, *flat in link.call("leases", target)[1]:
        for k in range(0, len(flat), 3):
            chunk, first, count = flat[k].decode(), flat[k + 1], flat[k + 2]
            rows = {row for a, n in look.leased.get((index, chunk), ()) for row in range(a, a + n)}
            own = rows & set(range(first, first + count))
            known = held.setdefault((index, chunk), set())
            if own & known:
                look.note(f"lease: {lease.decode()} shares rows of chunk {chunk} with another lease")
            known |= own
    for (index, chunk), runs in look.leased.items():
        rows = {row for a, n in runs for row in range(a, a + n)}
        lost = rows - held.get((index, chunk), set())
        if lost:
            stage = layout.table.stages[index - 1].name
            look.note(f"lease: rows {sorted(lost)[:8]} of chunk {chunk} are leased by nobody for {stage}")


def _look_at_payload(look: _Look, client: redis.Redis, prefix: str) -> None:
    start = prefix + TABLE_SUFFIXES["payload"]
    stored = set(_names(client, start))
    names = list(look.payload)
    for at in range(0, len(names), _AT_ONCE):
        some = names[at : at + _AT_ONCE]
        pipeline = client.pipeline(transaction=False)
        for name in some:
            pipeline.strlen(start + name)
        for name, size in zip(some, pipeline.execute(), strict=True):
            if size != look.payload[name]:
                look.note(f"payload: {name} has {size} bytes, its chunk says {look.payload[name]}")
    for name in sorted(stored - look.payload.keys()):
        look.note(f"payload: {name} belongs to no chunk")
