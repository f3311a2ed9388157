"""Rows to pieces of payload and back.

A *piece* is one record batch: rows [first, first + count) of a chunk, columns of one unit. Later pieces of a
unit hide earlier ones where they overlap (a redelivered row is written again).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from rlmq.buffer import codec
from rlmq.buffer.keys import payload_key
from rlmq.buffer.layout import END_COLUMNS, LINEAGE, Layout, Part, Selection
from rlmq.buffer.store import RowRange, Written
from rlmq.common.errors import UsageError

_US, _RS = "\x1f", "\x1e"


class Outgoing(msgspec.Struct):
    """Pieces to set: their keys and messages, what the functions get to know of them, and their bytes."""

    sets: list[tuple[str, codec.Encoded]]
    arguments: list[str | int]
    nbytes: int


class StoredPiece(msgspec.Struct, frozen=True):
    """One piece as the chunk's record names it; `written_ms` counts from the chunk's put."""

    unit: int
    name: str
    first: int
    count: int
    written_ms: int
    version: int | None
    tag: str


class Whereabouts(msgspec.Struct):
    """Where a chunk's payload is: pieces by unit and how its rows ended, both as the functions tell them.

    `at_ms` is when it was put; a freed chunk has no rows.
    """

    rows: int
    at_ms: int = 0
    ended: str = ""
    units: dict[int, str] = {}

    def pieces(self, unit: int) -> list[StoredPiece]:
        """The unit's pieces, oldest first."""
        return [_parse_piece(unit, entry) for entry in self.units.get(unit, "").split(";") if entry]

    def all_pieces(self) -> list[StoredPiece]:
        """Those of all units."""
        return [piece for unit in self.units for piece in self.pieces(unit)]


# Chunk to (first row, rows, offset in a batch), in order of the rows.
Places = dict[str, list[tuple[int, int, int]]]


def places(ranges: Sequence[RowRange]) -> tuple[Places, int]:
    """Where the rows of a batch belong that has those of the ranges in order, and how many these are."""
    found: Places = {}
    offset = 0
    for one in _joined(ranges):
        found.setdefault(one.chunk, []).append((one.first, one.count, offset))
        offset += one.count
    for some in found.values():
        some.sort()
    return found, offset


def cut(
    layout: Layout, prefix: str, batch: pa.RecordBatch, parts: Sequence[Part], to: Places, tag: str
) -> Outgoing:
    """Pieces of `batch`; `tag`, with a number where there are several in one chunk, makes their names unique."""
    found = Outgoing([], [], 0)
    rows = batch.num_rows
    for unit, indexes in parts:
        part = batch if indexes is None else batch.select(indexes)
        for chunk, some in to.items():
            found.arguments += (chunk, unit, len(some))
            for k, (first, count, at) in enumerate(some):
                name = tag if len(some) == 1 else f"{tag}.{k}"
                data = codec.encode(part if count == rows else part.slice(at, count))
                if data.nbytes > codec.MAX_PIECE_BYTES:
                    got = f"{data.nbytes} bytes of {list(layout.units[unit - 1])} in one chunk"
                    expected = f"at most {codec.MAX_PIECE_BYTES}"
                    raise UsageError(f"chunk for table '{layout.table.name}'", got=got, expected=expected)
                nbytes = data.nbytes
                found.sets.append((payload_key(prefix, chunk, unit, name), data))
                found.arguments += (name, first, count, nbytes, f"{name}:{first}:{count}:{nbytes}")
                found.nbytes += nbytes
    return found


def _joined(ranges: Sequence[RowRange]) -> Sequence[RowRange]:
    """Neighbouring ranges of one chunk as one, whatever their deliveries and uses."""
    if len(ranges) == 1:
        return ranges
    joined: list[RowRange] = []
    for one in ranges:
        last = joined[-1] if joined else None
        if last and last.chunk == one.chunk and last.first + last.count == one.first:
            joined[-1] = RowRange(last.chunk, last.first, last.count + one.count, last.delivery)
        else:
            joined.append(one)
    return joined


def parse_whereabouts(units: Sequence[int], reply: Sequence[Any]) -> tuple[str, Whereabouts]:
    """A `whereabouts` reply of the functions: (chunk id, what is there)."""
    chunk, rows, *rest = reply
    if not rest:
        return chunk.decode(), Whereabouts(rows)
    at_ms, ended, *entries = rest
    told = {unit: text.decode() for unit, text in zip(units, entries, strict=True)}
    return chunk.decode(), Whereabouts(rows, at_ms, ended.decode(), told)


def parse_ends(text: str) -> Iterator[tuple[int, int, str, int, str]]:
    """How rows of a chunk ended, oldest first: first, count, state ('' when they live again), step, reason."""
    for entry in text.split(_RS):
        if entry:
            first, count, state, step, reason = entry.split(_US, 4)
            yield int(first), int(count), state, int(step), reason


def _parse_piece(unit: int, entry: str) -> StoredPiece:
    name, first, count, _, ms, version, tag = entry.split(":")
    return StoredPiece(unit, name, int(first), int(count), int(ms), int(version) if version else None, tag)


class Span(msgspec.Struct, frozen=True):
    """Rows of one chunk whose columns of one unit lie in one piece: rows [first, first + count) of its `of` rows.

    `key` is where the piece is (None: nothing was written).
    """

    key: str | None
    first: int
    count: int
    of: int


