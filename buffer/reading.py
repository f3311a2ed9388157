"""Reading payload: a claim brings it along, in one round trip; others ask where it is, then for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import redis

from rlmq.buffer import payload
from rlmq.buffer.connection import Link, Refusable
from rlmq.buffer.keys import TABLE_SUFFIXES
from rlmq.buffer.layout import Layout, Selection
from rlmq.buffer.payload import Whereabouts
from rlmq.buffer.store import RowRange
from rlmq.buffer.wire import packed
from rlmq.common.errors import IntegrityError, UsageError

_RELOCATIONS = 20  # a piece may be replaced between being named and being read, not this often
_KEYS_PER_COMMAND = 512


@dataclass
class Reader:
    """Reads rows of one table."""

    link: Link
    prefix: str
    target: str
    layout: Layout
    writers: dict[str, str] = field(default_factory=dict)  # number of a client to its worker
    follow: Refusable | None = None  # the command that gets what the claim before it named; None: this user may not

    def __post_init__(self) -> None:
        """SORT looks names up by itself; its lists come as they are."""
        names, payload_keys = (self.prefix + TABLE_SUFFIXES[kind] for kind in ("fetch", "payload"))
        self.follow = Refusable(packed(("SORT_RO", names, "BY", "nosort", "GET", "#", "GET", f"{payload_keys}*")))

    def followed(self, answer: Any = ()) -> dict[str, bytes]:
        """The pieces that came with a claim, by key. A server that refuses is not asked again: clusters, and users
        that may not read every key.

        The list of names may be another claim's by now: what is missing here is asked for again.
        """
        if answer is None or isinstance(answer, redis.RedisError):
            self.follow = None
            return {}
        start = self.prefix + TABLE_SUFFIXES["payload"]
        pairs = zip(answer[::2], answer[1::2], strict=True)
        return {start + name.decode(): value for name, value in pairs if value is not None}

    def locate(self, ranges: Sequence[RowRange], units: Sequence[int]) -> dict[str, Whereabouts]:
        """Where the payload of the ranges' chunks is now; a freed chunk has no rows."""
        chunks = list(dict.fromkeys(one.chunk for one in ranges))
        found: dict[str, Whereabouts] = {}
        for at in range(0, len(chunks), _KEYS_PER_COMMAND):
            some = chunks[at : at + _KEYS_PER_COMMAND]
            reply = self.link.call("locate", self.target, len(units), *units, *some)
            found.update(payload.parse_whereabouts(units, one) for one in reply[1])
        return found

    def fetch(
        self,
        ranges: Sequence[RowRange],
        selection: Selection,
        where: dict[str, Whereabouts],
        known: dict[str, bytes] | None = None,
    ) -> pa.RecordBatch:
        """The wanted columns; a piece that was replaced since `where` was told is looked up again.

        `known` are pieces that are here already.

        Raises:
            DecodeError: damaged payload. IntegrityError: payload that a chunk names is not there.
        """
        missing, absent_rows = "", -1
        for _ in range(_RELOCATIONS):
            by_unit = payload.spans(self.prefix, ranges, selection, where)
            keys: dict[str, None] = {}
            without = 0
            for some in by_unit:
                for span in some:
                    if span.key is None:
                        without += span.count
                    else:
                        keys[span.key] = None
            if 0 <= absent_rows < without:  # the server came back older since: no nulls in place of what was there
                break
            absent_rows = without
            data: dict[str, bytes] = known or {}
            if not data or not keys.keys() <= data.keys():
                data = data | self._get([key for key in keys if key not in data])
            if None not in data.values():
                if selection.lineage:
                    self.learn_writers(where)
                return payload.assemble(ranges, selection, self.layout, where, by_unit, data, self.writers)
            missing = next(key for key, value in data.items() if value is None)
            where = self.locate(ranges, selection.units)
            if any(where[one.chunk].rows == 0 for one in ranges):  # freed since: no nulls in place of its values
                break
        shown = missing.removeprefix(self.prefix + TABLE_SUFFIXES["payload"])
        raise IntegrityError(f"payload '{shown}'", got="nothing", expected="the piece that its chunk names")

    def _get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those pieces; None for one that is not there."""
        data: dict[str, bytes] = {}
        for at in range(0, len(keys), _KEYS_PER_COMMAND):
            some = keys[at : at + _KEYS_PER_COMMAND]
            (values,) = self.link.exchange((packed(("MGET", *some)),))
            if isinstance(values, redis.ResponseError):
                raise values
            data.update(zip(some, values, strict=True))
        return data

    def learn_writers(self, where: dict[str, Whereabouts]) -> None:
        """Look up the clients that are not known yet."""
        named = {payload.client_of(piece.name) for there in where.values() for piece in there.all_pieces()}
        unknown = sorted(named - self.writers.keys())
        if unknown:
            (workers,) = self.link.exchange([("HMGET", self.prefix + TABLE_SUFFIXES["clients"], *unknown)])
            for number, worker in zip(unknown, workers, strict=True):
                self.writers[number] = worker.decode() if worker is not None else "unknown"


def subset(of: Sequence[RowRange], rows: Sequence[int]) -> list[RowRange]:
    """Of the rows of these ranges those with these indices, in order.

    Raises:
        UsageError: an index beyond them.
    """
    wanted = sorted(set(rows))
    count = sum(one.count for one in of)
    if wanted[0] < 0 or wanted[-1] >= count:
        raise UsageError("rows", got=f"{wanted[0]} to {wanted[-1]}", expected=f"indices below {count}")
    ranges: list[RowRange] = []
    start, k = 0, 0
    for one in of:
        while k < len(wanted) and wanted[k] < start + one.count:
            first = one.first + wanted[k] - start
            last = ranges[-1] if ranges else None
            if last and last.chunk == one.chunk and last.first + last.count == first:
                ranges[-1] = RowRange(last.chunk, last.first, last.count + 1)
            else:
                ranges.append(RowRange(one.chunk, first, 1))
            k += 1
        start += one.count
    return ranges
