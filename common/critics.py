"""The critics of a run: which role gives which values, and who is trained beside the actor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlmq.common.errors import UsageError

if TYPE_CHECKING:
    from rlmq.common.recipe.schema import Recipe

CRITIC = "critic"

Heads = Mapping[str, Mapping[str, str]]
"""By role: its columns, each with the values of the algorithm that it gives (`values.b` gives `values`)."""


def critic_heads(recipe: Recipe, wanted: Sequence[str]) -> Heads:
    """Who gives the values that an algorithm wants.

    Raises:
        UsageError: an item of `critics` gives what the algorithm does not want, or has a taken name.
    """
    names = [block.name for block in recipe.critics]
    found: dict[str, dict[str, str]] = {}
    for index, block in enumerate(recipe.critics):
        if block.learns not in wanted:
            known = f"one of {', '.join(wanted)}" if wanted else f"no critics: {recipe.algorithm.name} has none"
            raise UsageError(f"critics.{index}.learns", got=repr(block.learns), expected=known)
        if names.count(block.name) > 1 or block.name == CRITIC:
            raise UsageError(f"critics.{index}.name", got=repr(block.name), expected="one that no other role has")
    for head in wanted:
        own = [block.name for block in recipe.critics if block.learns == head]
        for name in own or [CRITIC]:
            found.setdefault(name, {})[f"{head}.{name}" if len(own) > 1 else head] = head
    return found


def members(heads: Heads) -> dict[str, list[str]]:
    """By the algorithm's values: the columns that they are the mean of."""
    found: dict[str, list[str]] = {}
    for columns in heads.values():
        for column, head in columns.items():
            found.setdefault(head, []).append(column)
    return found


def mean_values(rows: Sequence[Sequence[NDArray[np.float64]]]) -> list[NDArray[np.float64]]:
    """Values per row [tokens] of several critics as one critic's; of one, its own."""
    return [np.mean(row, axis=0) for row in zip(*rows, strict=True)] if len(rows) > 1 else list(rows[0])


def learners(recipe: Recipe) -> tuple[str, ...]:
    """Roles that learn from the steps that the actor logs, in starting order.

    Raises:
        UsageError: as `critic_heads`.
    """
    from rlmq.common.algorithms import algorithm_of

    learned = ("reward_model",) if recipe.reward_model.learns is not None else ()
    return (*critic_heads(recipe, algorithm_of(recipe).critics), *learned)
