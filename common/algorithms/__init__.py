"""Algorithms, one file each, and the table that finds them by the recipe's `algorithm.name`.

Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlmq.common.algorithms import (
    cispo,
    dapo,
    decoupled_ppo,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    ppo,
    reinforce_pp,
    remax,
    reward_model,
    rloo,
    safe_rlhf,
    score,
    sft,
)
from rlmq.common.algorithms.own_functions import with_own_functions
from rlmq.common.errors import UsageError

if TYPE_CHECKING:
    from rlmq.common.algorithms.algorithm import Algorithm, Spec
    from rlmq.common.recipe.schema import Recipe

ALGORITHMS: Mapping[str, Spec] = {
    "grpo": grpo.SPEC,
    "dr_grpo": dr_grpo.SPEC,
    "rloo": rloo.SPEC,
    "reinforce_pp": reinforce_pp.SPEC,
    "reinforce_pp_baseline": reinforce_pp.BASELINE_SPEC,
    "remax": remax.SPEC,
    "dapo": dapo.SPEC,
    "gspo": gspo.SPEC,
    "cispo": cispo.SPEC,
    "ppo": ppo.SPEC,
    "decoupled_ppo": decoupled_ppo.SPEC,
    "safe_rlhf": safe_rlhf.SPEC,
    "sft": sft.SPEC,
    "dpo": dpo.SPEC,
    "reward_model": reward_model.SPEC,
    "score": score.SPEC,
}


def spec_of(name: str) -> Spec:
    """The algorithm of this name.

    Raises:
        UsageError: no such algorithm.
    """
    spec = ALGORITHMS.get(name)
    if spec is None:
        raise UsageError("algorithm.name", got=name, expected=f"one of {', '.join(ALGORITHMS)}")
    return spec


def algorithm_of(recipe: Recipe, folder: Path | None = None) -> Algorithm:
    """The algorithm of the recipe's `algorithm` block.

    Args:
        recipe: the recipe.
        folder: what the names of the user's own functions are relative to; without it they are left out.

    Raises:
        UsageError: no such algorithm.
    """
    algorithm = spec_of(recipe.algorithm.name).build(recipe)
    return algorithm if folder is None else with_own_functions(algorithm, recipe.algorithm, folder)
