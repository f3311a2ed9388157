"""Every algorithm learns: each recipe of `recipes/algorithms/` reaches what it states in its steps, on each seed.

A recipe states it in a block of its own:

    x-learning: {figure: reward_mean, at_least: 0.6, within_steps: 20}

The figure is the mean over three steps of that key of `metrics.jsonl` (`at_most` for one that shall fall).

    RLMQ_BENCH_SEEDS=1,2,3 rlmq bench learning -- [NAME ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.result import BenchResult, Cell

_ROOT = Path(__file__).resolve().parent.parent
_RECIPES = _ROOT / "recipes" / "algorithms"
_TIMEOUT_S = 1800
_MEAN_OVER = 3


def run(arguments: Sequence[str] = ()) -> BenchResult:
    """Run every recipe, or those named, with every seed of `RLMQ_BENCH_SEEDS`."""
    seeds = [int(seed) for seed in os.environ.get("RLMQ_BENCH_SEEDS", "1,2,3").split(",")]
    chosen = [path for path in sorted(_RECIPES.glob("*.yaml")) if not arguments or path.stem in arguments]
    rows: list[dict[str, Cell]] = []
    late: dict[str, float] = {}
    for path in chosen:
        stated = yaml.safe_load(path.read_text())["x-learning"]
        reached = [_reached(path, seed, stated) for seed in seeds]
        within = int(stated["within_steps"])
        wanted = f"at least {stated['at_least']}" if "at_least" in stated else f"at most {stated['at_most']}"
        row: dict[str, Cell] = {"recipe": path.stem, "figure": stated["figure"], "stated": f"{wanted} by {within}"}
        rows.append(row | {f"seed {seed}": step or "never" for seed, step in zip(seeds, reached, strict=True)})
        late[f"{path.stem}: steps / stated steps, limit 1"] = max(
            (step or 10 * within) / within for step in reached
        )
    return BenchResult("learning", rows, late)


def _reached(path: Path, seed: int, stated: dict[str, Any]) -> int | None:
    """The step by which the figure is as stated; None when it never is."""
    figures = [line[stated["figure"]] for line in _metrics(path, seed, int(stated["within_steps"]))]
    for step in range(_MEAN_OVER, len(figures) + 1):
        mean = fmean(figures[step - _MEAN_OVER : step])
        if mean >= stated.get("at_least", float("inf")) or mean <= stated.get("at_most", float("-inf")):
            return step
    return None


def _metrics(path: Path, seed: int, steps: int) -> list[dict[str, Any]]:
    """Lines of the run's training steps, in order."""
    with tempfile.TemporaryDirectory(prefix="rlmq-learning-") as folder:
        command = [sys.executable, "-m", "rlmq.cli", "up", str(path), "--fresh", f"run.folder={folder}"]
        options = [f"run.seed={seed}", "run.name=learning", f"train.steps={steps}", "evaluate.every_steps=0"]
        done = subprocess.run(
            [*command, *options], cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        lines = (Path(folder) / "learning-1" / "metrics.jsonl").read_text().splitlines()
    steps_of = {line["step"]: line for line in map(json.loads, lines) if line["kind"] == "train"}
    return [steps_of[step] for step in sorted(steps_of)]
