"""From what a reward function returned to one exact float64 (or None) per row.

Group statistics in the type that a reward came in are a known source of wrong advantages, and a lone number spread
over a batch is a known source of silent nonsense; so every value becomes a Python float here, and nothing is
broadcast.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

_MOST_CHARACTERS = 1000  # of a text beside a score


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """A row's value where there is none, with the reason."""

    reason: str


class UnusableValue(ValueError):
    """A value that is no number; the message says what it is."""


def to_number(value: Any) -> float | None:
    """One row's value as a float64, or None for no verdict.

    Accepts None, bool, int, float, other real numbers, 0-d arrays and tensors of any type and device, and a
    dict with a `score`.

    Raises:
        UnusableValue: anything else.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        if "score" not in value:
            raise UnusableValue(f"a dict without 'score' (keys: {', '.join(map(repr, value)) or 'none'})")
        return to_number(value["score"])
    shape = getattr(value, "shape", None)
    if shape is not None:
        if tuple(shape):
            raise UnusableValue(f"a {_kind(value)} of shape {tuple(shape)}")
        # An exact Python number, except for long doubles, which stay what they are.
        value = value.item() if hasattr(value, "item") else value
    if isinstance(value, str | bytes) or not (isinstance(value, numbers.Real) or hasattr(value, "__float__")):
        raise UnusableValue(f"a {_kind(value)}")
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise UnusableValue(f"a {_kind(value)} that is no float64 ({error})") from error


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a call returned: a value per row; the failure of the whole call (then all values are None); notes about
    single rows; and the further fields of rows that came as dicts ({} for the others; [] where no row has any)."""

    values: list[float | None]
    failure: str = ""
    notes: list[str] = field(default_factory=list)
    fields: list[dict[str, Any]] = field(default_factory=list)


def to_numbers(returned: Any, expected: int, function: str) -> Numbers:
    """A whole call's return value as one number per row.

    Args:
        returned: what the function returned.
        expected: number of rows that it was given.
        function: its name, for messages.

    NaN and infinities are no verdict for their row, with a note.
    """
    nothing: list[float | None] = [None] * expected
    items = _items(returned, expected)
    if items is None:
        return Numbers(nothing, f"{function}: expected {expected} values, got 1 ({_describe(returned)})")
    if len(items) != expected:
        count = (
            f"{len(items)}" if len(items) < expected or hasattr(returned, "__len__") else f"more than {expected}"
        )
        return Numbers(nothing, f"{function}: expected {expected} values, got {count}")
    values: list[float | None] = []
    notes: list[str] = []
    for row, item in enumerate(items):
        if isinstance(item, NoVerdict):
            notes.append(item.reason)
            values.append(None)
            continue
        try:
            value = to_number(item)
        except UnusableValue as error:
            return Numbers(nothing, f"{function}: row {row}: expected a number or None, got {error}")
        if value is not None and not math.isfinite(value):
            notes.append(f"{function}: row {row}: expected a finite number, got {value}")
            value = None
        values.append(value)
    fields = [further_fields(item) for item in items]
    return Numbers(values, "", notes, fields if any(fields) else [])


def further_fields(item: Any) -> dict[str, Any]:
    """What a dict has beside its `score`: numbers, texts (cut at 1000 characters), None; other values as text."""
    given = item.items() if isinstance(item, Mapping) else ()
    return {str(name): _plain(value) for name, value in given if name != "score"}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    try:
        number = to_number(value)
    except UnusableValue:
        return str(value)[:_MOST_CHARACTERS]
    exact = isinstance(value, int) and abs(value) < 1 << 63  # what a message holds
    return value if exact else number if number is not None and math.isfinite(number) else None


def _items(returned: Any, expected: int) -> list[Any] | None:
    """The values as a list; None for a lone value. A generator that never ends is cut after one too many."""
    if returned is None or isinstance(returned, str | bytes | Mapping | Set):
        return None
    shape = getattr(returned, "shape", None)
    if shape is not None:
        if not tuple(shape):
            return None
        if hasattr(returned, "tolist"):
            # bfloat16 has no numpy type; tolist() gives exact Python numbers for every type.
            return list(returned.tolist())
    if isinstance(returned, Iterator):
        return list(itertools.islice(returned, expected + 1))
    if isinstance(returned, Iterable):
        return list(returned)
    return None


def _describe(value: Any) -> str:
    text = repr(value)
    return f"a {_kind(value)}: {text if len(text) <= 80 else text[:77] + '...'}"


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def total(
    weights: Sequence[float], values: Sequence[float | None], ensembles: Sequence[str | None]
) -> float | None:
    """The sum of weight times value over what has a verdict; None where nothing has one.

    Items of one ensemble enter the sum as the mean over those of them that have a verdict.
    """
    parts: dict[object, list[float]] = {}
    for index, (weight, value, ensemble) in enumerate(zip(weights, values, ensembles, strict=True)):
        if value is not None:
            parts.setdefault(index if ensemble is None else ensemble, []).append(weight * value)
    return sum(sum(part) / len(part) for part in parts.values()) if parts else None