def spans(
    prefix: str, ranges: Sequence[RowRange], selection: Selection, where: Mapping[str, Whereabouts]
) -> list[list[Span]]:
    """For each unit of the selection, the ranges cut by the newest piece that has each row."""
    joined = _joined(ranges)
    by_unit: list[list[Span]] = []
    for unit in selection.units:
        found: list[Span] = []
        for one in joined:
            chunk, there = one.chunk, where[one.chunk]
            told = there.units.get(unit, "")
            if told.count(";") == 1:  # as nearly always
                name, first, rows, _ = told.split(":", 3)
                at, of = one.first - int(first), int(rows)
                if at >= 0 and at + one.count <= of:
                    found.append(Span(payload_key(prefix, chunk, unit, name), at, one.count, of))
                    continue
            found += _spans(prefix, one, unit, there)
        by_unit.append(found)
    return by_unit


def _spans(prefix: str, one: RowRange, unit: int, where: Whereabouts) -> list[Span]:
    found: list[Span] = []
    pieces = where.pieces(unit)
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
            found.append(Span(None, 0, until - at, 0))
        else:
            key = payload_key(prefix, one.chunk, unit, newest.name)
            found.append(Span(key, at - newest.first, until - at, newest.count))
        at = until
    return found


def assemble(
    ranges: Sequence[RowRange],
    selection: Selection,
    layout: Layout,
    where: Mapping[str, Whereabouts],
    by_unit: Sequence[Sequence[Span]],
    data: Mapping[str, bytes],
    writers: Mapping[str, str],
) -> pa.RecordBatch:
    """The wanted columns of the ranges, in order; null where nothing was written.

    Args:
        by_unit: what `spans` gave.
        data: the pieces that they name.

    Raises:
        DecodeError: a piece is not what its record says.
    """
    if selection.one_unit:
        return _unit_rows(layout.unit_schemas[selection.units[0] - 1], by_unit[0], data)
    units = {
        unit: _unit_rows(layout.unit_schemas[unit - 1], some, data)
        for unit, some in zip(selection.units, by_unit, strict=True)
    }
    columns: list[pa.Array] = []
    for wanted, place in zip(selection.schema, selection.places, strict=True):
        if place is not None:
            columns.append(units[place[0]].column(place[1]))
        elif wanted.name == LINEAGE.name:
            columns.append(_lineage_column(ranges, layout, where, writers))
        else:
            parts = [_ends(wanted, one, where[one.chunk]) for one in ranges]
            columns.append(parts[0] if len(parts) == 1 else pa.concat_arrays(parts))
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * sum(r.count for r in ranges), type=pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=selection.schema)


def _unit_rows(schema: pa.Schema, some: Sequence[Span], data: Mapping[str, bytes]) -> pa.RecordBatch:
    parts: list[pa.RecordBatch] = []
    known: str | None = None  # the piece that was decoded last
    for span in some:
        if span.key is None:
            nulls = [pa.nulls(span.count, kind) for kind in schema.types]
            parts.append(pa.RecordBatch.from_arrays(nulls, schema=schema))
            continue
        if span.key != known:
            known, piece = span.key, codec.decode(data[span.key], schema, rows=span.of)
        parts.append(piece if span.count == span.of else piece.slice(span.first, span.count))
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _ends(wanted: pa.Field, one: RowRange, where: Whereabouts) -> pa.Array:
    """One of `END_COLUMNS` for a range; null for live rows."""
    values: list[str | int | None] = [None] * one.count
    for first, count, state, step, reason in parse_ends(where.ended):
        known: dict[str, str | int] = {"end_state": state, "end_reason": reason, "end_step": step}
        value = known[wanted.name] if state else None
        for row in range(max(first, one.first), min(first + count, one.first + one.count)):
            values[row - one.first] = value
    return pa.array(values, type=END_COLUMNS.field(wanted.name).type)


def written(
    ranges: Sequence[RowRange], layout: Layout, where: Mapping[str, Whereabouts], writers: Mapping[str, str]
) -> list[Written]:
    """Lineage of the ranges, oldest first; `writers` maps numbers of clients to workers."""
    found: list[Written] = []
    for one in ranges:
        there = where[one.chunk]
        for piece in there.all_pieces():
            first = max(one.first, piece.first)
            count = min(one.first + one.count, piece.first + piece.count) - first
            if count > 0:
                rows, columns = RowRange(one.chunk, first, count), layout.units[piece.unit - 1]
                at, writer = (there.at_ms + piece.written_ms) / 1000, writers[client_of(piece.name)]
                found.append(Written(rows, columns, writer, at, piece.version, piece.tag))
    return sorted(found, key=lambda entry: entry.at)


def client_of(name: str) -> str:
    """Number of the client that wrote a piece."""
    return name.split(".", 1)[0]


def _lineage_column(
    ranges: Sequence[RowRange], layout: Layout, where: Mapping[str, Whereabouts], writers: Mapping[str, str]
) -> pa.Array:
    texts: list[str] = []
    for one in ranges:
        entries = written([one], layout, where, writers)
        ends = [(e.range.first, e.range.first + e.range.count) for e in entries]
        edges = sorted({one.first, one.first + one.count, *(edge for pair in ends for edge in pair)})
        for first, stop in itertools.pairwise(edges):
            there = [
                {"columns": e.columns, "writer": e.writer, "at": e.at, "version": e.version, "tag": e.tag}
                for e in entries
                if e.range.first <= first and stop <= e.range.first + e.range.count
            ]
            texts += [msgspec.json.encode(there).decode()] * (stop - first)
    return pa.array(texts, LINEAGE.type)
