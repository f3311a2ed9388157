"""What the control plane costs with many workers: a phase change, heartbeats, a join storm, growth; a tiny step.

The controller is the product's own bus, plan, records and files, in a process of its own; the workers are echoes
in four processes, with real sockets, CURVE keys and a heartbeat a second each. All of it is on one machine: what
the echoes need is in the latencies.

    rlmq bench control -- --workers 100,1000
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import control_step
from benchmarks.control_settings import Settings
from benchmarks.load import Server
from benchmarks.result import BenchResult, Cell
from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.bus import ring_controller
from rlmq.common.control import Order
from rlmq.common.curve import CONTROLLER, OPERATOR, Keys
from rlmq.common.run_folder import RunFolder

_ROOT = Path(__file__).resolve().parent.parent
_PROCESSES = 4


def run(arguments: Sequence[str] = ()) -> BenchResult:
    """Measure each number of workers, then a step's calls."""
    parser = argparse.ArgumentParser(prog="rlmq bench control")
    parser.add_argument("--workers", default="100,1000", help="numbers of workers")
    parser.add_argument("--changes", type=int, default=20, help="phase changes")
    parser.add_argument("--seconds", type=float, default=15.0, help="of heartbeats alone, for the CPU share")
    parser.add_argument("--steps", type=int, default=50, help="steps of calls without work")
    parser.add_argument("--plain", action="store_true", help="without keys")
    given = parser.parse_args(arguments)
    counts = [int(count) for count in given.workers.split(",")]
    rows = [_measured(count, given) for count in counts]
    least, most = rows[0], rows[-1]
    ratios = {
        "phase change p99 (s), limit 0.25": _number(most, "phase change p99_s"),
        "controller CPU share of a core, limit 0.3": _number(most, "CPU share"),
        "join storm (s), limit 10": _number(most, "join storm_s"),
    }
    if given.steps:
        ratios["calls of a tiny step (s), limit 0.01"] = _step_s(given.steps)
    if len(counts) > 1:
        grown = counts[-1] / counts[0]
        for title in ("CPU share", "phase change p99_s"):
            growth = _number(most, title) / _number(least, title) / grown
            ratios[f"growth of {title} / growth of workers, limit 1"] = growth
    return BenchResult("control", rows, ratios)


def _step_s(steps: int) -> float:
    with tempfile.TemporaryDirectory(prefix="rlmq-bench-") as folder, Server() as server:
        run = RunFolder(Path(folder) / "bench-1")
        run.path.mkdir()
        settings = Settings(run.path, server.url, None, None, workers=1)
        return control_step.steps_s(settings, steps, lambda *words: _start("benchmarks.control_step", *words))


def _number(row: dict[str, Cell], title: str) -> float:
    return float(str(row[title]))


def _measured(workers: int, given: argparse.Namespace) -> dict[str, Cell]:
    with tempfile.TemporaryDirectory(prefix="rlmq-bench-") as folder, Server() as server:
        run = RunFolder(Path(folder) / "bench-1")
        run.path.mkdir()
        settings = Settings(run.path, server.url, f"tcp://127.0.0.1:{_free_port()}", _keys(folder, given), workers)
        with _process("benchmarks.control_plane", settings.to_json()) as plane, _workers(settings) as echoes:
            version = int(_answer(plane)["version"])
            for echo in echoes:
                _line(echo)
            began = time.monotonic()
            for echo in echoes:
                _say(echo, "go")
            storm = _ask(plane, "storm")
            storm_s = storm["at"] - began
            for echo in echoes:
                _line(echo)
            idle = _ask(plane, f"idle {given.seconds}")
            used = _ask(plane, "cpu")
            times = _changes(settings, plane, version, given.changes)
            change_cpu_s = (_ask(plane, "cpu")["cpu_s"] - used["cpu_s"]) / given.changes
    return {
        "workers": workers,
        "phase change p50_s": times[len(times) // 2],
        "phase change p99_s": times[int(len(times) * 0.99)],
        "slowest_s": times[-1],
        "CPU of a change_s": change_cpu_s,
        "CPU share": idle["cpu_s"] / idle["wall_s"],
        "join storm_s": storm_s,
        "CPU of the storm_s": storm["cpu_s"],
    }


def _changes(settings: Settings, plane: subprocess.Popen[str], version: int, changes: int) -> list[float]:
    """Seconds from an operator's order to each worker's answer, sorted."""
    calls = RedisCalls(settings.redis_url, run_id=settings.run.name)
    times: list[float] = []
    for number in range(changes):
        version += 1
        began = time.monotonic()
        calls.order(Order(verb="resume" if number % 2 else "pause", at_unix_s=time.time()))
        ring_controller(RunFolder(settings.run), settings.control)
        times += [at - began for at in _ask(plane, f"change {version}")["arrived"]]
    calls.close()
    return sorted(times)


def _keys(folder: str, given: argparse.Namespace) -> str | None:
    if given.plain:
        return None
    keys = Keys(Path(folder) / "keys")
    for name in (CONTROLLER, OPERATOR, "rollout"):
        keys.make(name)
    return str(keys.folder)


@contextmanager
def _workers(settings: Settings) -> Iterator[list[subprocess.Popen[str]]]:
    share = -(-settings.workers // _PROCESSES)
    ranges = [(first, min(share, settings.workers - first)) for first in range(0, settings.workers, share)]
    started = [
        _start("benchmarks.control_worker", settings.to_json(), str(first), str(count)) for first, count in ranges
    ]
    try:
        yield started
    finally:
        for process in started:
            _end(process)


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = _start(module, *arguments)
    try:
        yield process
    finally:
        _end(process)


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with {process.wait()}")
    return line


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_line(process))
    return found


def _ask(process: subprocess.Popen[str], word: str) -> dict[str, Any]:
    _say(process, word)
    return _answer(process)


def _free_port() -> int:
    """A port that is free, and most probably the next one too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
