"""What a weight sync costs: against the bare wire, against one broadcast per tensor, and as a delta of a real run.

    rlmq bench sync [--repeats 5] [--steps 40] [--recipe recipes/tiny.yaml]

A random Llama of 138 M parameters in float32 goes from one process to another, by turns as: `raw`, the same bytes
by gloo's send in pieces of 16 MiB, not packed, not checked; `weight sync`, to the commit in the `hf` engine;
`broadcast`, one broadcast per tensor into a state dict, then a full load into the model. The first of each is not
counted. Then a run of the recipe, in bf16 from a float32 master at learning rate 1e-6, with
`rollout.weight_sync: delta`, from whose log come the bytes of steps 20 to 40.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.result import BenchResult, Cell
from rlmq.common.errors import DependencyError

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 900
_FIELD = re.compile(r"(\w+)=([0-9.e+-]+)")
_WAYS = ("raw", "weight sync", "broadcast")


def run(arguments: Sequence[str]) -> BenchResult:
    """Measure the three ways, then the deltas of a run."""
    parser = argparse.ArgumentParser(prog="rlmq bench sync")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of the run; 0: no run")
    parser.add_argument("--recipe", default="recipes/tiny.yaml")
    options = parser.parse_args(list(arguments))
    found = _measure(options.repeats)
    rows: list[dict[str, Cell]] = []
    for way in _WAYS:
        seconds = median(found[way])
        rows.append(
            {
                "what": way,
                "MB": round(found["bytes"] / 1e6, 1),
                "ms": round(1000 * seconds, 1),
                "GB/s": found["bytes"] / seconds / 1e9,
                "CPU ms, both ends": round(1000 * found["cpu"][way], 1),
            }
        )
    own, raw, broadcast = (median(found[way]) for way in ("weight sync", "raw", "broadcast"))
    ratios = {
        "weight sync / raw bandwidth, at least 0.7": raw / own,
        "broadcast per tensor and full load / weight sync, at least 3": broadcast / own,
    }
    if options.steps:
        deltas = _deltas(options.recipe, options.steps)
        late = [one for one in deltas if 20 <= one["version"] <= 40] or deltas
        share = fmean(one["bytes"] / one["full_bytes"] for one in late)
        ratios["delta's bytes / full sync's, mean over steps 20 to 40, at most 0.1"] = share
        rows += [
            {
                "what": f"delta of step {one['version']}",
                "MB": round(one["bytes"] / 1e6, 4),
                "of full": one["bytes"] / one["full_bytes"],
                "changed": one.get("changed"),
            }
            for one in late
        ]
    notes = [f"{options.repeats} repeats, the median; both ends on this machine; {options.recipe} for the deltas"]
    return BenchResult("sync", rows, ratios, notes)


def _measure(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.sync_rank", folder, str(repeats)]
        env = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        ends = [subprocess.Popen([*command, str(rank)], cwd=_ROOT, env=env) for rank in (0, 1)]
        codes = [end.wait(timeout=_TIMEOUT_S) for end in ends]
        if any(codes):
            raise DependencyError("processes of the benchmark", got=f"exit codes {codes}", expected="0")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def _deltas(recipe: str, steps: int) -> list[dict[str, Any]]:
    """What the controller's log says of each sync of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "rlmq.cli", "up", recipe, "--fresh", f"run.folder={folder}"]
        command += [f"train.steps={steps}", "train.dtype=bfloat16", "train.lr=1.0e-6", "rollout.weight_sync=delta"]
        command += [f"evaluate.every_steps={steps}", f"checkpoint.every_steps={steps}"]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise DependencyError("the run", got=f"exit code {done.returncode}: {done.stderr[-500:]}", expected="0")
        lines = [
            line for log in Path(folder).glob("*/logs/controller-0.log") for line in log.read_text().splitlines()
        ]
    events = [dict(_FIELD.findall(line)) for line in lines if " weights " in line]
    return [
        {"version": int(one["version"]), "bytes": int(one["bytes"]), "full_bytes": int(one["full_bytes"])}
        | ({"changed": float(one["changed"])} if "changed" in one else {})
        for one in events
        if one.get("full_bytes", "0") != "0"
    ]
