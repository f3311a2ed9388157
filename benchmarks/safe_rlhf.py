"""Reward and cost in conflict: Safe-RLHF keeps the mean cost at its limit, PPO does not.

Each seed runs `recipes/algorithms/safe_rlhf.yaml`, and the same with plain PPO, for which the cost is a reward of
weight 0. The figures are means over the last ten steps.

    RLMQ_BENCH_SEEDS=1,2,3 rlmq bench safe_rlhf
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq

from benchmarks.result import BenchResult, Cell
from benchmarks.training_run import AT_ONCE, finished_run
from rlmq.common.recipe.load import load_recipe

_RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "algorithms" / "safe_rlhf.yaml"
_PPO = ("algorithm={name: ppo, group_size: 8}", "reward.1.objective=reward", "reward.1.weight=0")
_LAST = 10


def run() -> BenchResult:
    """Run both with every seed of `RLMQ_BENCH_SEEDS`."""
    limit = load_recipe(_RECIPE).recipe.algorithm.cost_limit
    seeds = [int(seed) for seed in os.environ.get("RLMQ_BENCH_SEEDS", "1,2,3").split(",")]
    arms = {"safe_rlhf": (), "ppo": _PPO}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {(name, seed): pool.submit(_means, seed, own) for name, own in arms.items() for seed in seeds}
        means = {key: one.result() for key, one in runs.items()}
    rows: list[dict[str, Cell]] = [
        {"algorithm": name, "seed": seed, "mean cost": cost, "limit": limit, "mean reward": reward}
        for (name, seed), (reward, cost) in means.items()
    ]
    off = [abs(cost / limit - 1.0) for (name, _), (_, cost) in means.items() if name == "safe_rlhf"]
    over = [cost / limit for (name, _), (_, cost) in means.items() if name == "ppo"]
    return BenchResult(
        "safe_rlhf",
        rows,
        {
            "safe_rlhf: greatest |cost / limit - 1|, limit 0.1": max(off),
            "ppo: least cost / limit, above 1.1": min(over),
        },
    )


def _means(seed: int, options: tuple[str, ...]) -> tuple[float, float]:
    """Mean of `liked` and of `letters` over the samples of the last steps."""
    with finished_run(_RECIPE, seed, options) as folder:
        files = sorted(folder.glob("samples/train-*.parquet"))
        columns = ["step", "reward.liked", "reward.letters"]
        samples = [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
    last = max(row["step"] for row in samples) - _LAST
    chosen = [row for row in samples if row["step"] > last]
    return fmean(row["reward.liked"] for row in chosen), fmean(row["reward.letters"] for row in chosen)
