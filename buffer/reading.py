"""Reading payload: where it is, then all of it in one MGET."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import redis

from rlmq.buffer.connection import Link
from rlmq.buffer.keys import payload_key
from rlmq.buffer.layout import Layout
from rlmq.buffer.payload import Whereabouts, assemble, missing_piece, needed_pieces, parse_whereabouts
from rlmq.buffer.store import Claim, RowRange
from rlmq.common.errors import UsageError

_RELOCATIONS = 20  # a piece may be replaced between being named and being read, not this often
_KEYS_PER_COMMAND = 512


def locate(
    link: Link, layout: Layout, prefix: str, ranges: Sequence[RowRange], schema: pa.Schema
) -> dict[str, Whereabouts]:
    """Where the payload of the ranges' chunks is now; a freed chunk has no rows."""
    units = layout.units_of(schema)
    chunks = list(dict.fromkeys(one.chunk for one in ranges))
    found: dict[str, Whereabouts] = {}
    for at in range(0, len(chunks), _KEYS_PER_COMMAND):
        reply = link.call("locate", prefix, len(units), *units, *chunks[at : at + _KEYS_PER_COMMAND])
        found.update(parse_whereabouts(layout, units, one) for one in reply[1])
    return found


def fetch(
    link: Link,
    layout: Layout,
    prefix: str,
    ranges: Sequence[RowRange],
    schema: pa.Schema,
    where: dict[str, Whereabouts],
) -> pa.RecordBatch:
    """The wanted columns; a piece that was replaced since `where` was told is looked up again.

    Raises:
        DecodeError: damaged payload. IntegrityError: payload that a chunk names is not there.
    """
    missing = ""
    for _ in range(_RELOCATIONS):
        names = list(needed_pieces(ranges, schema, layout, where))
        data = _get(link, prefix, names)
        if len(data) == len(names):
            return assemble(ranges, schema, layout, where, data)
        missing = next(name for name in names if name not in data)
        where = locate(link, layout, prefix, ranges, schema)
        if any(where[one.chunk].rows == 0 for one in ranges):  # freed since: no nulls in place of its values
            break
    raise missing_piece(missing)


def _get(link: Link, prefix: str, names: Sequence[str]) -> dict[str, bytes]:
    """Those pieces that are there."""
    data: dict[str, bytes] = {}
    for at in range(0, len(names), _KEYS_PER_COMMAND):
        some = names[at : at + _KEYS_PER_COMMAND]
        (values,) = link.exchange([("MGET", *(payload_key(prefix, name) for name in some))])
        if isinstance(values, redis.ResponseError):
            raise values
        data.update((name, value) for name, value in zip(some, values, strict=True) if value is not None)
    return data


def subset(claim: Claim, rows: Sequence[int]) -> list[RowRange]:
    """Ranges of the claim's rows with these indices.

    Raises:
        UsageError: an index beyond the claim.
    """
    wanted = sorted(set(rows))
    if wanted[0] < 0 or wanted[-1] >= claim.count:
        raise UsageError("finish", got=f"rows {wanted[0]} to {wanted[-1]}", expected=f"indices below {claim.count}")
    ranges: list[RowRange] = []
    start, k = 0, 0
    for one in claim.ranges:
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
