"""Column chunks on the wire: an Arrow IPC record batch message without its schema message.

The reader knows the schema from the table, so bytes can only be what the schema says or be refused:
no decoder here can run code, and sizes are checked before anything is decoded.

A message is 0xFFFFFFFF, the length of its header (int32), the header (a flatbuffer, Arrow's Message.fbs), the body.
The header tells rows and body bytes; (length, nulls) of each node, in depth-first order of the schema's types;
(offset, size) of each buffer in the body. Nothing else in it depends on the rows, so that one comparison with
a header of as many nodes and buffers tells whether this Arrow could have written it.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from rlmq.common.errors import DecodeError, UsageError

MAX_PIECE_BYTES = 512 * 1024 * 1024  # also the server's limit for one value
_COPIED_BYTES = 1024 * 1024  # below, one copy of all buffers costs less than to send each by itself
_CONTINUATION = 0xFFFFFFFF
_RECORD_BATCH = 3  # MessageHeader union tag in Arrow's Message.fbs
_HEADER_TYPE, _HEADER, _BODY_BYTES = 1, 2, 3  # fields of Message
_ROWS, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3  # fields of RecordBatch
_NOT_SELF_CONTAINED = (
    pa.types.is_dictionary,
    pa.types.is_union,
    pa.types.is_run_end_encoded,
    pa.types.is_string_view,
    pa.types.is_binary_view,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


class Encoded(msgspec.Struct, frozen=True):
    """One message as buffers, to be sent one after the other, as often as needed.

    They may be the arrays' own memory, which they keep alive: nobody may write to it before they are sent.
    """

    parts: tuple[bytes | pa.Buffer, ...]
    nbytes: int

    def to_bytes(self) -> bytes:
        """The message in one piece."""
        return b"".join(self.parts)


def encode(batch: pa.RecordBatch) -> Encoded:
    """One uncompressed message; slices take only their own bytes along. For schemas that pass `check_schema`."""
    # The first is cheap, but counts what a slice leaves out too.
    if batch.get_total_buffer_size() < _COPIED_BYTES or pa.ipc.get_record_batch_size(batch) < _COPIED_BYTES:
        message = batch.serialize()
        return Encoded((message,), message.size)
    sink = _Sink()
    stream = pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), batch.schema)
    stream.write_batch(batch.slice(0, 0))  # the schema goes before the first one
    sink.parts.clear()
    stream.write_batch(batch)
    return Encoded(tuple(sink.parts), sum(map(len, sink.parts)))


class _Sink:
    """A file that keeps what Arrow's writer hands it: large buffers as they are, uncopied."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[bytes | pa.Buffer] = []
        self.write = self.parts.append

    def flush(self) -> None:
        """Nothing is held back."""


def decode(data: bytes, schema: pa.Schema, *, rows: int, max_bytes: int = MAX_PIECE_BYTES) -> pa.RecordBatch:
    """The record batch in `data`, fully validated; string and list buffers point into `data`.

    What follows from a schema is kept by the object's identity: give the same one each time.

    Raises:
        DecodeError: not a record batch message of this schema with `rows` rows, compressed, or too large.
        UsageError: see `check_schema`.
    """
    if len(data) > max_bytes:
        raise _refused(f"{len(data)} bytes", f"at most {max_bytes} bytes")
    plan = _plan(schema)
    numbers = (plan.skeleton.read(data) if plan.skeleton else None) or _walk(data, plan)
    _check(numbers, plan, data, rows)
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise _refused(f"{type(error).__name__}: {error}", f"columns {list(plan.names)}") from error
    return batch


def check_schema(schema: pa.Schema) -> None:
    """Refuse columns whose rows one message cannot carry, or not so that its bytes bound what a reader makes of it.

    Raises:
        UsageError: names a column with a dictionary, union, run-end encoded or view type.
    """
    for field in schema:
        if any(refused(kind) for kind in _tree(field.type) for refused in _NOT_SELF_CONTAINED):
            expected = "numbers, booleans, times, text, binary, or lists, maps or structs of them"
            raise UsageError(f"column '{field.name}'", got=field.type, expected=expected)


