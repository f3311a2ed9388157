"""Column chunks: what goes in comes out, also by Arrow's own reader, and hostile bytes are refused."""

from __future__ import annotations

import gc
import pickle  # noqa: TID251 - the attack, not a decoder
import socket
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlmq.buffer import codec
from rlmq.common.columns import arrow_schema
from rlmq.common.errors import DecodeError, UsageError
from rlmq.common.flow import sample_columns, sample_flow

pytestmark = pytest.mark.timeout(120)

# Drawing text for the first time builds tables for seconds; the machine may be busy.
_PATIENT = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
_SCHEMA = pa.schema(
    [
        ("tokens", pa.list_(pa.field("item", pa.int32()))),
        ("mask", pa.list_(pa.field("item", pa.bool_()))),
        ("text", pa.string()),
        ("reward", pa.float64()),
    ]
)
_ENCODERS = pytest.mark.parametrize("copied_bytes", [0, 1 << 20], ids=["uncopied", "copied"])

_LEAVES = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float16(): st.floats(width=16, allow_nan=False),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(max_size=5),
    pa.large_string(): st.text(max_size=5),
    pa.binary(): st.binary(max_size=5),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.timestamp("us"): st.datetimes(),
}


def _nested(kinds):
    items = kinds.map(lambda kind: pa.field("item", kind))
    return st.one_of(
        items.map(pa.list_),
        items.map(pa.large_list),
        st.builds(pa.list_, items, st.integers(0, 3)),
        st.lists(items, max_size=2).map(
            lambda fields: pa.struct([f.with_name(f"f{k}") for k, f in enumerate(fields)])
        ),
        kinds.map(lambda kind: pa.map_(pa.string(), kind)),
    )


_KINDS = st.recursive(st.sampled_from(list(_LEAVES)), _nested, max_leaves=3)


def _values(kind):
    if pa.types.is_map(kind):
        some = st.lists(st.tuples(st.text(max_size=2), _values(kind.item_type)), max_size=3)
    elif pa.types.is_fixed_size_list(kind):
        some = st.lists(_values(kind.value_type), min_size=kind.list_size, max_size=kind.list_size)
    elif pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        some = st.lists(_values(kind.value_type), max_size=3)
    elif pa.types.is_struct(kind):
        some = st.fixed_dictionaries({field.name: _values(field.type) for field in kind})
    else:
        some = _LEAVES[kind]
    return some | st.none()


@st.composite
def _batches(draw):
    """A slice of a batch, with or without nulls, of any columns that a chunk can hold."""
    rows = draw(st.integers(0, 9))
    columns = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        kind = draw(_KINDS)
        values = _values(kind)
        if draw(st.booleans()) and kind != pa.null():
            values = values.filter(lambda value: value is not None)
        columns[name] = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), type=kind)
    batch = pa.record_batch(columns)
    first = draw(st.integers(0, rows))
    return batch.slice(first, draw(st.integers(0, rows - first)))


def _batch(rows):
    return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


def _message():
    rows = [{"tokens": [k] * k, "mask": [True] * k, "text": "é" * k, "reward": k / 3} for k in range(6)]
    return codec.encode(_batch(rows)).to_bytes()


def _by_arrow(message, schema):
    """What Arrow's own stream reader makes of the message."""
    return pa.ipc.open_stream(schema.serialize().to_pybytes() + message).read_next_batch()


def _one(values, kind=None):
    """A message of one column, as a mutable copy, and its schema."""
    batch = pa.record_batch({"v": pa.array(values, type=kind)})
    return bytearray(codec.encode(batch).to_bytes()), batch.schema


def _body(message):
    return 8 + struct.unpack_from("<i", message, 4)[0]


