"""What being decoupled costs: `rlmq up` against the same training in one process, in interleaved pairs.

The figure is the time from the first step's start to the last one's end, evaluation and checkpoints apart,
same threads on both sides; the ratio is the median over the pairs. Start-up is reported apart.

    RLMQ_BENCH_PAIRS=5 RLMQ_BENCH_RECIPES=tiny,demo rlmq bench overhead
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.result import BenchResult, Cell

_ROOT = Path(__file__).resolve().parent.parent
_STEPS = {"tiny": 20, "demo": 5}
_TIMEOUT_S = 900
_SAMPLE_S = 0.25
_LIGHT = ("controller", "redis", "reward")


def run() -> BenchResult:
    """Measure every recipe named in `RLMQ_BENCH_RECIPES`."""
    pairs = int(os.environ.get("RLMQ_BENCH_PAIRS", "5"))
    names = os.environ.get("RLMQ_BENCH_RECIPES", "tiny,demo").split(",")
    rows: list[dict[str, Cell]] = []
    ratios: dict[str, float] = {}
    notes: list[str] = []
    for name in names:
        measured = [(_pipeline(name), _loop(name)) for _ in range(pairs)]
        for number, (ours, plain) in enumerate(measured):
            rows.append(
                {
                    "recipe": name,
                    "pair": number + 1,
                    "rlmq steps_s": ours["steps_s"],
                    "loop steps_s": plain["steps_wall_s"],
                    "ratio": ours["steps_s"] / plain["steps_wall_s"],
                    "rlmq start-up_s": ours["startup_s"],
                    "loop start-up_s": plain["startup_s"],
                }
            )
        ratios[name] = median(o["steps_s"] / p["steps_wall_s"] for o, p in measured)
        ratios[f"{name} start-up beyond the loop's (s)"] = median(
            o["startup_s"] - p["startup_s"] for o, p in measured
        )
        used = [ours["used"] for ours, _ in measured]
        notes.append(f"{name}, CPU seconds and greatest RSS by role (medians): {_usage(used)}")
        ratios[f"{name} greatest RSS of {' + '.join(_LIGHT)} (MB)"] = max(
            median(run[role][1] for run in used) for role in _LIGHT
        )
        ratios[f"{name} CPU share of {' + '.join(_LIGHT)}"] = median(
            sum(run[role][0] for role in _LIGHT) / sum(seconds for seconds, _ in run.values()) for run in used
        )
        equal = sum(o["reward_mean"] == p["reward_mean"] for o, p in measured)
        notes.append(
            f"{name}: {equal} of {pairs} pairs trained on the same samples (equal mean reward in every step)"
        )
    return BenchResult("overhead", rows, ratios, notes)


def _usage(used: list[dict[str, tuple[float, float]]]) -> str:
    parts = []
    for role in used[0]:
        cpu_s = median(run[role][0] for run in used if role in run)
        rss_mb = median(run[role][1] for run in used if role in run)
        parts.append(f"{role} {cpu_s:.1f} s {rss_mb:.0f} MB")
    return ", ".join(parts)


def _overrides(name: str) -> list[str]:
    return [f"train.steps={_STEPS[name]}", "data.eval=null", "checkpoint.every_steps=0"]


def _environment() -> dict[str, str]:
    threads = str(len(os.sched_getaffinity(0)))
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _loop(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.single_process", f"recipes/{name}.yaml", *_overrides(name)]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=_ROOT, env=_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["startup_s"] = time.monotonic() - began - result["steps_wall_s"]
    return result


def _pipeline(name: str) -> dict[str, Any]:
    """Run `rlmq up` in a folder of its own; its metrics, and CPU seconds and memory of its processes."""
    with tempfile.TemporaryDirectory(prefix="rlmq-overhead-") as folder:
        command = [sys.executable, "-m", "rlmq.cli", "up", f"recipes/{name}.yaml", *_overrides(name)]
        began_unix_s = time.time()
        up = subprocess.Popen(
            [*command, f"run.folder={folder}", "--fresh"],
            cwd=_ROOT,
            env=_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        used = _watch(up)
        if up.returncode != 0:
            raise RuntimeError(f"rlmq up {name} ended with exit code {up.returncode}")
        [run_folder] = [path.parent for path in Path(folder).glob("*/metrics.jsonl")]
        lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    first_began_unix_s = train[0]["ended_unix_s"] - train[0]["step_s"]
    return {
        "steps_s": train[-1]["ended_unix_s"] - first_began_unix_s,
        "startup_s": first_began_unix_s - began_unix_s,
        "reward_mean": [line["reward_mean"] for line in train],
        "used": used,
    }


def _watch(up: subprocess.Popen[bytes]) -> dict[str, tuple[float, float]]:
    """Until `up` ends: CPU seconds and greatest RSS in MB by role, the role's own children included."""
    cpu_s: dict[int, float] = {}
    rss_mb: dict[int, float] = {}
    role_of: dict[int, str] = {}
    deadline = time.monotonic() + _TIMEOUT_S
    while up.poll() is None:
        if time.monotonic() > deadline:
            up.kill()
            raise TimeoutError(f"rlmq up did not end within {_TIMEOUT_S} s")
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(up.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    role_of.setdefault(process.pid, _role(process))
                    times = process.cpu_times()
                    cpu_s[process.pid] = times.user + times.system
                    rss_mb[process.pid] = max(rss_mb.get(process.pid, 0.0), process.memory_info().rss / 1e6)
        time.sleep(_SAMPLE_S)
    return {
        role: (
            sum(seconds for pid, seconds in cpu_s.items() if role_of[pid] == role),
            max(mb for pid, mb in rss_mb.items() if role_of[pid] == role),
        )
        for role in sorted(set(role_of.values()))
    }


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    if "worker" in words:
        return words[words.index("worker") + 1]
    if "rlmq.producers.reward_child" in words:
        return "reward"
    if "controller" in words:
        return "controller"
    return "redis" if "redis" in process.name() or "valkey" in process.name() else "other"
