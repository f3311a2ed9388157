"""One of the ranks of `rlmq bench reshard`, and the process that starts them in a network namespace of their own.

python -m benchmarks.reshard_rank lead FOLDER RANKS REPEATS MODEL
python -m benchmarks.reshard_rank FOLDER RANKS REPEATS MODEL RANK
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reshard_cases import CASES, Case
from rlmq.common.dtypes import DTYPES
from rlmq.common.layouts.exchange import Exchange
from rlmq.common.layouts.groups import join
from rlmq.common.layouts.layout import Layout
from rlmq.common.layouts.plan import Plan
from rlmq.common.layouts.views import Shards, ShardViews, empty_shards
from rlmq.common.layouts.zero_redundancy import STRATEGIES, switch_plan

BUCKET_BYTES = 16 << 20
_TIMEOUT_S = 300.0


def wire_bytes() -> int:
    """Bytes that the loopback interface of this namespace has sent, as the kernel counts them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("no loopback interface")


def memory_bytes(field: str) -> int:
    """A figure of this process (`VmRSS`, `VmHWM`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(field)


def forget_peak() -> None:
    """VmHWM starts again at what is used now."""
    Path("/proc/self/clear_refs").write_text("5")


class Ranks:
    """All ranks of a case, and this one of them."""

    def __init__(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        self.group = join(store, name, rank, size, _TIMEOUT_S)
        self.rank, self.size = rank, size
        self.exchange = Exchange(self.group, rank, range(size), bucket_bytes=BUCKET_BYTES)

    def together(self) -> None:
        """Wait for all."""
        self.group.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait()

    def largest(self, value: float) -> float:
        """Of all ranks."""
        found = torch.tensor([value], dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.group.allreduce([found], options).wait()
        return float(found)


def filled(layout: Layout, rank: int) -> Shards:
    """Source shards with memory of their own."""
    shards = empty_shards(layout, rank)
    for place in layout.boxes(rank):
        shards[place].fill_(1)
    return shards


def inside(made: Plan, rank: int, target: Shards) -> Shards:
    """Source shards that are views into the target's."""
    parts = {name: [target[name, box] for box in by.get(rank, ())] for name, by in made.source.held.items()}
    source = Shards(made.source, rank, parts)
    for place in made.source.boxes(rank):
        source[place].fill_(1)
    return source


def measured(ranks: Ranks, made: Plan, in_place: bool, repeats: int) -> dict[str, float]:
    """Switch once for the memory, then `repeats` times for time and bytes."""
    ranks.together()
    base = memory_bytes("VmRSS")
    forget_peak()
    target = empty_shards(made.target, ranks.rank)
    source = inside(made, ranks.rank, target) if in_place else filled(made.source, ranks.rank)
    views = ShardViews(source, target)
    seconds, wired = [], []
    peak = 0
    for repeat in range(repeats + 1):
        ranks.together()
        before = wire_bytes()
        ranks.together()
        began = time.monotonic()
        ranks.exchange.run(made, views, generation=str(repeat), deadline=time.monotonic() + _TIMEOUT_S)
        views.keep(made, ranks.rank)
        ranks.together()
        if repeat:
            seconds.append(ranks.largest(time.monotonic() - began))
            wired.append(wire_bytes() - before)
        else:
            peak = memory_bytes("VmHWM") - base
    return {"seconds": sorted(seconds)[len(seconds) // 2], "wire": min(wired), "peak": ranks.largest(float(peak))}


def collective(ranks: Ranks, case: Case, repeats: int) -> float:
    """Seconds of gloo's own all-gather of equal flat parts of the model."""
    layout = case.layout
    count = sum(spec.bytes for spec in layout.tensors.values()) // 2 // ranks.size
    own = torch.ones(count, dtype=DTYPES["BF16"])
    parts = [torch.ones(count, dtype=DTYPES["BF16"]) for _ in range(ranks.size)]
    seconds = []
    for _ in range(repeats):
        ranks.together()
        began = time.monotonic()
        ranks.group.allgather([parts], [own]).wait()
        seconds.append(ranks.largest(time.monotonic() - began))
    return sorted(seconds)[len(seconds) // 2]


def main(folder: Path, size: int, repeats: int, model: str, rank: int) -> int:
    """All cases of the model (of any, if it is empty) that fit into these ranks, in order."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    found: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        if case.training.size > size or case.model.startswith("smollm2") or model not in ("", case.model):
            continue
        if rank < case.training.size:
            ranks = Ranks(store, f"case{number}", rank, case.training.size)
            for strategy in STRATEGIES:
                made = switch_plan(strategy, case.layout, case.grouping)
                figures = measured(ranks, made, strategy == "zero_redundancy", repeats)
                found[f"{number}.{strategy}"] = figures
            if case.model != "uniform":
                found[f"{number}.collective"] = collective(ranks, case, repeats)
            ranks.together()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    return 0


def lead(folder: Path, size: int, repeats: int, model: str) -> int:
    """Start the ranks."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=False)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks.reshard_rank", str(folder), str(size), str(repeats), model]
    ranks = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(size)]
    return max(abs(process.wait()) for process in ranks)


if __name__ == "__main__":
    if sys.argv[1] == "lead":
        sys.exit(lead(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])))