@_ENCODERS
@settings(_PATIENT, max_examples=200)
@given(_batches())
def test_any_batch_comes_back_equal_here_and_by_arrows_own_reader(copied_bytes, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_COPIED_BYTES", copied_bytes)
        encoded = codec.encode(batch)
    message = encoded.to_bytes()
    assert encoded.nbytes == len(message)
    assert _by_arrow(message, batch.schema).equals(batch)
    decoded = codec.decode(message, batch.schema, rows=batch.num_rows)
    assert decoded.equals(batch)
    assert decoded.to_pylist() == batch.to_pylist()


def test_floats_keep_their_bits():
    values = np.frombuffer(np.arange(64, dtype=np.uint64) * np.uint64(0x0123456789ABCDEF), dtype=np.float64)
    message, schema = _one(values)
    assert codec.decode(bytes(message), schema, rows=64)["v"].to_numpy().tobytes() == values.tobytes()


@_ENCODERS
def test_a_slice_does_not_carry_its_siblings_bytes(copied_bytes, monkeypatch):
    batch = _batch([{"tokens": list(range(1000)), "mask": None, "text": "t" * 1000, "reward": 1.0}] * 50)
    monkeypatch.setattr(codec, "_COPIED_BYTES", copied_bytes)
    assert codec.encode(batch.slice(7, 1)).nbytes < codec.encode(batch).nbytes / 20


@_ENCODERS
def test_memory_behind_the_values_is_not_sent(copied_bytes, monkeypatch):
    monkeypatch.setattr(codec, "_COPIED_BYTES", copied_bytes)
    values = pa.py_buffer(np.arange(3, dtype=np.int64).tobytes() + b"secret" * 100)
    offsets = pa.py_buffer(np.array([0, 1, 3], np.int32).tobytes() + b"secret" * 100)
    items = pa.Array.from_buffers(pa.int64(), 3, [None, values])
    lists = pa.Array.from_buffers(pa.list_(pa.int64()), 2, [None, offsets], children=[items])
    message = codec.encode(pa.record_batch({"v": lists})).to_bytes()
    assert b"secret" not in message
    assert _by_arrow(message, pa.schema([("v", lists.type)]))["v"].to_pylist() == [[0], [1, 2]]


def test_large_columns_are_sent_from_their_own_memory_as_often_as_needed():
    # given a batch of 8 MB, of which nothing but the message is kept
    values = pa.array(np.arange(1_000_000))
    batch = pa.record_batch({"v": values, "w": pa.array(["text"] * 1_000_000)})
    schema, address, expected = batch.schema, values.buffers()[1].address, batch.serialize().to_pybytes()
    encoded = codec.encode(batch)
    del values, batch
    gc.collect()
    # then a part is the array's memory, and the parts make the same message each time they are sent
    assert address in [part.address for part in encoded.parts if isinstance(part, pa.Buffer)]
    for _ in range(2):
        assert _sent(encoded) == expected
    assert codec.decode(expected, schema, rows=1_000_000)["v"].to_numpy().sum() == 999_999 * 500_000


def _sent(encoded):
    """What arrives when each part is sent by itself."""
    here, there = socket.socketpair()
    received = bytearray()
    with here, there:
        for part in encoded.parts:
            view = memoryview(part).cast("B")
            while view:
                sent = here.sendmsg([view[: 1 << 16]])
                received += there.recv(sent, socket.MSG_WAITALL)
                view = view[sent:]
    return bytes(received)


def test_columns_point_into_the_message():
    message, schema = _one([[1, 2], [3]])
    data = bytes(message)
    start = pa.py_buffer(data).address
    decoded = codec.decode(data, schema, rows=2)
    for buffer in filter(None, decoded["v"].buffers()):
        assert start <= buffer.address < start + len(data)


def test_all_columns_of_a_sample_table_are_supported():
    schema = arrow_schema(sample_columns(sample_flow(["math", "style"], reference=True)))
    codec.check_schema(schema)
    batch = pa.RecordBatch.from_pylist([{}, {}], schema=schema)
    assert codec.decode(codec.encode(batch).to_bytes(), schema, rows=2).equals(batch)


def test_extension_types_travel_as_what_they_store():
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(2, 3, 2))
    batch = pa.record_batch({"image": tensors})
    message = codec.encode(batch).to_bytes()
    assert codec.decode(message, batch.schema, rows=2).equals(batch)


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int8(), pa.string()),
        pa.list_(pa.dictionary(pa.int8(), pa.string())),
        pa.struct([("f", pa.string_view())]),
        pa.list_view(pa.int8()),
        pa.run_end_encoded(pa.int16(), pa.int8()),
        pa.sparse_union([pa.field("f", pa.int8())]),
    ],
    ids=str,
)
def test_types_that_one_message_cannot_carry_are_named(kind):
    schema = pa.schema([("fine", pa.int8()), ("odd", kind)])
    with pytest.raises(UsageError, match="column 'odd'"):
        codec.check_schema(schema)
    with pytest.raises(UsageError, match="column 'odd'"):
        codec.decode(b"", schema, rows=0)


