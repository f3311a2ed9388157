"""Rows to pieces of payload and back.

A *piece* is one record batch: rows [first, first + count) of a chunk, columns of one unit. Later pieces of a
unit hide earlier ones where they overlap (a redelivered row is written again).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

from rlmq.buffer import codec
from rlmq.buffer.keys import payload_key
from rlmq.buffer.layout import END_COLUMNS, LINEAGE, Layout, Selection
from rlmq.buffer.store import RowRange, Written
from rlmq.common.errors import UsageError

_US, _RS = "\x1f", "\x1e"


class OutgoingPieces(msgspec.Struct, frozen=True):
    """Pieces to set: all columns of a unit (1-based) for `ranges` of a chunk, one piece for each (first, count)."""

    chunk: str
    unit: int
    tag: str
    ranges: tuple[tuple[int, int], ...]
    data: tuple[codec.Encoded, ...]

    @property
    def nbytes(self) -> int:
        """Payload bytes of all."""
        return sum(one.nbytes for one in self.data)

    def keyed(self, prefix: str) -> list[tuple[str, codec.Encoded]]:
        """Where each goes: its name is the tag, with a number where there are several."""
        if len(self.data) == 1:
            return [(payload_key(prefix, self.chunk, self.unit, self.tag), self.data[0])]
        names = (f"{self.tag}.{k}" for k in range(len(self.data)))
        return [(payload_key(prefix, self.chunk, self.unit, n), d) for n, d in zip(names, self.data, strict=True)]

    def arguments(self) -> list[str | int]:
        """What the functions get to know of them."""
        given: list[str | int] = [self.chunk, self.unit, self.tag, len(self.data)]
        for (first, count), one in zip(self.ranges, self.data, strict=True):
            given += (first, count, one.nbytes)
        return given


class StoredPiece(msgspec.Struct, frozen=True):
    """One piece as the chunk's record names it; `written_ms` counts from the chunk's put."""

    unit: int
    name: str
    first: int
    count: int
    written_ms: int
    version: int | None
    tag: str


@dataclass(slots=True)
class Whereabouts:
    """Where a chunk's payload is:

    pieces by unit (oldest first), and how its rows ended. `at_ms` is when it was put.
    """

    rows: int
    at_ms: int = 0
    pieces: dict[int, list[StoredPiece]] = field(default_factory=dict)
    ends: list[tuple[int, int, str, int, str]] = field(default_factory=list)  # first, count, state, step, reason


def cut(
    layout: Layout, batch: pa.RecordBatch, units: Sequence[int], ranges: Sequence[RowRange], tag: str
) -> list[OutgoingPieces]:
    """Pieces of `batch`, whose rows are those of `ranges` in order; `tag` makes their names unique."""
    found: list[OutgoingPieces] = []
    places: dict[str, list[tuple[int, int, int]]] = {}  # chunk to (first, count, offset in the batch)
    offset = 0
    for one in _joined(ranges):
        places.setdefault(one.chunk, []).append((one.first, one.count, offset))
        offset += one.count
    for unit in units:
        part = batch if len(layout.units[unit]) == batch.num_columns else batch.select(layout.units[unit])
        for chunk, some in places.items():
            some.sort()
            data = tuple(codec.encode(part if count == offset else part.slice(at, count)) for _, count, at in some)
            for encoded in data:
                if encoded.nbytes > codec.MAX_PIECE_BYTES:
                    got = f"{encoded.nbytes} bytes of {list(layout.units[unit])} in one chunk"
                    expected = f"at most {codec.MAX_PIECE_BYTES}"
                    raise UsageError(f"chunk for table '{layout.table.name}'", got=got, expected=expected)
            rows = tuple((first, count) for first, count, _ in some)
            found.append(OutgoingPieces(chunk, unit + 1, tag, rows, data))
    return found


def _joined(ranges: Sequence[RowRange]) -> list[RowRange]:
    """Neighbouring ranges of one chunk as one, whatever their deliveries and uses."""
    joined: list[RowRange] = []
    for one in ranges:
        last = joined[-1] if joined else None
        if last and last.chunk == one.chunk and last.first + last.count == one.first:
            joined[-1] = RowRange(last.chunk, last.first, last.count + one.count, last.delivery)
        else:
            joined.append(one)
    return joined


def parse_whereabouts(units: Sequence[int], reply: Sequence[bytes | int]) -> tuple[str, Whereabouts]:
    """A `whereabouts` reply of the functions: (chunk id, what is there)."""
    chunk, rows, *rest = reply
    where = Whereabouts(rows=int(rows))
    if rest:
        where.at_ms = int(rest[0])
        if rest[1]:
            where.ends = list(parse_ends(_text(rest[1])))
        for unit, entries in zip(units, rest[2:], strict=True):
            where.pieces[unit] = [_parse_piece(unit, e) for e in _text(entries).split(";") if e]
    return _text(chunk), where


def _text(value: bytes | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


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
    """Rows of one chunk whose columns of one unit lie in one piece (None: nothing was written)."""

    chunk: str
    first: int
    count: int
    piece: StoredPiece | None

    @property
    def key(self) -> tuple[str, int, str] | None:
        """Chunk, unit and name of the piece."""
        return None if self.piece is None else (self.chunk, self.piece.unit, self.piece.name)


def spans(ranges: Sequence[RowRange], selection: Selection, where: Mapping[str, Whereabouts]) -> list[list[Span]]:
    """For each unit of the selection, the ranges cut by the newest piece that has each row."""
    joined = _joined(ranges)
    return [[span for one in joined for span in _spans(one, unit, where[one.chunk])] for unit in selection.units]


def _spans(one: RowRange, unit: int, where: Whereabouts) -> Iterator[Span]:
    pieces = where.pieces.get(unit, ())
    at, stop = one.first, one.first + one.count
    if len(pieces) == 1 and pieces[0].first <= at and stop <= pieces[0].first + pieces[0].count:
        yield Span(one.chunk, at, one.count, pieces[0])
        return
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
        yield Span(one.chunk, at, until - at, newest)
        at = until


def assemble(
    ranges: Sequence[RowRange],
    selection: Selection,
    layout: Layout,
    where: Mapping[str, Whereabouts],
    by_unit: Sequence[Sequence[Span]],
    data: Mapping[tuple[str, int, str], bytes],
    writers: Mapping[str, str],
) -> pa.RecordBatch:
    """The wanted columns of the ranges, in order; null where nothing was written.

    Args:
        by_unit: what `spans` gave.
        data: the pieces that they name.

    Raises:
        DecodeError: a piece is not what its record says.
    """
    units = {
        unit: _unit_rows(layout.unit_schemas[unit - 1], some, data)
        for unit, some in zip(selection.units, by_unit, strict=True)
    }
    if selection.one_unit:
        return units[selection.units[0]]
    columns: list[pa.Array] = []
    for wanted in selection.schema:
        if wanted.name in layout.place:
            unit, index = layout.place[wanted.name]
            columns.append(units[unit + 1].column(index))
        elif wanted.name == LINEAGE.name:
            columns.append(_lineage_column(ranges, layout, where, writers))
        else:
            parts = [_ends(wanted, one, where[one.chunk]) for one in ranges]
            columns.append(parts[0] if len(parts) == 1 else pa.concat_arrays(parts))
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * sum(r.count for r in ranges), type=pa.struct([])))
    return pa.RecordBatch.from_arrays(columns, schema=selection.schema)


def _unit_rows(
    schema: pa.Schema, some: Sequence[Span], data: Mapping[tuple[str, int, str], bytes]
) -> pa.RecordBatch:
    parts: list[pa.RecordBatch] = []
    decoded: tuple[StoredPiece, pa.RecordBatch] | None = None
    for span in some:
        piece, key = span.piece, span.key
        if piece is None or key is None:
            parts.append(
                pa.RecordBatch.from_arrays([pa.nulls(span.count, kind) for kind in schema.types], schema=schema)
            )
            continue
        if decoded is None or decoded[0] is not piece:
            decoded = piece, codec.decode(data[key], schema, rows=piece.count)
        whole = span.count == piece.count
        parts.append(decoded[1] if whole else decoded[1].slice(span.first - piece.first, span.count))
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _ends(wanted: pa.Field, one: RowRange, where: Whereabouts) -> pa.Array:
    """One of `END_COLUMNS` for a range; null for live rows."""
    values: list[str | int | None] = [None] * one.count
    for first, count, state, step, reason in where.ends:
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
        for pieces in there.pieces.values():
            for piece in pieces:
                first = max(one.first, piece.first)
                count = min(one.first + one.count, piece.first + piece.count) - first
                if count > 0:
                    at = (there.at_ms + piece.written_ms) / 1000
                    writer = writers[client_of(piece.name)]
                    columns = layout.units[piece.unit - 1]
                    found.append(
                        Written(RowRange(one.chunk, first, count), columns, writer, at, piece.version, piece.tag)
                    )
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
