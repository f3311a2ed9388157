"""Every step of a run made again from its recording, to the bit: of one that nobody disturbed, and of one that was
killed and resumed; the same rows trained on offline; and what recording costs.

`recipes/chaos.yaml` (hidden size 576): once undisturbed; once with `kill -9` of the actor after a quarter of the
steps and of everything after half of them, and the same command again. Each is replayed in a process of its own.

    rlmq bench replay
    rlmq bench replay --steps 8 schedule.kind=one_step_off
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.result import BenchResult, Cell
from rlmq.buffer.recording import RecordingWriter
from rlmq.consumers.fingerprints import fingerprint, read_fingerprints

_ROOT = Path(__file__).resolve().parent.parent
_RECIPE = _ROOT / "recipes" / "chaos.yaml"
_TIMEOUT_S = 1800
_PARAMETERS = 134_515_008  # SmolLM2-135M
_ROWS, _TOKENS = 1024, 512


def run(arguments: Sequence[str]) -> BenchResult:
    """Replay whole runs; ratios are the shares that came out to the bit, and costs."""
    parser = argparse.ArgumentParser(prog="rlmq bench replay")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("values", nargs="*", help="KEY=VALUEs of the recipe")
    asked = parser.parse_args(list(arguments))
    steps = asked.steps
    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory(prefix="rlmq-replay-") as name:
        folder = Path(name)
        options = [f"train.steps={steps}", f"run.folder={folder}", *asked.values]
        calm = _up("calm", options)
        cut = _killed(folder, options, steps)
        ratios = {}
        for run_folder in (calm, cut):
            began = time.monotonic()
            lines = _replay(folder, run_folder.name)
            wall_s = time.monotonic() - began
            equal = sum(line["verdict"] == "equal" for line in lines)
            rows.append(
                {"what": f"{run_folder.name}: replay of {len(lines)} steps", "equal": equal, "wall_s": wall_s}
            )
            ratios[f"{run_folder.name}: steps equal to the bit, 1 is all"] = equal / steps
        both = [read_fingerprints(one / "fingerprints.jsonl") for one in (calm, cut)]
        same = sum(not both[0][step].differs_from(both[1][step]) for step in range(1, steps + 1))
        ratios["killed and resumed: steps as undisturbed, 1 is all"] = same / steps
        _cli("train-offline", "--folder", str(folder), calm.name, str(_RECIPE), "--order", "steps", *options)
        offline = _weights(folder / "chaos-offline-1", steps) == _weights(calm, steps)
        ratios["offline in the live order: weights as live, 1 is yes"] = float(offline)
        train_s = sum(line["train_s"] for line in _metrics(calm))
        rows.append({"what": "training of the undisturbed run", "equal": None, "wall_s": train_s})
    rows += _costs(ratios)
    return BenchResult("replay", rows, ratios)


def _up(name: str, options: Sequence[str]) -> Path:
    _cli("up", str(_RECIPE), "--fresh", f"run.name={name}", *options)
    folder = next(one.partition("=")[2] for one in options if one.startswith("run.folder="))
    return Path(folder) / f"{name}-1"


def _killed(folder: Path, options: Sequence[str], steps: int) -> Path:
    """The actor is killed, then everything; the same command goes on."""
    words = [sys.executable, "-m", "rlmq.cli", "up", str(_RECIPE), "run.name=cut", *options]
    run_folder = folder / "cut-1"
    with (folder / "cut.log").open("w") as log:
        process = subprocess.Popen(words, cwd=_ROOT, stdout=log, stderr=log)
    _await(run_folder, steps // 4, process)
    _kill(run_folder, {"actor-0"})
    _await(run_folder, steps // 2, process)
    process.kill()
    _kill(run_folder, None)
    process.wait()
    _cli(*words[3:])
    return run_folder


def _await(run_folder: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while max((line["step"] for line in _metrics(run_folder)), default=0) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            said = (run_folder.parent / "cut.log").read_text()[-2000:]
            raise RuntimeError(f"{run_folder.name} ended, or came to no step {step}\n{said}")
        time.sleep(0.05)


def _kill(run_folder: Path, names: set[str] | None) -> None:
    """`kill -9` of the newest processes of these names, or of all."""
    newest: dict[str, int] = {}
    for text in (run_folder / "supervisor.jsonl").read_text().splitlines():
        line = json.loads(text)
        newest[line["name"]] = line["pid"] if line["what"] == "started" else 0
    for name, pid in newest.items():
        if pid and (names is None or name in names):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _metrics(run_folder: Path) -> list[dict[str, Any]]:
    path = run_folder / "metrics.jsonl"
    texts = path.read_text().splitlines() if path.is_file() else []
    lines = [json.loads(text) for text in texts if text.endswith("}")]
    return [line for line in lines if line["kind"] == "train"]


def _replay(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in _cli("replay", "--folder", str(folder), name, "--json").splitlines()]


def _weights(run_folder: Path, step: int) -> str:
    path = run_folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cli(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlmq.cli", *words],
        cwd=_ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode not in (0, 6):
        raise RuntimeError(f"rlmq {' '.join(words)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def _costs(ratios: dict[str, float]) -> list[dict[str, Cell]]:
    """Fingerprints of the demo's model, and rows through the recorder's writer."""
    content = np.random.default_rng(0).integers(0, 256, 4 * _PARAMETERS // 64, dtype=np.uint8)
    fingerprint(content)
    began = time.monotonic()
    for _ in range(2 * 64):
        fingerprint(content)
    hashing_s = time.monotonic() - began
    draw = np.random.default_rng(1)

    def ragged(values: Any, kind: pa.DataType) -> pa.Array:
        offsets = pa.array(np.arange(0, _ROWS * _TOKENS + 1, _TOKENS), pa.int32())
        return pa.ListArray.from_arrays(offsets, pa.array(values, kind))

    size = _ROWS * _TOKENS
    table = pa.table(
        {
            "sample_id": [f"train-000001-{row:04d}-00" for row in range(_ROWS)],
            "response_ids": ragged(draw.zipf(1.3, size) % 49152, pa.int32()),
            "rollout_logprobs": ragged(-draw.exponential(1.0, size), pa.float32()),
            "advantages": ragged(np.repeat(draw.normal(size=_ROWS), _TOKENS), pa.float32()),
            "policy_versions": ragged(np.zeros(size), pa.int32()),
            "lineage": ['[{"columns": ["response_ids"], "writer": "rollout-0", "tag": "config 0"}]'] * _ROWS,
        }
    )
    with tempfile.TemporaryDirectory(prefix="rlmq-record-") as folder:
        writer = RecordingWriter(folder)
        wall, cpu = time.monotonic(), time.process_time()
        for step in range(20):
            writer.add("train", step, table)
        wall_s, cpu_s = time.monotonic() - wall, time.process_time() - cpu
    mb = 20 * table.nbytes / 1e6
    ratios["recorder: cores for 50 MB/s of rows, limit 0.5"] = cpu_s / mb * 50
    return [
        {"what": "fingerprints of gradient and weights, 135 M parameters", "equal": None, "wall_s": hashing_s},
        {"what": f"{mb:.0f} MB of rows recorded: {mb / wall_s:.0f} MB/s", "equal": None, "wall_s": wall_s},
    ]