def _tree(kind: pa.DataType) -> Iterator[pa.DataType]:
    """The type and those below it, depth first: a message has a node for each."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    yield kind
    for index in range(kind.num_fields):
        yield from _tree(kind.field(index).type)


# Start of the body, body bytes, rows, then (length, nulls) of each node, (offset, size) of each buffer; unsigned.
_Numbers = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]


class _Skeleton(NamedTuple):
    """How this Arrow writes a header of so many nodes and buffers: fixed bytes, the numbers between them."""

    layout: struct.Struct  # fixed, body bytes, fixed, rows, fixed, buffers..., fixed, nodes..., fixed
    get_fixed: Callable[[tuple[Any, ...]], tuple[bytes, ...]]
    fixed: tuple[bytes, ...]
    nodes: int  # index of the first one's field

    def read(self, data: bytes) -> _Numbers | None:
        """The numbers in a message; None when any other byte of its header differs."""
        try:
            fields = self.layout.unpack_from(data)
        except struct.error:  # too short
            return None
        if self.get_fixed(fields) != self.fixed:
            return None
        return self.layout.size, fields[1], fields[3], fields[self.nodes : -1], fields[5 : self.nodes - 1]


class _Plan(NamedTuple):
    """What a schema asks of its messages. `bitmaps`: where a node and its validity buffer are in `_Numbers`."""

    names: tuple[str, ...]
    nodes: int
    buffers: int
    bitmaps: tuple[tuple[int, int], ...]
    skeleton: _Skeleton | None


_plans: dict[int, tuple[pa.Schema, _Plan]] = {}  # by id of the schema, which the entry keeps alive


def _plan(schema: pa.Schema) -> _Plan:
    """By identity, because to hash a schema takes longer than to decode a small message."""
    known = _plans.get(id(schema))
    if known is None:
        if len(_plans) >= 256:
            _plans.clear()
        known = _plans[id(schema)] = (schema, _plan_of(schema))
    return known[1]


@functools.lru_cache(maxsize=256)
def _plan_of(schema: pa.Schema) -> _Plan:
    check_schema(schema)
    nodes = buffers = 0
    bitmaps = []
    for kind in (kind for field in schema for kind in _tree(field.type)):
        if not pa.types.is_null(kind):  # which has no buffers in a message
            bitmaps.append((2 * nodes, 2 * buffers))
            buffers += kind.num_buffers
        nodes += 1
    return _Plan(tuple(schema.names), nodes, buffers, tuple(bitmaps), _skeleton(nodes, buffers))


@functools.lru_cache(maxsize=256)
def _skeleton(nodes: int, buffers: int) -> _Skeleton | None:
    """From a message whose rows and body bytes are not 0: flatbuffers leave zeros out.

    Returns:
        None when there is no such message, or its numbers do not come in the known order.
    """
    if not buffers:
        return None
    kinds = (pa.null(), pa.struct([]), pa.int8(), pa.string())  # with 0, 1, 2 and 3 buffers
    each, more = divmod(buffers, nodes)
    columns = [pa.nulls(1, kinds[each + (index < more)]) for index in range(nodes)]
    sample = pa.RecordBatch.from_arrays(columns, names=[""] * nodes).serialize().to_pybytes()
    spots = _spots(sample)
    runs = [(spots.body_bytes, 1), (spots.rows, 1), (spots.buffers[0], 2 * buffers), (spots.nodes[0], 2 * nodes)]
    if runs != sorted(runs):
        return None
    text, end = "<", 0
    for at, count in runs:
        text += f"{at - end}s{count}Q"
        end = at + 8 * count
    layout = struct.Struct(f"{text}{spots.start - end}s")
    first_node = 6 + 2 * buffers
    get_fixed = operator.itemgetter(0, 2, 4, first_node - 1, -1)
    return _Skeleton(layout, get_fixed, get_fixed(layout.unpack_from(sample)), first_node)


def _check(numbers: _Numbers, plan: _Plan, data: bytes, rows: int) -> None:
    """What Arrow's reader does not refuse by itself."""
    start, body_bytes, declared, nodes, buffers = numbers
    if declared != rows:
        raise _refused(f"{declared} rows", f"{rows} rows")
    if body_bytes != len(data) - start:
        raise _refused(f"a body of {len(data) - start} bytes", f"{body_bytes} bytes")
    most = rows + 8 * len(data)  # some types take no bytes: a few would stand for any number of values
    if nodes and max(nodes) > most:
        raise _refused(f"{max(nodes)} values", f"at most {most}, in so many bytes")
    # One that begins inside but ends outside is cut there, and then too short to be valid.
    if buffers and max(buffers) > body_bytes:
        raise _refused("a buffer outside of the body", f"all within {body_bytes} bytes")
    for node, bitmap in plan.bitmaps:
        if buffers[bitmap + 1] and not nodes[node + 1]:  # Arrow does not look at it then
            at, size = start + buffers[bitmap], min(buffers[bitmap + 1], nodes[node] // 8 + 1)
            every = (1 << nodes[node]) - 1
            if int.from_bytes(data[at : at + size], "little") & every != every:
                raise _refused("nulls where none are told", f"columns {list(plan.names)}")


def _walk(data: bytes, plan: _Plan) -> _Numbers:
    """The numbers in any Arrow's header, whatever its order."""
    spots = _spots(data)
    shape, expected = (spots.nodes[1], spots.buffers[1]), (plan.nodes, plan.buffers)
    if shape != expected:
        raise _refused(f"(nodes, buffers) {shape}", f"{expected}, as columns {list(plan.names)} have")
    try:
        body_bytes, rows = (
            struct.unpack_from("<Q", data, at)[0] if at else 0 for at in (spots.body_bytes, spots.rows)
        )
        nodes, buffers = (struct.unpack_from(f"<{2 * n}Q", data, at) for at, n in (spots.nodes, spots.buffers))
    except struct.error as error:
        raise _cut() from error
    return spots.start, body_bytes, rows, nodes, buffers


class _Spots(NamedTuple):
    """Positions in the message of its header's numbers, 0 for those left out; of lists, (position, count)."""

    start: int
    body_bytes: int
    rows: int
    nodes: tuple[int, int]
    buffers: tuple[int, int]


def _spots(data: bytes) -> _Spots:
    """Follow the flatbuffer's own offsets.

    Compressed bodies are refused here: their decompressed size is only known by decompressing them.
    """
    try:
        mark, header_bytes, root = struct.unpack_from("<IiI", data, 0)
        if mark != _CONTINUATION or not 0 < header_bytes <= len(data) - 8:
            raise _refused("no message header", "an Arrow IPC message")
        header = data[: 8 + header_bytes]
        message = 8 + root
        kind, at = _field(header, message, _HEADER_TYPE), _field(header, message, _HEADER)
        if not kind or header[kind] != _RECORD_BATCH or not at:
            raise _refused("another kind of message", "a record batch message")
        batch = at + struct.unpack_from("<I", header, at)[0]
        if _field(header, batch, _COMPRESSION):
            raise _refused("a compressed body", "uncompressed buffers")
        return _Spots(
            len(header),
            _field(header, message, _BODY_BYTES),
            _field(header, batch, _ROWS),
            _list(header, batch, _NODES),
            _list(header, batch, _BUFFERS),
        )
    except (struct.error, IndexError) as error:
        raise _cut() from error


def _list(header: bytes, table: int, index: int) -> tuple[int, int]:
    """Position and length of a flatbuffer table's vector."""
    at = _field(header, table, index)
    if not at:
        return 0, 0
    at += struct.unpack_from("<I", header, at)[0]
    return at + 4, int(struct.unpack_from("<I", header, at)[0])


def _field(header: bytes, table: int, index: int) -> int:
    """Position of a flatbuffer table's field; 0: not stored, its default holds."""
    vtable = table - struct.unpack_from("<i", header, table)[0]
    (vtable_bytes,) = struct.unpack_from("<H", header, vtable)
    if 4 + 2 * index + 2 > vtable_bytes:
        return 0
    (offset,) = struct.unpack_from("<H", header, vtable + 4 + 2 * index)
    return table + int(offset) if offset else 0


def _cut() -> DecodeError:
    return _refused("a cut message header", "an Arrow IPC message")


def _refused(got: str, expected: str) -> DecodeError:
    return DecodeError("column chunk", got=got, expected=expected, remedy="The sender or the wire is broken")