def test_equal_schemas_share_what_is_known_and_different_ones_do_not():
    message, schema = _one([1, 2])
    for _ in range(600):  # more than are remembered
        copy = pa.schema(list(schema))
        assert codec.decode(bytes(message), copy, rows=2).schema.equals(schema)
        with pytest.raises(DecodeError):
            codec.decode(bytes(message), pa.schema([("v", pa.string())]), rows=2)
    assert len(codec._plans) <= 256


def test_a_message_as_this_arrow_writes_it_is_known_by_one_comparison(monkeypatch):
    data = _message()
    codec.decode(data, _SCHEMA, rows=6)
    monkeypatch.setattr(codec, "_walk", None)
    assert codec.decode(data, _SCHEMA, rows=6).num_rows == 6


@pytest.mark.parametrize("rows", [0, 3])
def test_headers_of_other_arrow_versions_are_read(rows):
    batch = _batch([{"tokens": [1, 2], "mask": [True], "text": "x", "reward": 0.5}] * rows)
    older = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _SCHEMA, options=older) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    older_message = reader.read_next_message().serialize().to_pybytes()
    data = codec.encode(batch).to_bytes()
    longer = data[:4] + struct.pack("<i", _body(data)) + data[8 : _body(data)] + bytes(8) + data[_body(data) :]
    assert older_message != data
    for message in (older_message, longer):
        assert codec.decode(message, _SCHEMA, rows=rows).equals(batch)


@settings(_PATIENT, max_examples=300)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(DecodeError):
        codec.decode(data, _SCHEMA, rows=6)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path):
    canary = tmp_path / "canary"

    class Attack:
        def __reduce__(self):
            return (Path.touch, (canary,))

    with pytest.raises(DecodeError):
        codec.decode(pickle.dumps(Attack()), _SCHEMA, rows=1)
    assert not canary.exists()


def test_a_compressed_body_is_refused_before_it_is_expanded():
    batch = _batch([{"tokens": [0] * 100_000, "mask": None, "text": "", "reward": 0.0}])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _SCHEMA, options=options) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    message = reader.read_next_message().serialize().to_pybytes()
    with pytest.raises(DecodeError, match="compressed body"):
        codec.decode(message, _SCHEMA, rows=1)


def test_another_kind_of_message_is_refused():
    with pytest.raises(DecodeError, match="record batch message"):
        codec.decode(_SCHEMA.serialize().to_pybytes(), _SCHEMA, rows=0)


def test_another_row_count_or_too_many_bytes_are_refused():
    with pytest.raises(DecodeError, match="got 6 rows, expected 7 rows"):
        codec.decode(_message(), _SCHEMA, rows=7)
    with pytest.raises(DecodeError, match="at most 100 bytes"):
        codec.decode(_message(), _SCHEMA, rows=6, max_bytes=100)


@pytest.mark.parametrize("more", [-8, -1, 1, 8])
def test_a_message_of_another_length_than_told_is_refused(more):
    data = _message()
    with pytest.raises(DecodeError, match="got a body of"):
        codec.decode(data[:more] if more < 0 else data + bytes(more), _SCHEMA, rows=6)


def test_rows_of_another_schema_are_refused():
    texts, _ = _one(["a"])
    with pytest.raises(DecodeError, match=r"got \(nodes, buffers\) \(1, 3\), expected \(1, 2\)"):
        codec.decode(bytes(texts), pa.schema([("v", pa.int64())]), rows=1)
    with pytest.raises(DecodeError):
        codec.decode(_message(), pa.schema([*_SCHEMA, ("more", pa.string())]), rows=6)


