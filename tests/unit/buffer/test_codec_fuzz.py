"""Hostile messages, decoded in a child process: refused, or valid to the last value; no crash, hang or other error.

To see one case again: `python tests/unit/buffer/test_codec_fuzz.py SEED CASE`.
"""

from __future__ import annotations

import mmap
import random
import resource
import secrets
import struct
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from rlmq.buffer import codec
from rlmq.common.errors import DecodeError

_SECONDS = 8.0
_CALL_S = 1.0  # the longest that one message may take
_ADDRESS_SPACE_BYTES = 8 << 30  # a message that makes the decoder allocate what it only claims runs into this
_TEXT = pa.string()
_SCHEMAS = [
    pa.schema([("v", pa.float32())]),
    pa.schema([("ids", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float32())), ("uid", pa.int64())]),
    pa.schema([("text", _TEXT), ("mask", pa.list_(pa.bool_())), ("done", pa.bool_()), ("half", pa.float16())]),
    pa.schema([("meta", pa.list_(pa.uint8(), 5)), ("raw", pa.binary()), ("hash", pa.binary(4))]),
    pa.schema([("turns", pa.list_(pa.struct([("role", _TEXT), ("ids", pa.list_(pa.int32()))])))]),
    pa.schema([("scores", pa.map_(_TEXT, pa.float64())), ("deep", pa.large_list(pa.list_(pa.large_string())))]),
    pa.schema([("none", pa.null()), ("nones", pa.list_(pa.null())), ("bare", pa.list_(pa.struct([])))]),
]
_NUMBERS = [
    0,
    1,
    2,
    7,
    8,
    63,
    64,
    127,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def _value(rng: random.Random, kind: pa.DataType, nulls: float) -> object:
    """Something of this type; None with probability `nulls`."""
    if pa.types.is_null(kind) or rng.random() < nulls:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _value(rng, field.type, nulls) for field in kind}
    if pa.types.is_map(kind):
        return [
            (_value(rng, kind.key_type, 0), _value(rng, kind.item_type, nulls)) for _ in range(rng.randrange(3))
        ]
    if pa.types.is_nested(kind):
        count = kind.list_size if pa.types.is_fixed_size_list(kind) else rng.randrange(5)
        return [_value(rng, kind.value_type, nulls) for _ in range(count)]
    return _leaf(rng, kind)


def _leaf(rng: random.Random, kind: pa.DataType) -> object:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "".join(rng.choices("abcé漢😀", k=rng.randrange(6)))
    if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return rng.randbytes(rng.randrange(6) if kind == pa.binary() else kind.byte_width)
    return rng.choice([True, False]) if pa.types.is_boolean(kind) else rng.randrange(100)


