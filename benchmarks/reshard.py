"""From a training to a generation layout on the same ranks: bytes, memory and time of three strategies.

    rlmq bench reshard [--ranks 8] [--repeats 3] [--model llama-135m]

all_gather brings everything to every rank from flat shards over all ranks, tp_pp_gather everything from the ranks
of the own replica, zero_redundancy only what the generation shard lacks (`docs/tensors.md`). Cases of at most
`--ranks` ranks are run, side by side, in a network namespace of their own, where the kernel counts the bytes; of
larger ones, and of SmolLM2, whose 9 heads do not divide, the plan is shown.

    received      of the model's bytes, by the most loaded rank; `formula` is HybridFlow's, for a uniform model
    sent          by the most loaded sender
    wire          bytes that the kernel counts, by those that the plan moves
    peak          highest VmHWM of a rank less what it used before; `limit` is the formula's part of the model and
                  one bucket, and for strategies that gather beside it the training shard
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reshard_cases import CASES, Case
from benchmarks.result import BenchResult, Cell
from rlmq.common.errors import DependencyError
from rlmq.common.layouts.plan import Plan, lower_bound
from rlmq.common.layouts.zero_redundancy import STRATEGIES, Strategy, closed_form, switch_plan

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 900
_BUCKET_BYTES = 16 << 20


def run(arguments: Sequence[str]) -> BenchResult:
    """Run what fits, plan the rest."""
    parser = argparse.ArgumentParser(prog="rlmq bench reshard")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="", help="only its cases")
    options = parser.parse_args(list(arguments))
    private = _may_unshare()
    found = _measure(options.ranks, options.repeats, options.model, private=private)
    rows: list[dict[str, Cell]] = []
    ratios: dict[str, float] = {}
    wires = []
    for number, case in enumerate(CASES):
        if options.model not in ("", case.model):
            continue
        for strategy in STRATEGIES:
            made = switch_plan(strategy, case.layout, case.grouping)
            row = _row(case, strategy, made)
            figures = found.get(f"{number}.{strategy}")
            if figures is not None:
                row |= _measured(case, strategy, made, figures, private=private)
                if private and made.bytes:
                    wires.append(figures["wire"] / made.bytes)
            rows.append(row)
        if f"{number}.collective" in found:
            ratios |= _times(case, number, found)
    if wires:
        ratios["bytes that the kernel counts / bound, the worst, limit 1.05"] = max(wires)
    notes = [f"{options.repeats} repeats, the median; 16 MiB buckets; bf16"]
    if not private:
        notes.append("no network namespace may be made here: bytes are the plan's alone")
    return BenchResult("reshard", rows, ratios, notes)


def _row(case: Case, strategy: Strategy, made: Plan) -> dict[str, Cell]:
    model = sum(spec.bytes for spec in made.target.tensors.values())
    received = max(made.received_bytes.values(), default=0)
    formula = closed_form(strategy, case.grouping)
    row: dict[str, Cell] = {
        "model": case.model,
        "layouts": str(case.grouping),
        "strategy": strategy,
        "formula": float(formula.received),
        "received": received / model,
        "sent": max(made.sent_bytes.values(), default=0) / model,
        "plan/bound": made.bytes / max(1, lower_bound(made.source, made.target)) if made.bytes else None,
    }
    return row


def _measured(
    case: Case, strategy: Strategy, made: Plan, figures: dict[str, float], *, private: bool
) -> dict[str, Cell]:
    formula = closed_form(strategy, case.grouping)
    model = sum(spec.bytes for spec in made.target.tensors.values())
    return {
        "wire": figures["wire"] / made.bytes if private and made.bytes else None,
        "peak MB": round(figures["peak"] / 1e6, 1),
        "limit MB": round((float(formula.peak + formula.redundant) * model + _BUCKET_BYTES) / 1e6, 1),
        "ms": round(1000 * figures["seconds"], 1),
    }


def _times(case: Case, number: int, found: dict[str, Any]) -> dict[str, float]:
    own = found[f"{number}.zero_redundancy"]["seconds"]
    name = f"switch time of {case.model}, zero_redundancy /"
    return {
        f"{name} all_gather, limit 0.5": own / found[f"{number}.all_gather"]["seconds"],
        f"{name} tp_pp_gather": own / found[f"{number}.tp_pp_gather"]["seconds"],
        f"{name} gloo's own all-gather": own / found[f"{number}.collective"],
    }


def _may_unshare() -> bool:
    tool = shutil.which("unshare")
    return (
        tool is not None and subprocess.run([tool, "-n", "true"], check=False, capture_output=True).returncode == 0
    )


def _measure(ranks: int, repeats: int, model: str, *, private: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.reshard_rank", "lead"]
    if private:
        command = ["unshare", "-n", *command]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, folder, str(ranks), str(repeats), model],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise DependencyError("ranks of the benchmark", got=f"exit code {done.returncode}", expected="0")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found