def test_text_that_is_not_utf_8_is_refused():
    message, schema = _one(["abcdefgh"])
    with pytest.raises(DecodeError):
        codec.decode(bytes(message).replace(b"abcdefgh", b"abc\xff\xfefgh"), schema, rows=1)


_I64 = struct.Struct("<q")


def _patched(message, old, new):
    """The message with one pair of int64 in its header replaced."""
    before = struct.pack("<2q", *old)
    header = bytes(message[: _body(message)])
    assert header.count(before) == 1
    return header.replace(before, struct.pack("<2q", *new)) + bytes(message[_body(message) :])


@pytest.mark.parametrize("told", [0, 1, 3, -1, 2**62])
def test_a_wrong_count_of_nulls_is_refused(told):
    message, schema = _one([7, None, 9, None, 11])
    with pytest.raises(DecodeError):
        codec.decode(_patched(message, (5, 2), (5, told)), schema, rows=5)


def test_nulls_told_without_a_bitmap_are_refused():
    message, schema = _one([7, 8, 9])
    with pytest.raises(DecodeError):
        codec.decode(_patched(message, (3, 0), (3, 1)), schema, rows=3)


def test_a_bitmap_that_tells_no_nulls_is_accepted():
    """Other implementations send one always."""
    message, schema = _one([7, None, 9])
    message[_body(message)] = 0b11111111
    assert codec.decode(_patched(message, (3, 1), (3, 0)), schema, rows=3)["v"].null_count == 0


@pytest.mark.parametrize("told", [4, 2**31, 2**62, -1])
def test_children_shorter_than_their_offsets_or_than_no_bytes_could_hold_are_refused(told):
    message, schema = _one([[1, 2], [3, 4, 5]], pa.list_(pa.int64()))
    with pytest.raises(DecodeError):
        codec.decode(_patched(message, (5, 0), (told, 0)), schema, rows=2)


@pytest.mark.parametrize("offsets", [(0, 3, 2), (1, 0, 5), (-1, 2, 5), (0, 2, 6), (0, 2, 2**31 - 1)])
def test_offsets_that_fall_or_lead_outside_are_refused(offsets):
    message, schema = _one([[1, 2], [3, 4, 5]], pa.list_(pa.int64()))
    struct.pack_into("<3i", message, _body(message), *offsets)
    with pytest.raises(DecodeError):
        codec.decode(bytes(message), schema, rows=2)


@pytest.mark.parametrize("kind", [pa.null(), pa.struct([]), pa.binary(0), pa.list_(pa.int8(), 0)], ids=str)
def test_few_bytes_cannot_stand_for_many_values(kind):
    value = {pa.null(): None, pa.struct([]): {}, pa.binary(0): b""}.get(kind, [])
    message, schema = _one([[value, value]], pa.list_(kind))
    nulls = 2 if kind == pa.null() else 0
    struct.pack_into("<2i", message, _body(message), 0, 2**31 - 1)
    bomb = _patched(message, (2, nulls), (2**31 - 1, 2**31 - 1 if nulls else 0))
    with pytest.raises(DecodeError, match="in so many bytes"):
        codec.decode(bomb, schema, rows=1)


@pytest.mark.parametrize("span", [(0, 2**40), (2**40, 40), (-8, 40), (0, -8), (2**63 - 1, 2**63 - 1), (40, 40)])
def test_buffers_outside_of_the_body_are_refused(span):
    message, schema = _one([1, 2, 3, 4, 5])
    with pytest.raises(DecodeError):
        codec.decode(_patched(message, (0, 40), span), schema, rows=5)


def test_a_buffer_of_no_use_must_lie_in_the_body_too():
    message, schema = _one(["", ""])
    with pytest.raises(DecodeError, match="outside of the body"):
        codec.decode(_patched(message, (16, 0), (16, 2**40)), schema, rows=2)