def _batch(rng: random.Random, schema: pa.Schema) -> pa.RecordBatch:
    rows, nulls = rng.choice([0, 1, 2, 8, 64]), rng.choice([0.0, 0.3])
    columns = [pa.array([_value(rng, f.type, nulls) for _ in range(rows)], type=f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _flip(rng: random.Random, data: bytearray, start: int, stop: int) -> None:
    """A few other bytes."""
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(start, stop)] = rng.randrange(256)


def _number(rng: random.Random, data: bytearray, start: int, stop: int) -> None:
    """A telling number of 2, 4 or 8 bytes where one may be."""
    size = rng.choice([2, 4, 8])
    value = rng.choice([*_NUMBERS, len(data), rng.randrange(1 << 10)]) + rng.choice([0, 0, 1, -1])
    at = rng.randrange(start, stop) // size * size
    data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def _move(rng: random.Random, data: bytearray, start: int, stop: int) -> None:
    """One node or buffer of the header in the place of another, or anything else of 16 bytes."""
    one, other = (rng.randrange(start, stop) // 8 * 8 for _ in range(2))
    data[one : one + 16] = data[other : other + 16]


def _cut(rng: random.Random, data: bytearray, start: int, stop: int) -> None:
    del data[rng.randrange(start, stop) :]


def _extend(rng: random.Random, data: bytearray, start: int, stop: int) -> None:
    data += rng.randbytes(rng.choice([1, 8, 64, 1000]))


_MUTATIONS = [_flip, _flip, _flip, _number, _number, _number, _move, _move, _cut, _extend]


def _body(data: bytes) -> int:
    return 8 + struct.unpack_from("<i", data, 4)[0]


def _case(seed: int, case: int) -> tuple[bytes, pa.Schema, int]:
    """A hostile message, and the schema and rows that its reader expects."""
    rng = random.Random(f"{seed}/{case}")
    schema = rng.choice(_SCHEMAS)
    batch = _batch(rng, schema)
    data = bytearray(codec.encode(batch).to_bytes())
    body = _body(data)
    if rng.random() < 0.1:  # a header over the body of another message, of any schema
        other = codec.encode(_batch(rng, rng.choice([schema, *_SCHEMAS]))).to_bytes()
        data[body:] = other[_body(other) :]
        if rng.random() < 0.3:
            return bytes(data), schema, batch.num_rows
    places = [(0, 8), (8, 72), (72, body), (72, body), (body, body + 64), (body, len(data))]
    for mutate in rng.choices(_MUTATIONS, k=rng.choice([1, 1, 1, 2, 3])):
        start, stop = rng.choice(places)
        if start < min(stop, len(data)):
            mutate(rng, data, start, min(stop, len(data)))
    return bytes(data), schema, batch.num_rows


def _decodes(data: bytes, schema: pa.Schema, rows: int) -> bool:
    """Whether it is a batch; then every value of it can be read, and it can be copied and sent on."""
    begun = time.perf_counter()
    try:
        batch = codec.decode(data, schema, rows=rows)
    except DecodeError:
        batch = None
    took = time.perf_counter() - begun
    assert took < _CALL_S, f"decode took {took:.1f} s"
    if batch is None:
        return False
    batch.validate(full=True)
    assert (batch.num_rows, batch.schema) == (rows, schema)
    values = batch.to_pylist()
    again = codec.decode(codec.encode(pa.concat_batches([batch, batch])).to_bytes(), schema, rows=2 * rows)
    assert repr(again.to_pylist()) == repr(values + values)
    return True


def _run(seed: int, path: str, seconds: float) -> None:
    """Cases one after the other, each noted in the file at `path` before it is tried."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 24) as note:
        stop = time.monotonic() + seconds
        case, decoded = 0, 0
        while time.monotonic() < stop:
            struct.pack_into("<q", note, 0, case)
            decoded += _decodes(*_case(seed, case))
            case += 1
            struct.pack_into("<qq", note, 8, case, decoded)


@pytest.mark.timeout(90)
def test_hostile_messages_are_refused_or_valid_to_the_last_value(tmp_path: Path):
    seed = secrets.randbits(32)
    note = tmp_path / "note"
    note.write_bytes(bytes(24))
    command = [sys.executable, "-X", "faulthandler", __file__, str(seed), str(note), str(_SECONDS)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = child.communicate(timeout=_SECONDS + 60)
    except subprocess.TimeoutExpired:
        child.kill()
        errors = child.communicate()[1] + "\nIt hung"
    case, tried, decoded = struct.unpack("<3q", note.read_bytes())
    print(f"seed {seed}: {tried} messages, {decoded} of them valid")
    assert child.returncode == 0, f"exit {child.returncode} at: python {__file__} {seed} {case}\n{errors}"
    assert 0 < decoded < tried
    assert tried > 100


if __name__ == "__main__":
    if len(sys.argv) == 3:
        hostile, expected, count = _case(int(sys.argv[1]), int(sys.argv[2]))
        print(expected, count, hostile.hex(" ", 8), sep="\n", flush=True)
        print(_decodes(hostile, expected, count))
    else:
        _run(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
