"""Algorithms, one file each, and the table that finds them by the recipe's `algorithm.name`.

Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rlmq.common.algorithms.grpo import Grpo
from rlmq.common.errors import UsageError

if TYPE_CHECKING:
    from rlmq.common.algorithms.algorithm import Algorithm
    from rlmq.common.recipe.schema import Recipe

ALGORITHMS: Mapping[str, str] = {
    "grpo": "Group-relative policy optimisation: the group's mean is the baseline, no critic.",
}

_BUILDERS: Mapping[str, Callable[[Recipe], Algorithm]] = {
    "grpo": lambda recipe: Grpo(recipe.algorithm, recipe.rollout),
}


def algorithm_of(recipe: Recipe) -> Algorithm:
    """The algorithm of the recipe's `algorithm` block.

    Raises:
        UsageError: no such algorithm.
    """
    build = _BUILDERS.get(recipe.algorithm.name)
    if build is None:
        raise UsageError("algorithm.name", got=recipe.algorithm.name, expected=f"one of {', '.join(ALGORITHMS)}")
    return build(recipe)
