"""What a node's function gets, and the check of what it returns."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlmq.common.errors import UsageError


class NodeRow:
    """One row with the columns that the node reads: by name (`row["prompt_text"]`, `row.prompt_text`), or in their
    order (`for prompt, response in rows`).

    Raises:
        UsageError: a column that the node does not read.
    """

    __slots__ = ("_node", "_values")

    def __init__(self, node: str, values: Mapping[str, Any]) -> None:
        self._node = node
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.values())

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise UsageError(
                f"node {self._node}",
                got=f"its function wants column {name!r}",
                expected=f"one that it reads ({', '.join(self._values)})",
                remedy=f"Add {name} to its reads",
            )
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]


class TakenRows(list[NodeRow]):
    """Rows that tell when the next one is taken up."""

    taking: Callable[[], None]

    def __iter__(self) -> Iterator[NodeRow]:
        for row in super().__iter__():
            self.taking()
            yield row


def to_columns(returned: object, writes: Mapping[str, str], rows: int, *, subject: str) -> dict[str, list[Any]]:
    """What a node's function returned, by column.

    Args:
        returned: a mapping of column to one value a row; of a node with one column also the values alone.
        writes: names and types of the node's columns.
        rows: how many rows it got.
        subject: the beginning of error messages.

    Raises:
        UsageError: other columns, another number of values, or a value of another type.
    """
    if not isinstance(returned, Mapping):
        if len(writes) > 1:
            raise UsageError(subject, got=type(returned).__name__, expected=f"a mapping with {', '.join(writes)}")
        returned = {next(iter(writes)): returned}
    if set(returned) != set(writes):
        got = ", ".join(map(str, returned)) or "nothing"
        raise UsageError(subject, got=f"columns {got}", expected=", ".join(writes))
    return {name: _column(returned[name], kind, rows, f"{subject}: column {name}") for name, kind in writes.items()}


def _column(values: Any, kind: str, rows: int, subject: str) -> list[Any]:
    values = _plain(values)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UsageError(subject, got=type(values).__name__, expected=f"a list of {rows} values")
    if len(values) != rows:
        raise UsageError(subject, got=f"{len(values)} values for {rows} rows", expected="one for each row")
    return [_value(value, kind, f"{subject}, row {index}") for index, value in enumerate(values)]


def _value(value: Any, kind: str, subject: str) -> Any:
    value = _plain(value)
    if kind.startswith("list["):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise UsageError(subject, got=f"{value!r:.80}", expected=kind)
        return [_value(one, kind[5:-1], subject) for one in value]
    if kind == "float" and not isinstance(value, bool) and isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise UsageError(subject, got=repr(value), expected="a finite number")
        return float(value)
    wanted = {"bool": bool, "int": int, "str": str, "float": float}[kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
        raise UsageError(subject, got=f"{value!r:.80} ({type(value).__name__})", expected=kind)
    return value


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as Python's own values."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value
