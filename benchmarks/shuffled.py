"""An experiment that must fail: the demo's training with shuffled answers must not learn the task.

Each seed runs `recipes/demo.yaml` with the reward of other sums' answers; the right answers are scored beside it
with weight 0. The figure is the held-out accuracy (one_digit, points of 100) after minus before.

    RLMQ_BENCH_SEEDS=1,2,3 rlmq bench shuffled
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq

from benchmarks.result import BenchResult, Cell

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 1800
_REWARDS = (
    "reward.0.function=sums.py:shuffled",
    "reward.1.function=sums.py:correct",
    "reward.1.weight=0",
)


def run() -> BenchResult:
    """Run every seed of `RLMQ_BENCH_SEEDS`."""
    rows: list[dict[str, Cell]] = []
    gains: list[float] = []
    for seed in os.environ.get("RLMQ_BENCH_SEEDS", "1,2,3").split(","):
        before, after = _accuracies(int(seed))
        gains.append(after - before)
        rows.append({"seed": int(seed), "before (%)": before, "after (%)": after, "gain (points)": after - before})
    return BenchResult("shuffled", rows, {"greatest gain (points), limit 10": max(gains)})


def _accuracies(seed: int) -> tuple[float, float]:
    """Share of right answers in percent on the held-out one-digit sums, before and after."""
    with tempfile.TemporaryDirectory(prefix="rlmq-shuffled-") as folder:
        command = [sys.executable, "-m", "rlmq.cli", "up", str(_ROOT / "recipes" / "demo.yaml"), "--fresh"]
        options = [f"run.folder={folder}", "run.name=shuffled", f"run.seed={seed}", *_REWARDS]
        done = subprocess.run(
            [*command, *options], cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        files = sorted(Path(folder).glob("shuffled-*/samples/eval-*.parquet"))
        first, last = (pq.read_table(path).to_pylist() for path in (files[0], files[-1]))
    return (_percent(first), _percent(last))


def _percent(rows: list[dict[str, object]]) -> float:
    right = [float(str(row["reward.correct"])) for row in rows if row["source"] == "one_digit"]
    return 100.0 * fmean(right)
