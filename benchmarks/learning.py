"""Every algorithm learns: each recipe of `recipes/algorithms/` reaches what it states in its steps, on each seed.

A recipe states it in a block of its own:

    x-learning: {figure: reward_mean, at_least: 0.8, within_steps: 20, shuffled: ["reward.0.function=…:shuffled"]}

The figure is the mean over three steps of that key of `metrics.jsonl` (`at_most` for one that shall fall).
`shuffled` is what is set for the run, of the first seed, that must not learn, since its rewards, answers or
preferences are other rows'; its figure at the end is told as a part of what is stated (the other way round where it
shall fall).

    RLMQ_BENCH_SEEDS=1,2,3 rlmq bench learning -- [NAME ...]
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.result import BenchResult, Cell
from benchmarks.training_run import AT_ONCE, training_steps

_RECIPES = Path(__file__).resolve().parent.parent / "recipes" / "algorithms"
_MEAN_OVER = 3


def run(arguments: Sequence[str] = ()) -> BenchResult:
    """Run every recipe, or those named, with every seed of `RLMQ_BENCH_SEEDS`."""
    seeds = [int(seed) for seed in os.environ.get("RLMQ_BENCH_SEEDS", "1,2,3").split(",")]
    chosen = [path for path in sorted(_RECIPES.glob("*.yaml")) if not arguments or path.stem in arguments]
    stated = {path: yaml.safe_load(path.read_text("utf-8"))["x-learning"] for path in chosen}
    rows: list[dict[str, Cell]] = []
    ratios: dict[str, float] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {
            path: [
                *(pool.submit(_figures, path, seed, stated[path]) for seed in seeds),
                pool.submit(_figures, path, seeds[0], stated[path], stated[path]["shuffled"]),
            ]
            for path in chosen
        }
        for path, own_runs in runs.items():
            *real, shuffled = (one.result() for one in own_runs)
            row, own = judged(path.stem, stated[path], seeds, real, shuffled[-1])
            rows.append(row)
            ratios |= own
    return BenchResult("learning", rows, ratios)


def _figures(path: Path, seed: int, stated: Mapping[str, Any], options: Sequence[str] = ()) -> list[float]:
    """Means of the figure over the steps up to each, from the first that has them."""
    lines = training_steps(path, seed, [f"train.steps={stated['within_steps']}", *options])
    figures = [float(line[stated["figure"]]) for line in lines]
    return [fmean(figures[end - _MEAN_OVER : end]) for end in range(_MEAN_OVER, len(figures) + 1)]


def judged(
    name: str,
    stated: Mapping[str, Any],
    seeds: Sequence[int],
    real: Sequence[Sequence[float]],
    shuffled: float,
) -> tuple[dict[str, Cell], dict[str, float]]:
    """A line of the table, and its ratios."""
    rises, within = "at_least" in stated, int(stated["within_steps"])
    limit = float(stated["at_least" if rises else "at_most"])
    steps = [
        next((step for step, mean in enumerate(own, _MEAN_OVER) if (mean >= limit) == rises or mean == limit), None)
        for own in real
    ]
    row: dict[str, Cell] = {
        "recipe": name,
        "figure": stated["figure"],
        "stated": f"{'at least' if rises else 'at most'} {limit:g} by step {within}",
    }
    row |= {f"seed {seed}": step or "never" for seed, step in zip(seeds, steps, strict=True)}
    ends = [own[-1] for own in real]
    row |= {"at the end": f"{min(ends):.2f} to {max(ends):.2f}", "shuffled, at the end": f"{shuffled:.2f}"}
    return row, {
        f"{name}: steps / stated steps, limit 1": max((step or 10 * within) / within for step in steps),
        f"{name}: shuffled / stated, limit 0.8": shuffled / limit if rises else limit / shuffled,
    }
