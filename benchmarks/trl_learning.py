"""GRPO beside TRL's: the same model, prompts, samples, steps and learning rate; the mean reward by step.

Ours is the whole pipeline of processes, TRL's is `GRPOTrainer` in its own environment (`benchmarks/trl_side.py`),
with the same loss: a mean over tokens, advantages over the group's deviation, no KL.

    RLMQ_BENCH_SEEDS=1,2,3 rlmq bench trl_learning -- [RECIPE] [STEPS]
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.result import BenchResult, Cell
from benchmarks.training_run import training_steps
from benchmarks.trl_environment import VERSION, ask_trl
from rlmq.common.models import resolve_model
from rlmq.common.recipe.load import LoadedRecipe, load_recipe

_RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "algorithms" / "grpo.yaml"


def run(arguments: Sequence[str] = ()) -> BenchResult:
    """Train both with every seed of `RLMQ_BENCH_SEEDS`, one after the other."""
    path = Path(arguments[0]).resolve() if arguments else _RECIPE
    loaded = load_recipe(path)
    steps = int(arguments[1]) if len(arguments) > 1 else loaded.recipe.train.steps
    rows: list[dict[str, Cell]] = []
    totals: dict[str, list[float]] = {"rlmq": [], f"TRL {VERSION}": []}
    for seed in os.environ.get("RLMQ_BENCH_SEEDS", "1,2,3").split(","):
        lines = training_steps(path, int(seed), [f"train.steps={steps}"])
        both = ([float(line["reward_mean"]) for line in lines], _of_trl(loaded, int(seed), steps))
        for (system, means), rewards in zip(totals.items(), both, strict=True):
            means.append(fmean(rewards))
            row: dict[str, Cell] = {"seed": int(seed), "system": system, "mean of all steps": means[-1]}
            rows.append(row | {f"step {step}": rewards[step - 1] for step in _shown(steps)})
    ours, theirs = totals.values()
    # Seeds differ by 0.03; the two are trained on different samples of the same policy.
    return BenchResult(
        "trl_learning",
        rows,
        {"mean reward of all steps and seeds, rlmq / TRL, at least 0.97": fmean(ours) / fmean(theirs)},
        [f"{path.stem}: {steps} steps of {_samples(loaded)} samples"],
    )


def _shown(steps: int) -> list[int]:
    return [1, *(round(steps * part / 4) for part in (1, 2, 3, 4))]


def _samples(loaded: LoadedRecipe) -> int:
    return loaded.recipe.data.prompts_per_step * loaded.recipe.algorithm.group_size


def _of_trl(loaded: LoadedRecipe, seed: int, steps: int) -> list[float]:
    """TRL's mean rewards with what the recipe says."""
    recipe = loaded.recipe
    assert isinstance(recipe.data.train, str)
    rows, _, rows_function = recipe.data.train.rpartition(":")
    reward, _, reward_function = recipe.reward[0].source.rpartition(":")
    settings: dict[str, Any] = {
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon": recipe.algorithm.clip[0],
        "epsilon_high": recipe.algorithm.clip[1],
        "temperature": recipe.rollout.temperature,
        "top_k": 0,
        "weight_decay": recipe.train.weight_decay,
        "max_grad_norm": recipe.train.grad_clip,
        "adam_beta1": recipe.train.betas[0],
        "adam_beta2": recipe.train.betas[1],
    }
    found: list[float] = ask_trl(
        "train",
        {
            "model": str(resolve_model(recipe.model, loaded.folder)),
            "rows": [str(loaded.folder / rows), rows_function],
            "reward": [str(loaded.folder / reward), reward_function],
            "prompts_per_step": recipe.data.prompts_per_step,
            "group_size": recipe.algorithm.group_size,
            "max_response_tokens": recipe.rollout.max_response_tokens,
            "steps": steps,
            "lr": recipe.train.lr,
            "seed": seed,
            "threads": os.cpu_count() or 1,
            "settings": settings,
        },
    )
    return found
