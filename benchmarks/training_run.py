"""Whole runs of a recipe in a folder of their own, for benchmarks that look at what was learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 1800

# Runs side by side: each has about one process that computes at a time.
AT_ONCE = os.cpu_count() or 1


@contextmanager
def finished_run(recipe: Path, seed: int, options: Sequence[str] = ()) -> Iterator[Path]:
    """The folder of a whole run, for as long as the block lasts.

    Raises:
        RuntimeError: the run failed; the text is what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="rlmq-run-") as folder:
        command = [sys.executable, "-m", "rlmq.cli", "up", str(recipe), "--fresh", f"run.folder={folder}"]
        own = [f"run.seed={seed}", "run.name=benchmark", "evaluate.every_steps=0", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            [*command, *own],
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{recipe.name} {' '.join(own)}: {done.stderr}")
        yield Path(folder) / "benchmark-1"


def training_steps(recipe: Path, seed: int, options: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` of the run's training steps, in order."""
    with finished_run(recipe, seed, options) as folder:
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    steps_of = {line["step"]: line for line in map(json.loads, lines) if line["kind"] == "train"}
    return [steps_of[step] for step in sorted(steps_of)]
