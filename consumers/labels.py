"""What the run's reward model learns of a step: which rows, and what each shall score."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from rlmq.common.recipe.schema import Recipe

TARGET = "advantages"
"""Column of the targets, as the loss of pairs reads it: 1 pulls a score up, -1 down."""


def label_columns(recipe: Recipe) -> tuple[str, ...]:
    """The column that the reward model learns from, if there is one; it may be null."""
    learns = recipe.reward_model.learns
    return () if learns is None else (f"reward.{learns}",)


def learned_units(
    groups: Sequence[str], responses: Sequence[Sequence[int]], columns: Mapping[str, Sequence[Any]], recipe: Recipe
) -> list[tuple[int, ...]]:
    """Rows that it learns from, in training order: pairs (best and worst of a group), or each by itself.

    Rows without a value or without a response are none of them; of equal ones the first counts, and a group whose
    values are all equal has no pair.
    """
    found: list[tuple[int, ...]] = []
    block, members = recipe.reward_model, dict[str, list[int]]()
    for column in label_columns(recipe):
        values = columns[column]
        for row, group in enumerate(groups):
            if values[row] is not None and responses[row]:
                members.setdefault(group, []).append(row)
        for group, rows in members.items():
            if _draw(recipe.run.seed, group) >= block.share:
                continue
            best, worst = max(rows, key=values.__getitem__), min(rows, key=values.__getitem__)
            if block.loss == "regression":
                found += [(row,) for row in rows]
            elif values[best] > values[worst]:
                found.append((best, worst))
    return found


def targets(learned: Sequence[tuple[int, ...]], values: Sequence[Any]) -> Mapping[int, float]:
    """What each of these rows shall score; of a pair 1 for the better one, -1 for the other."""
    if learned and len(learned[0]) == 2:
        return {row: sign for pair in learned for row, sign in zip(pair, (1.0, -1.0), strict=True)}
    return {row: float(values[row]) for unit in learned for row in unit}


def _draw(seed: int, group: str) -> float:
    """Uniform in [0, 1), a function of both."""
    return int.from_bytes(hashlib.sha256(f"{seed} {group}".encode()).digest()[:6], "big") / 2**48
