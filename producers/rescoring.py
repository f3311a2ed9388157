"""Rewards of recorded rows by other functions, or by the run's own once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmq.common.recipe.schema import Recipe
from rlmq.producers.process_runner import ProcessRewardRunner
from rlmq.producers.reward import columns_of_nodes
from rlmq.producers.reward_runner import ColumnRunner, RewardRow, RewardRunner, reward_row
from rlmq.producers.reward_values import total

Scored = tuple[float | None, Mapping[str, float | None]]
"""The weighted sum, and what each function gave, by name; None is no verdict."""


def rescore(recipe: Recipe, folder: Path, records: Sequence[Mapping[str, Any]]) -> list[Scored]:
    """What the recipe's `reward` says of recorded rows, in whole groups, with the recipe's weights.

    Args:
        folder: where the recipe's files lie.
        records: recorded rows, members of a group side by side; those without a response have no verdict.

    Raises:
        UsageError: a reward function that cannot be found, imported or called.
    """
    more = columns_of_nodes(recipe)
    answered = [index for index, record in enumerate(records) if record["response_text"] is not None]
    rows = [reward_row(records[index], more) for index in answered]
    parts = [values for _, values in _scored(recipe, folder, rows)]
    weights, ensembles = [b.weight for b in recipe.reward], [b.ensemble for b in recipe.reward]
    rewarded = [block.objective == "reward" for block in recipe.reward]
    penalty = recipe.rollout.truncation_penalty if recipe.rollout.truncated == "penalise" else 0.0
    found: list[Scored] = [(None, dict.fromkeys(recipe.reward_names)) for _ in records]
    for place, index in enumerate(answered):
        values = [part[place] for part in parts]
        counted = [value if own else None for value, own in zip(values, rewarded, strict=True)]
        whole = total(weights, counted, ensembles)
        if whole is not None and records[index]["truncated"]:
            whole -= penalty
        found[index] = (whole, dict(zip(recipe.reward_names, values, strict=True)))
    return found


def _scored(recipe: Recipe, folder: Path, rows: Sequence[RewardRow]) -> Iterator[tuple[str, list[float | None]]]:
    """What each function gives; in parts as great as a generated chunk, since one may compare its rows."""
    group = recipe.algorithm.group_size
    most = max(1, recipe.rollout.batch_size_per_device // group) * group
    for block, name in zip(recipe.reward, recipe.reward_names, strict=True):
        runner: RewardRunner
        if block.column is not None:
            runner = ColumnRunner(name, block.column)
        else:
            runner = ProcessRewardRunner(block, name, folder, start_s=recipe.deadlines.start_s)
        try:
            values: list[float | None] = []
            for first in range(0, len(rows), most):
                values += runner.score(rows[first : first + most]).values
            yield name, values
        finally:
            runner.close()
