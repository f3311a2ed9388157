"""Rows to pieces of payload and back.

A *piece* is one record batch: rows [first, first + count) of a chunk, columns of one unit. Later pieces of a
unit hide earlier ones where they overlap (a redelivered row is written again).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rlmq.buffer import codec
from rlmq.buffer.layout import END_COLUMNS, Layout
from rlmq.buffer.store import RowRange
from rlmq.common.errors import IntegrityError, UsageError

_US, _RS = "\x1f", "\x1e"


@dataclass(frozen=True, slots=True)
class OutgoingPiece:
    """One piece to set; `columns` is empty when it holds all of the unit."""

    chunk: str
    first: int
    count: int
    unit: int
    columns: str
    data: bytes
    name: str


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One piece as the chunk's record names it; `columns` are names."""

    name: str
    first: int
    count: int
    columns: tuple[str, ...]


@dataclass(slots=True)
class Whereabouts:
    """Where a chunk's payload is: pieces by unit (oldest first), and how its rows ended."""

    rows: int
    pieces: dict[int, list[StoredPiece]] = field(default_factory=dict)
    ends: list[tuple[int, int, str, int, str]] = field(default_factory=list)  # first, count, state, step, reason


def cut(layout: Layout, batch: pa.RecordBatch, ranges: Sequence[RowRange], tag: str) -> list[OutgoingPiece]:
    """Pieces of `batch`, whose rows are those of `ranges` in order; `tag` makes their names unique."""
    by_unit: dict[int, list[str]] = {}
    for name in batch.schema.names:
        by_unit.setdefault(layout.place[name][0], []).append(name)
    pieces: list[OutgoingPiece] = []
    for unit, given in by_unit.items():
        names = [name for name in layout.units[unit] if name in given]
        whole = len(names) == len(layout.units[unit])
        columns = "" if whole else ",".join(str(layout.place[name][1]) for name in names)
        part = batch.select(names)
        offset = 0
        for one in _joined(ranges):
            data = codec.encode(part.slice(offset, one.count)).to_pybytes()
            if len(data) > codec.MAX_PIECE_BYTES:
                got = f"{len(data)} bytes in {one.count} rows of {names}"
                expected = f"at most {codec.MAX_PIECE_BYTES}"
                raise UsageError(f"chunk for table '{layout.table.name}'", got=got, expected=expected)
            name = f"{one.chunk}/{unit + 1}.{tag}.{len(pieces)}"
            pieces.append(OutgoingPiece(one.chunk, one.first, one.count, unit + 1, columns, data, name))
            offset += one.count
    return pieces


def _joined(ranges: Sequence[RowRange]) -> list[RowRange]:
    """Neighbouring ranges of one chunk as one (they differ in their delivery only)."""
    joined: list[RowRange] = []
    for one in ranges:
        last = joined[-1] if joined else None
        if last and last.chunk == one.chunk and last.first + last.count == one.first:
            joined[-1] = RowRange(last.chunk, last.first, last.count + one.count, last.delivery)
        else:
            joined.append(one)
    return joined


def parse_whereabouts(
    layout: Layout, units: Sequence[int], reply: Sequence[bytes | int]
) -> tuple[str, Whereabouts]:
    """A `whereabouts` reply of the functions: (chunk id, what is there)."""
    chunk, rows, *rest = reply
    where = Whereabouts(rows=int(rows))
    if rest:
        where.ends = list(_parse_ends(_text(rest[0])))
        for unit, entries in zip(units, rest[1:], strict=True):
            where.pieces[unit] = [_parse_piece(layout, unit, e) for e in _text(entries).split(";") if e]
    return _text(chunk), where


