"""Rows are the same plain values from JSONL, Parquet and functions; what is not a data set is refused."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmq.common.errors import UsageError
from rlmq.producers.data import load_rows

# Chats of 1, 3 and 1 turns, a list inside messages, an integer column with a gap, nested lists.
D1 = """\
{"prompt":[{"role":"user","content":"one","tags":["a","b"]}],"year":2001,"ok":true,"extra_info":{"tests":[1,2],"deep":{"k":[0.5]}}}
{"prompt":[{"role":"user","content":"one","tags":[]},{"role":"assistant","content":"two","tags":[]},{"role":"user","content":"three","tags":["c"]}],"year":null,"ok":false,"extra_info":{"tests":[3],"deep":{"k":[]}}}
{"prompt":[{"role":"user","content":"four","tags":["d"]}],"year":1999,"ok":true,"extra_info":{"tests":[],"deep":{"k":[1.0]}}}
"""


def write_all(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """The rows as JSONL, as Parquet and as a function; returns the sources."""
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "t.parquet")
    (folder / "t.py").write_text(f"def rows():\n    return {rows!r}\n")
    return ["t.jsonl", "t.parquet", "t.py:rows"]


def types(value: Any) -> Any:
    """The exact types inside a value."""
    if type(value) is dict:
        return {key: types(item) for key, item in value.items()}
    return [types(item) for item in value] if type(value) is list else type(value)


def test_all_sources_give_the_same_plain_rows(tmp_path: Path) -> None:
    expected = [json.loads(line) for line in D1.splitlines()]
    for source in write_all(tmp_path, expected):
        rows = load_rows(source, tmp_path, subject="data.train")
        assert rows == expected
        assert types(rows) == types(expected)


def test_keys_that_only_some_messages_have_are_absent_elsewhere(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "ann", "more": {"x": 1}}], "b": 1},
        {
            "prompt": [{"role": "user", "content": "b", "more": {"y": "2"}}, {"role": "user", "content": "c"}],
            "b": 2,
        },
    ]
    found = [load_rows(source, tmp_path, subject="s") for source in write_all(tmp_path, rows)]
    assert found == [rows, rows, rows]


def test_columns_that_only_some_rows_have_are_none_elsewhere(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "x": 1}, {"prompt": "b", "y": [True]}]
    (tmp_path / "t.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows) + "\r\n")
    assert load_rows("t.jsonl", tmp_path, subject="s") == [
        {"prompt": "a", "x": 1, "y": None},
        {"prompt": "b", "x": None, "y": [True]},
    ]


def test_parquet_maps_dates_and_small_types_become_plain(tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": pa.array(["a"], pa.large_string()),
            "kind": pa.array(["x"]).dictionary_encode(),
            "small": pa.array([3], pa.uint8()),
            "half": pa.array([0.5], pa.float32()),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "day": pa.array([datetime.date(2026, 1, 2)]),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    (row,) = load_rows("t.parquet", tmp_path, subject="s")
    assert row == {"prompt": "a", "kind": "x", "small": 3, "half": 0.5, "map": {"k": 1}, "day": "2026-01-02"}
    assert types(row) == {"prompt": str, "kind": str, "small": int, "half": float, "map": {"k": int}, "day": str}


def test_functions_may_return_tuples_numpy_scalars_and_generators(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "import numpy as np\ndef rows():\n    yield {'prompt': np.str_('a'), 'x': np.float64(0.5), 'y': (1, 2)}\n"
    )
    (row,) = load_rows("t.py:rows", tmp_path, subject="s")
    assert types(row) == {"prompt": str, "x": float, "y": [int, int]}


def test_a_tool_call_needs_no_content(tmp_path: Path) -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "x"}]
    rows = [{"prompt": chat}]
    for source in write_all(tmp_path, rows):
        assert load_rows(source, tmp_path, subject="s") == rows


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["no rows"]),
        ("\n \n", ["no rows"]),
        ('{"prompt": "a"}\n{"prompt": \n', ["line 2", "one JSON object"]),
        ("[1]\n", ["line 1", "a JSON list"]),
        ('{"promt": "a", "x": 1}\n', ["the columns promt, x", "a column 'prompt'", "Rename 'promt'"]),
        ('{"prompt": "a"}\n{"x": 1}\n', ["row 2", "prompt: nothing"]),
        ('{"prompt": ""}\n', ["row 1", "an empty text"]),
        ('{"prompt": 5}\n', ["row 1", "int '5'"]),
        ('{"prompt": []}\n', ["an empty list of messages"]),
        ('{"prompt": ["hello"]}\n', ["message 1", "str 'hello'"]),
        ('{"prompt": [{"content": "x"}]}\n', ["message 1", "the keys content", "a role"]),
        ('{"prompt": [{"role": "user", "content": "a"}, {"role": "user"}]}\n', ["message 2", "content"]),
        ('{"prompt": [{"role": "user", "content": 5}]}\n', ["message 1", "content int '5'"]),
        ('{"prompt": "a", "x": NaN}\n', ["line 1", "NaN", "null"]),
        ('{"prompt": "a", "x": {"y": [1e999]}}\n', ["row 1, x.y.0", "inf"]),
        ('{"prompt": "a", "x": 123456789012345678901234567890}\n', ["row 1, x", "as text"]),
        ('{"prompt": "a\\ud800"}\n', ["row 1, prompt", "half character"]),
    ],
)
def test_bad_jsonl_is_refused_by_place(tmp_path: Path, content: str, parts: list[str]) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(UsageError) as caught:
        load_rows("t.jsonl", tmp_path, subject="data.train")
    message = str(caught.value)
    assert message.startswith("data.train (t.jsonl)")
    assert all(part in message for part in parts), message


def test_missing_numbers_that_pandas_wrote_as_nan_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "year": [2001.0, math.nan]}), tmp_path / "t.parquet")
    with pytest.raises(UsageError, match=r"row 2, year: got float 'nan'.*Write null"):
        load_rows("t.parquet", tmp_path, subject="data.eval")


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("return []", ["no rows"]),
        ("return None", ["nothing", "a list of dicts"]),
        ("return {'prompt': 'a'}", ["dict", "a list of dicts"]),
        ("return ['a']", ["str 'a'", "a list of dicts"]),
        ("return [{1: 'a'}]", ["text keys"]),
        ("return [{'prompt': 'a', 'x': object()}]", ["row 1, x", "object", "Convert or drop"]),
        ("return [{'prompt': 'a', 'x': np.arange(3)}]", ["row 1, x", "ndarray"]),
        ("return [{'prompt': 'a', 'x': b'raw'}]", ["row 1, x", "bytes"]),
        ("raise KeyError('gone')", ["t.py:3", "KeyError", "gone"]),
        ("yield {'prompt': 'a'}\n    raise OSError('cut')", ["t.py:4", "cut"]),
    ],
)
def test_bad_functions_are_refused(tmp_path: Path, body: str, parts: list[str]) -> None:
    (tmp_path / "t.py").write_text(f"import numpy as np\ndef rows():\n    {body}\n")
    with pytest.raises(UsageError) as caught:
        load_rows("t.py:rows", tmp_path, subject="data.train")
    message = str(caught.value)
    assert message.startswith("data.train (t.py:rows)") and "\n" not in message
    assert all(part in message for part in parts), message


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no, it is not")
    (tmp_path / "d.jsonl").mkdir()
    for source, part in (
        ("t.csv", "NAME.jsonl, NAME.parquet or file.py:function"),
        ("u.jsonl", str(tmp_path / "u.jsonl")),
        ("t.parquet", "a readable Parquet file"),
        ("d.jsonl", "a readable UTF-8 file"),
        ("t.py", "NAME.jsonl"),
        ("u.py:rows", str(tmp_path / "u.py")),
    ):
        with pytest.raises(UsageError) as caught:
            load_rows(source, tmp_path, subject="data.train")
        assert part in str(caught.value)
