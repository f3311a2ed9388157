"""Data sets as plain rows: the same lists, dicts, texts, ints, bools and None from every kind of source.

Parquet is read with pyarrow alone: pandas would turn lists into arrays, and integers with a gap into floats.
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from rlmq.common.errors import UsageError
from rlmq.common.user_code import find_beside, is_spec, load_function, source_file, user_error

Row = dict[str, Any]


def load_rows(source: str, folder: Path, *, subject: str, needs: Sequence[str] = ("prompt",)) -> list[Row]:
    """The rows of `.jsonl`, `.parquet` or `file.py:function` (called without arguments, returns rows).

    Every row has the same columns (absent ones are None) and a `prompt`: text, or chat messages. Keys of
    messages that are None are left out, since Parquet cannot tell them from absent ones and templates can.

    Args:
        source: a name relative to `folder`, or absolute.
        folder: the recipe's folder.
        subject: the recipe's key, the beginning of error messages.
        needs: columns that must be there; `prompt` is one of them.

    Raises:
        UsageError: missing, unreadable or empty; no `prompt`; a value that JSON has not (NaN included).
            Rows are counted from 1.
    """
    label = f"{subject} ({source})"
    if is_spec(source):
        raw = _call(source, folder, label)
    elif source.endswith(".jsonl"):
        raw = _read_jsonl(find_beside(source, folder, subject=subject), label)
    elif source.endswith(".parquet"):
        raw = _read_parquet(find_beside(source, folder, subject=subject), label)
    else:
        raise UsageError(subject, got=repr(source), expected="NAME.jsonl, NAME.parquet or file.py:function")
    if not raw:
        raise UsageError(label, got="no rows", expected="at least one row with a prompt")
    columns = list(dict.fromkeys(key for row in raw for key in row))
    for name in needs:
        if name not in columns:
            near = difflib.get_close_matches(name, columns, 1, 0.5)
            remedy = f"Rename {near[0]!r} to {name!r}" if near else ""
            raise UsageError(
                label, got=f"the columns {', '.join(columns)}", expected=f"a column {name!r}", remedy=remedy
            )
    return [_row(raw_row, columns, f"{label}, row {number}") for number, raw_row in enumerate(raw, 1)]


def _call(spec: str, folder: Path, label: str) -> list[Row]:
    function = load_function(spec, folder, subject=label)
    path = source_file(spec, folder, subject=label)
    try:
        result = function()
        rows = list(result) if isinstance(result, Iterable) and not isinstance(result, str | dict) else None
    except Exception as error:  # whatever the user's function raises
        raise user_error(error, path, subject=label) from error
    wrong = result if rows is None else next((row for row in rows if not _is_row(row)), None)
    if rows is None or wrong is not None:
        raise UsageError(label, got=_shown(wrong), expected="a list of dicts with text keys")
    return rows


def _is_row(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _read_jsonl(path: Path, label: str) -> list[Row]:
    rows: list[Row] = []
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(label, got=str(error), expected="a readable UTF-8 file") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{label}, line {number}"
        try:
            row = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            shown = f"{line.strip()[:60]!r} ({error})"
            raise UsageError(where, got=shown, expected="one JSON object per line") from error
        if not isinstance(row, dict):
            raise UsageError(where, got=f"a JSON {type(row).__name__}", expected="one JSON object per line")
        rows.append(row)
    return rows


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; write null for a missing number")


def _read_parquet(path: Path, label: str) -> list[Row]:
    try:
        table = pq.ParquetFile(path).read()
        return [dict(row) for row in table.to_pylist(maps_as_pydicts="strict")]
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise UsageError(label, got=f"{error}", expected="a readable Parquet file") from error


def _row(raw: Row, columns: list[str], where: str) -> Row:
    row = {key: _plain(raw.get(key), where, key) for key in columns}
    prompt = row["prompt"]
    if isinstance(prompt, list):
        row["prompt"] = _messages(prompt, where)
    elif not isinstance(prompt, str) or not prompt:
        got = "an empty text" if prompt == "" else f"prompt: {_shown(prompt)}"
        raise UsageError(where, got=got, expected="a prompt: text, or a list of chat messages")
    return row


def _messages(prompt: list[Any], where: str) -> list[Any]:
    if not prompt:
        raise UsageError(where, got="an empty list of messages", expected="at least one chat message")
    messages = []
    for number, message in enumerate(prompt, 1):
        of = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise UsageError(of, got=_shown(message), expected="{role: …, content: …}")
        kept = _without_nulls(message)
        if not isinstance(kept.get("role"), str):
            raise UsageError(of, got=f"the keys {', '.join(kept)}", expected="a role (text), and content")
        if not isinstance(kept.get("content"), str | list):
            if not kept.get("tool_calls"):
                raise UsageError(of, got=f"content {_shown(kept.get('content'))}", expected="content (text)")
            kept["content"] = None
        messages.append(kept)
    return messages


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any, where: str, key: str) -> Any:
    """The value in JSON's own types; subclasses (NumPy scalars that are floats, enums) become the plain type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        return _leaf(value, where, key)
    if isinstance(value, list | tuple):
        return [_plain(item, where, f"{key}.{i}") for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {str(name): _plain(item, where, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, datetime.date | datetime.time):  # Parquet has types for them; JSON writes ISO 8601
        return value.isoformat()
    raise _no_json(value, f"{where}, {key}", "Convert or drop this column")


def _leaf(value: int | float | str, where: str, key: str) -> int | float | str:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _no_json(value, f"{where}, {key}", "Remove the half character in it") from error
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _no_json(value, f"{where}, {key}", "Write null (None) for a missing number")
        return float(value)
    if not -(2**63) <= value < 2**64:
        raise _no_json(value, f"{where}, {key}", "Write it as text")
    return int(value)


def _no_json(value: Any, where: str, remedy: str) -> UsageError:
    expected = "text, a finite number of 64 bits, true, false, null, or lists and dicts of these"
    return UsageError(where, got=_shown(value), expected=expected, remedy=remedy)


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
