"""Column chunks on the wire: an Arrow IPC record batch message without its schema message.

The reader knows the schema from the table, so bytes can only be what the schema says or be refused:
no decoder here can run code, and sizes are checked before anything is decoded.
"""

from __future__ import annotations

import functools
import struct

import pyarrow as pa

from rlmq.common.errors import DecodeError

MAX_PIECE_BYTES = 512 * 1024 * 1024  # also the server's limit for one value
_CONTINUATION = 0xFFFFFFFF
_RECORD_BATCH = 3  # MessageHeader union tag in Arrow's Message.fbs
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3  # fields of Message
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3  # fields of RecordBatch


def encode(batch: pa.RecordBatch) -> pa.Buffer:
    """One uncompressed record batch message; slices take only their own bytes along."""
    return batch.serialize()


def decode(data: bytes, schema: pa.Schema, *, rows: int, max_bytes: int = MAX_PIECE_BYTES) -> pa.RecordBatch:
    """The record batch in `data`, fully validated; string and list buffers point into `data`.

    Raises:
        DecodeError: not a record batch message of this schema with `rows` rows, compressed, or too large.
    """
    if len(data) > max_bytes:
        raise _refused(f"{len(data)} bytes", f"at most {max_bytes} bytes")
    declared, shape = _header(data)
    if declared != rows:
        raise _refused(f"{declared} rows", f"{rows} rows")
    if shape != _shape(schema):
        raise _refused(f"(nodes, buffers) {shape}", f"{_shape(schema)}, as columns {schema.names} have")
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise _refused(f"{type(error).__name__}: {error}", f"columns {schema.names}") from error
    return batch


@functools.lru_cache(maxsize=256)
def _shape(schema: pa.Schema) -> tuple[int, int]:
    """Field nodes and buffers of a batch of this schema: Arrow would ignore what a message has beyond them."""
    return _header(encode(pa.RecordBatch.from_pylist([], schema=schema)).to_pybytes())[1]


def _header(data: bytes) -> tuple[int, tuple[int, int]]:
    """Row count, and numbers of field nodes and buffers, read before Arrow allocates anything.

    Compressed bodies are refused here: their decompressed size is only known by decompressing them.
    """
    try:
        mark, header_bytes = struct.unpack_from("<Ii", data, 0)
        if mark != _CONTINUATION or not 0 < header_bytes <= len(data) - 8:
            raise _refused("no message header", "an Arrow IPC message")
        header = data[8 : 8 + header_bytes]
        (root,) = struct.unpack_from("<I", header, 0)
        kind = _field(header, root, _HEADER_TYPE)
        if kind is None or header[kind] != _RECORD_BATCH:
            raise _refused("another kind of message", "a record batch message")
        body = _field(header, root, _BODY_LENGTH)
        body_bytes = struct.unpack_from("<q", header, body)[0] if body is not None else 0
        if not 0 <= body_bytes <= len(data) - 8 - header_bytes:
            raise _refused(f"a body of {len(data) - 8 - header_bytes} bytes", f"{body_bytes} bytes")
        where = _field(header, root, _HEADER)
        if where is None:
            raise _refused("an empty message", "a record batch message")
        batch = where + struct.unpack_from("<I", header, where)[0]
        if _field(header, batch, _COMPRESSION) is not None:
            raise _refused("a compressed body", "uncompressed buffers")
        length = _field(header, batch, _LENGTH)
        rows = int(struct.unpack_from("<q", header, length)[0]) if length is not None else 0
        return rows, (_items(header, batch, _NODES), _items(header, batch, _BUFFERS))
    except (struct.error, IndexError) as error:
        raise _refused("a cut message header", "an Arrow IPC message") from error


def _items(buffer: bytes, table: int, index: int) -> int:
    """Length of a flatbuffer table's vector."""
    at = _field(buffer, table, index)
    if at is None:
        return 0
    (offset,) = struct.unpack_from("<I", buffer, at)
    return int(struct.unpack_from("<I", buffer, at + offset)[0])


def _field(buffer: bytes, table: int, index: int) -> int | None:
    """Offset of a flatbuffer table's field (None: not stored, the default holds)."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise _refused("a vtable before the buffer", "an Arrow IPC message")
    (vtable_bytes,) = struct.unpack_from("<H", buffer, vtable)
    if 4 + 2 * index + 2 > vtable_bytes:
        return None
    (offset,) = struct.unpack_from("<H", buffer, vtable + 4 + 2 * index)
    return table + offset if offset else None


def _refused(got: str, expected: str) -> DecodeError:
    return DecodeError("column chunk", got=got, expected=expected, remedy="The sender or the wire is broken")
