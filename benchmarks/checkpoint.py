"""What checkpoints cost: how long the trainer is blocked, how long a checkpoint takes, what the steps lose.

`recipes/demo.yaml` (weights and Adam's state: 1.6 GB) runs with a checkpoint every 5 steps, and without. Then the
parts of one checkpoint of that size alone: the copy, SHA-256, writing and fsync, writing and hashing in one pass.

    RLMQ_BENCH_STEPS=20 rlmq bench checkpoint
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import BenchResult, Cell
from rlmq.consumers.checkpoint_writer import CheckpointWriter
from rlmq.consumers.tensor_files import write_tensors

_ROOT = Path(__file__).resolve().parent.parent
_EVERY_STEPS = 5
_TIMEOUT_S = 1800
_PARAMETERS = 134_515_008  # SmolLM2-135M
_TENSORS = 64


def run() -> BenchResult:
    """Measure `RLMQ_BENCH_STEPS` steps (10), and the parts of a checkpoint."""
    steps = int(os.environ.get("RLMQ_BENCH_STEPS", "10"))
    rows: list[dict[str, Cell]] = []
    summaries = {every: _run(steps, every) for every in (0, _EVERY_STEPS)}
    for every, told in summaries.items():
        rows.append(
            {
                "what": f"demo, {steps} steps, a checkpoint every {every}"
                if every
                else f"demo, {steps} steps, one at the end",
                "steps_s": told["steps_wall_s"],
                "blocked_s": told["checkpoint_blocked_s"],
                "checkpoints_s": told["checkpoint_s"],
            }
        )
    rows += [{"what": f"alone: {name}", "steps_s": None, "checkpoints_s": seconds} for name, seconds in _parts()]
    with_them, without = summaries[_EVERY_STEPS], summaries[0]
    ratios = {
        "trainer blocked / steps' wall time, limit 0.05": with_them["checkpoint_blocked_s"]
        / with_them["steps_wall_s"],
        "steps with checkpoints / without": with_them["steps_wall_s"] / without["steps_wall_s"],
    }
    notes = [
        "blocked_s: the batch log's fsyncs, copies that an update waited for, the wait for the last checkpoint"
    ]
    return BenchResult("checkpoint", rows, ratios, notes)


def _run(steps: int, every: int) -> dict[str, Any]:
    """The summary of a run."""
    with tempfile.TemporaryDirectory(prefix="rlmq-checkpoint-") as folder:
        command = [sys.executable, "-m", "rlmq.cli", "up", str(_ROOT / "recipes" / "demo.yaml")]
        options = [
            f"run.folder={folder}",
            f"train.steps={steps}",
            f"checkpoint.every_steps={every}",
            "data.eval=null",
        ]
        done = subprocess.run(
            [*command, *options], cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        summary: dict[str, Any] = json.loads((Path(folder) / "demo-1" / "summary.json").read_text())
        return summary


def _parts() -> list[tuple[str, float]]:
    """Seconds of each part of a checkpoint of three tensors per parameter."""
    source = {f"t{i}": torch.randn(3 * _PARAMETERS // _TENSORS) for i in range(_TENSORS)}
    weights, state = dict(list(source.items())[: _TENSORS // 3]), dict(list(source.items())[_TENSORS // 3 :])
    writer = CheckpointWriter()
    blocks = [memoryview(t.numpy().data).cast("B") for t in source.values()]
    with tempfile.TemporaryDirectory(prefix="rlmq-checkpoint-", dir=Path.cwd()) as folder:
        path = Path(folder)

        def copy() -> None:
            writer.begin(1, weights, state, lambda *_: None)
            writer.finished(wait=True)

        def digest() -> None:
            sha = hashlib.sha256()
            for block in blocks:
                sha.update(block)

        def write() -> None:
            with (path / "raw").open("wb", buffering=0) as file:
                for block in blocks:
                    file.write(block)
                os.fsync(file.fileno())

        return [
            ("copy, the first into new memory", _seconds(copy)),
            ("copy, again into the same memory", _seconds(copy)),
            ("SHA-256", _seconds(digest)),
            ("write and fsync", _seconds(write)),
            ("written and hashed in one pass", _seconds(lambda: write_tensors(path, "all", source, 1 << 40))),
        ]


def _seconds(part: Callable[[], object]) -> float:
    began = time.monotonic()
    part()
    return time.monotonic() - began
