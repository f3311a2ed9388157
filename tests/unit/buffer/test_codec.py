"""Column chunks: what goes in comes out, and hostile bytes are refused."""

from __future__ import annotations

import pickle  # noqa: TID251 - the attack, not a decoder
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlmq.buffer import codec
from rlmq.common.columns import arrow_schema, sample_columns
from rlmq.common.errors import DecodeError

# Drawing text for the first time builds tables for seconds; the machine may be busy.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
_SCHEMA = pa.schema(
    [
        ("tokens", pa.list_(pa.field("item", pa.int32()))),
        ("mask", pa.list_(pa.field("item", pa.bool_()))),
        ("text", pa.string()),
        ("reward", pa.float64()),
    ]
)
_ROW = st.fixed_dictionaries(
    {
        "tokens": st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
        "mask": st.none() | st.lists(st.booleans(), max_size=5),
        "text": st.none() | st.text(max_size=8),
        "reward": st.none() | st.floats(allow_nan=False),
    }
)


def _batch(rows):
    return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


def _message():
    rows = [{"tokens": [k] * k, "mask": [True] * k, "text": "é" * k, "reward": k / 3} for k in range(6)]
    return codec.encode(_batch(rows)).to_pybytes()


@_PATIENT
@given(st.lists(_ROW, max_size=12), st.data())
def test_any_slice_comes_back_equal(rows, data):
    batch = _batch(rows)
    first = data.draw(st.integers(0, len(rows)))
    count = data.draw(st.integers(0, len(rows) - first))
    part = batch.slice(first, count)
    decoded = codec.decode(codec.encode(part).to_pybytes(), _SCHEMA, rows=count)
    assert decoded.to_pylist() == rows[first : first + count]


def test_floats_keep_their_bits():
    values = np.frombuffer(np.arange(64, dtype=np.uint64) * np.uint64(0x0123456789ABCDEF), dtype=np.float64)
    schema = pa.schema([("v", pa.float64())])
    data = codec.encode(pa.record_batch([pa.array(values)], schema=schema)).to_pybytes()
    assert codec.decode(data, schema, rows=64)["v"].to_numpy().tobytes() == values.tobytes()


def test_a_slice_does_not_carry_its_siblings_bytes():
    batch = _batch([{"tokens": list(range(1000)), "mask": None, "text": "t" * 1000, "reward": 1.0}] * 50)
    assert len(codec.encode(batch.slice(7, 1))) < len(codec.encode(batch)) / 20


def test_all_columns_of_a_sample_table_are_supported():
    schema = arrow_schema(sample_columns(["math", "style"], reference=True))
    batch = pa.RecordBatch.from_pylist([{}, {}], schema=schema)
    assert codec.decode(codec.encode(batch).to_pybytes(), schema, rows=2).equals(batch)


@settings(_PATIENT, max_examples=300)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(DecodeError):
        codec.decode(data, _SCHEMA, rows=6)


@settings(_PATIENT, max_examples=600)
@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 1200)
)
def test_damaged_messages_are_refused_or_decode_to_valid_rows(flips, cut):
    data = bytearray(_message())
    for offset, value in flips:
        data[offset % len(data)] = value
    try:
        batch = codec.decode(bytes(data[: len(data) - cut] if cut < 200 else data), _SCHEMA, rows=6)
    except DecodeError:
        return
    batch.validate(full=True)
    assert (batch.num_rows, batch.schema) == (6, _SCHEMA)
    batch.to_pylist()


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


def test_rows_of_another_schema_are_refused():
    texts = codec.encode(pa.record_batch({"v": ["a"]})).to_pybytes()
    with pytest.raises(DecodeError, match=r"got \(nodes, buffers\) \(1, 3\), expected \(1, 2\)"):
        codec.decode(texts, pa.schema([("v", pa.int64())]), rows=1)
    with pytest.raises(DecodeError):
        codec.decode(_message(), pa.schema([*_SCHEMA, ("more", pa.string())]), rows=6)


def test_text_that_is_not_utf_8_is_refused():
    data = codec.encode(_batch([{"tokens": None, "mask": None, "text": "abcdefgh", "reward": None}])).to_pybytes()
    with pytest.raises(DecodeError):
        codec.decode(data.replace(b"abcdefgh", b"abc\xff\xfefgh"), _SCHEMA, rows=1)
