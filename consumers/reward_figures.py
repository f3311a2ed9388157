"""Means of what single scorers gave: the step's figures beside the reward."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlmq.common.columns import REWARD_FIELDS

_PART = "reward."


def figure_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Columns that `reward_figures` reads, of the rewards of these names; they may be null."""
    if not names:
        return ()
    return (*(f"{_PART}{name}" for name in names), REWARD_FIELDS)


def reward_figures(columns: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """`reward.NAME`, and `reward.NAME.FIELD` of numbers beside a score; means over the rows that have one.

    Args:
        columns: those of `figure_columns`, or some; others are left out.
    """
    found = {
        name: [v for v in values if v is not None] for name, values in columns.items() if name.startswith(_PART)
    }
    for text in columns.get(REWARD_FIELDS, ()):
        for scorer, fields in json.loads(text or "{}").items():
            for field, value in fields.items():
                if isinstance(value, int | float):
                    found.setdefault(f"{_PART}{scorer}.{field}", []).append(float(value))
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items()) if values}
