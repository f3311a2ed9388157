"""The buffer beside other systems under one load, in interleaved rounds.

The referee is not part of this repository: a folder with `run_interleaved.py`, `bench.py`, `harness.py` and
`setup_peers.sh`, which makes the peers' virtual environments. It runs each system in the same way; our adapter is
`benchmarks/peer.py`.

    rlmq bench peers --folder PATH [--rounds 5] [--peers zmq_arrow,redis_blob,redis_stream,tq_polling] [--chunk 64]
    rlmq bench peers --results FILE     the table of an earlier run

W1: 2048 GRPO samples a step from two producers, over a reward worker to a trainer. W1P: the same at 427 samples/s,
for latency without queueing. W3: 100 000 rows of 200 bytes. CPU is that of all processes, servers and helpers too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.result import BenchResult, Cell
from rlmq.common.errors import DependencyError, IntegrityError

OURS = "benchmarks.peer:Rlmq"
_ROOT = Path(__file__).resolve().parent.parent
_STEP_ROWS, _SMALL_ROWS = 2048, 100_000
_ENVIRONMENTS = {"zmq": "redis"}  # by a peer's first word, where it is not that word itself
_PEERS = {64: ("zmq_arrow", "redis_blob", "redis_stream", "tq_polling"), 8: ("zmq_arrow", "redis_blob")}  # by chunk
_LOADS = {64: "W1,W1P,W3", 8: "W1"}
_LIMITS = (  # load, chunk, figure, peer, limit
    ("W1", 64, "CPU µs/sample", "redis_stream", "0.33"),
    ("W1", 64, "CPU µs/sample", "zmq_arrow", "1.9"),
    ("W1", 64, "CPU µs/sample", "tq_polling", "0.033"),
    ("W1", 8, "CPU µs/sample", "redis_blob", "1.1"),
    ("W1P", 64, "p50 ms", "zmq_arrow", "1.4"),
    ("W1P", 64, "p99 ms", "redis_blob", "1.5"),
    ("W3", 64, "CPU µs/sample", "redis_stream", "0.16"),
)

Line = Mapping[str, Any]  # one run of one load by one peer, as the referee writes it


def run(arguments: Sequence[str] = ()) -> BenchResult:
    """Run the referee, or read what it wrote.

    Raises:
        DependencyError: no referee's folder, or a peer's environment is missing.
        IntegrityError: we lost or mixed up rows.
    """
    parser = argparse.ArgumentParser(prog="rlmq bench peers")
    parser.add_argument("--folder", default=os.environ.get("PEER_BENCH"), help="the referee's; else $PEER_BENCH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", help="comma-separated names; default: those that carry a limit")
    parser.add_argument("--chunk", type=int, choices=sorted(_PEERS), help="rows a put of W1; default: both")
    parser.add_argument("--results", type=Path, help="read the referee's lines from this file, run nothing")
    given = parser.parse_args(arguments)
    if given.results:
        return compared(_lines(given.results))
    peers = {
        chunk: tuple(given.peers.split(",")) if given.peers else names
        for chunk, names in _PEERS.items()
        if given.chunk in (None, chunk)
    }
    folder = _checked(given.folder, {name for names in peers.values() for name in names})
    with tempfile.TemporaryDirectory(prefix="rlmq-peers-") as scratch:
        results = Path(scratch) / "results.jsonl"
        for chunk, names in peers.items():
            _referee(folder, results, rounds=given.rounds, peers=names, chunk=chunk)
        return compared(_lines(results))


def _checked(folder: str | None, peers: Iterable[str]) -> Path:
    """The referee's folder, when it and the peers' environments are there."""
    if folder is None or not (Path(folder) / "run_interleaved.py").is_file():
        raise DependencyError(
            "peer benchmark",
            got="no folder" if folder is None else f"{folder} without run_interleaved.py",
            expected="the referee's folder (run_interleaved.py, bench.py, harness.py)",
            remedy="Name it with --folder PATH or the environment variable PEER_BENCH",
        )
    home = Path(os.environ.get("PEERS_HOME", "~/.cache/rlmq-peers")).expanduser()
    kinds = {peer.split("_")[0] for peer in peers if ":" not in peer}
    needed = {_ENVIRONMENTS.get(kind, kind) for kind in kinds}
    missing = sorted(name for name in needed if not (home / name / "bin" / "python").exists())
    if missing:
        raise DependencyError(
            "peer benchmark",
            got=f"no virtual environment {', '.join(missing)} under {home}",
            expected="one for each kind of peer",
            remedy=f"Run PEERS_HOME={home} sh {folder}/setup_peers.sh {' '.join(missing)}, or name other --peers",
        )
    return Path(folder).resolve()


def _referee(folder: Path, results: Path, *, rounds: int, peers: Sequence[str], chunk: int) -> None:
    """All rounds with one chunk size; its progress goes to standard error."""
    command = [sys.executable, str(folder / "run_interleaved.py"), str(rounds), str(results), OURS, *peers]
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OURS_PYTHON": sys.executable,
        "CHUNK": str(chunk),
        "WLS": _LOADS[chunk],
    }
    subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr, check=True)


def _lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def compared(lines: Sequence[Line]) -> BenchResult:
    """The table and the ratios, both of medians over the rounds."""
    bad = [line for line in lines if line["peer"] == OURS and (line["err"] or line["bad"])]
    if bad or not lines:
        got = (bad[0]["err"] or f"{bad[0]['bad']} bad rows in {bad[0]['wl']}") if bad else "no results"
        raise IntegrityError("peer benchmark", got=got, expected="every row once, with its own reward")
    by_load: dict[tuple[str, int, str], list[Line]] = {}
    for line in lines:
        if not line["err"]:
            by_load.setdefault((line["wl"], line["chunk"], line["peer"]), []).append(line)
    order = {peer: place for place, peer in enumerate((OURS, *_PEERS[64]))}
    found = {
        key: _figures(by_load[key])
        for key in sorted(by_load, key=lambda k: (k[0], -k[1], order.get(k[2], 99), k[2]))
    }
    ratios = {}
    for load, chunk, figure, peer, limit in _LIMITS:
        ours, theirs = found.get((load, chunk, OURS)), found.get((load, chunk, peer))
        if ours and theirs:
            name = f"{load}{'' if chunk == 64 else f' CHUNK={chunk}'} {figure} / {peer}, limit {limit}"
            ratios[name] = _number(ours[figure]) / _number(theirs[figure])
    if ours := found.get(("W1", 64, OURS)):
        ratios["W1 moved / payload, limit 2.75"] = _number(ours["moved / payload"])
    rounds = sorted({len(runs) for runs in by_load.values()})
    notes = [f"rounds: {' to '.join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))}"]
    for line in lines:
        if line["err"] or line["bad"]:
            what = line["err"].splitlines()[-1] if line["err"] else f"{line['bad']} bad rows"
            notes.append(f"{line['peer']} in {line['wl']}: {what}")
    return BenchResult("peers", list(found.values()), ratios, notes)


def _figures(runs: Sequence[Line]) -> dict[str, Cell]:
    """One line of the table."""
    first = runs[0]
    small = first["wl"] == "W3"
    rows = _SMALL_ROWS if small else _STEP_ROWS
    settings = first.get("settings") or {}
    return {
        "load": f"{first['wl']} CHUNK={first['chunk']}" if first["chunk"] != 64 else first["wl"],
        "peer": "rlmq" if first["peer"] == OURS else first["peer"],
        "CPU µs/sample": median((r["cpu_clients"] + r["cpu_server"]) / rows * 1e6 for r in runs),
        "of it server": median(r["cpu_server"] / rows * 1e6 for r in runs),
        "samples/s": median(r["rows_s" if small else "samples_s"] for r in runs),
        "p50 ms": None if small else median(r["lat_p50"] for r in runs),
        "p99 ms": None if small else median(r["lat_p99"] for r in runs),
        "moved / payload": median(r.get("wire_ratio", r["lo_ratio"]) for r in runs),
        "RSS growth MB": median(r["rss_total_mb"] - r["rss_start_mb"] for r in runs),
        "AOF": " ".join(settings.values()) or None,
    }


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else float("nan")