def _text(value: bytes | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _parse_ends(text: str) -> Iterator[tuple[int, int, str, int, str]]:
    for entry in text.split(_RS):
        if entry:
            first, count, state, step, reason = entry.split(_US, 4)
            yield int(first), int(count), state, int(step), reason


def _parse_piece(layout: Layout, unit: int, entry: str) -> StoredPiece:
    name, first, count, columns, _ = entry.split(":")
    names = layout.units[unit - 1]
    return StoredPiece(
        name, int(first), int(count), tuple(names[int(k)] for k in columns.split(",")) if columns else names
    )


def needed_pieces(
    ranges: Sequence[RowRange], schema: pa.Schema, layout: Layout, where: Mapping[str, Whereabouts]
) -> dict[str, StoredPiece]:
    """Pieces (by name) that hold a wanted column of a wanted row."""
    needed: dict[str, StoredPiece] = {}
    wanted = {name for name in schema.names if name in layout.place}
    for one in ranges:
        for pieces in where[one.chunk].pieces.values():
            for piece in pieces:
                overlaps = piece.first < one.first + one.count and one.first < piece.first + piece.count
                if overlaps and not wanted.isdisjoint(piece.columns):
                    needed[piece.name] = piece
    return needed


def assemble(
    ranges: Sequence[RowRange],
    schema: pa.Schema,
    layout: Layout,
    where: Mapping[str, Whereabouts],
    data: Mapping[str, bytes],
) -> pa.RecordBatch:
    """The wanted columns of the ranges, in order; null where nothing was written.

    Raises:
        DecodeError: a piece is not what its record says.
    """
    decoded: dict[str, pa.RecordBatch] = {}
    for piece in needed_pieces(ranges, schema, layout, where).values():
        piece_schema = pa.schema([layout.schema.field(name) for name in piece.columns])
        decoded[piece.name] = codec.decode(data[piece.name], piece_schema, rows=piece.count)
    total = sum(one.count for one in ranges)
    columns: list[pa.Array] = []
    for wanted in schema:
        if wanted.name in layout.place:
            parts = [part for one in ranges for part in _column(wanted, one, layout, where[one.chunk], decoded)]
        else:
            parts = [_ends(wanted, one, where[one.chunk]) for one in ranges]
        columns.append(_one_array(parts, wanted.type))
    return _batch(columns, schema, total)


def _one_array(parts: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    if not parts:
        return pa.array([], type=kind)
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _batch(columns: Sequence[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if columns:
        return pa.RecordBatch.from_arrays(list(columns), schema=schema)
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, type=pa.struct([])))


def _column(
    wanted: pa.Field, one: RowRange, layout: Layout, where: Whereabouts, decoded: Mapping[str, pa.RecordBatch]
) -> Iterator[pa.Array]:
    """Arrays that make up one column of one range: from the newest piece that has each row."""
    unit = layout.place[wanted.name][0] + 1
    pieces = [p for p in where.pieces.get(unit, ()) if wanted.name in p.columns]
    at, stop = one.first, one.first + one.count
    while at < stop:
        until = stop
        newest: StoredPiece | None = None
        for piece in reversed(pieces):
            if piece.first <= at < piece.first + piece.count:
                newest = piece
                until = min(until, piece.first + piece.count)
                break
            if at < piece.first < until:  # a newer piece begins inside what an older one would give
                until = piece.first
        if newest is None:
            yield pa.nulls(until - at, wanted.type)
        else:
            yield decoded[newest.name].column(wanted.name).slice(at - newest.first, until - at)
        at = until


def _ends(wanted: pa.Field, one: RowRange, where: Whereabouts) -> pa.Array:
    """One of `END_COLUMNS` for a range; null for live rows."""
    values: list[str | int | None] = [None] * one.count
    for first, count, state, step, reason in where.ends:
        known: dict[str, str | int] = {"end_state": state, "end_reason": reason, "end_step": step}
        value = known[wanted.name]
        for row in range(max(first, one.first), min(first + count, one.first + one.count)):
            values[row - one.first] = value
    return pa.array(values, type=END_COLUMNS.field(wanted.name).type)


def missing_piece(name: str) -> IntegrityError:
    """A chunk's record names payload that the server does not have."""
    return IntegrityError(f"payload '{name}'", got="nothing", expected="the piece that its chunk names")
