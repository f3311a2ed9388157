"""Ranks of a `3d` mesh: `parallel_ranks.py FOLDER RANKS TASK...`; processes are forked after the imports.

A task is JSON: what to do, the mesh, the model. What it found is written to `FOLDER/TASK's name/RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from unit.common.engines.torch_rows import block, micro_batches, rows_of

from rlmq.common.engines.mesh_groups import MeshGroups, training_groups
from rlmq.common.engines.parallel_trainer import ParallelEngine
from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput
from rlmq.common.layouts.layout import MeshShape

ROWS, STEPS, CLIP = 11, 3, 0.7
SPLIT = ((0, 1, 2), (3,), (4, 5, 6, 7), (8, 9), (10,))


def loss(output: PolicyOutput, batch: MicroBatch) -> LossTerms:
    """`-(A logprob + 0.05 entropy)`, summed over tokens."""
    tokens = batch.columns["advantages"] * output.logprobs + 0.05 * output.entropy
    total = -(tokens * batch.response_mask).sum()
    return LossTerms(total, {"loss": total.detach()})


def tokens_of(rows: Any) -> float:
    return float(sum(len(response) for response in rows.responses))


def mesh_of(text: str) -> MeshShape:
    pp, tp, dp = map(int, text.split("-"))
    return MeshShape(pp, tp, dp)


class Rank:
    """One forked process."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank = folder, rank
        self.store = dist.FileStore(str(folder / "store"), world)
        self.task = ""

    def make(self, name: str, ranks: Sequence[int]) -> Any:
        ranks = list(ranks)
        if len(ranks) < 2:
            return None
        prefix = dist.PrefixStore(f"{self.task} {name} {ranks}", self.store)
        gloo: Any = dist.ProcessGroupGloo
        return gloo(prefix, ranks.index(self.rank), len(ranks), timedelta(seconds=60))

    def groups(self, mesh: MeshShape) -> MeshGroups:
        return training_groups(mesh, self.rank, self.make)


def engine_of(task: Mapping[str, Any], groups: MeshGroups, folder: str, **more: Any) -> ParallelEngine:
    keys = {"grad_clip": CLIP, "weight_decay": 0.1, **task.get("train", {})}
    return ParallelEngine(folder, block(**keys), groups, temperature=0.8, **more)


def train(engine: ParallelEngine, groups: MeshGroups, steps: Sequence[int]) -> Iterator[dict[str, float]]:
    """Steps on the rows of this replica; each step has rows of its own."""
    for step in steps:
        rows = rows_of(ROWS + step)
        split = SPLIT[groups.mesh.place(groups.rank)[2] :: groups.mesh.dp]
        sums = [engine.accumulate(batch, loss).get("loss", 0.0) for batch in micro_batches(rows, split)]
        yield {"loss": sum(sums), "grad_norm": engine.step((tokens_of(rows),)).grad_norm}


def steps(here: Rank, task: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Steps on one mesh; with `then`, the last of them on another mesh, from what the first one saved."""
    mesh = mesh_of(task["mesh"])
    if here.rank >= mesh.size:
        return {}
    groups = here.groups(mesh)
    engine = engine_of(task, groups, task["model"])
    found = list(train(engine, groups, range(STEPS - 1 if "then" in task else STEPS)))
    if "then" in task:
        save(engine, Path(task["model"]), out / "half", here.rank)
        groups.everyone.barrier().wait()  # type: ignore[union-attr]
        here.task += " then"
        groups = here.groups(mesh_of(task["then"]))
        engine = engine_of(task, groups, str(out / "half"))
        engine.load_state(load_file(out / "half" / "optimizer.safetensors"))
        found += train(engine, groups, [STEPS - 1])
    logprobs = engine.logprobs(micro_batches(rows_of(ROWS), [SPLIT[2]])[0]).logprobs
    save(engine, Path(task["model"]), out / "after", here.rank)
    shared = {name: engine.memory.training[name].double().sum().item() for name in engine.memory.training}
    return {"steps": found, "logprobs": logprobs.tolist(), "sums": shared}


def save(engine: ParallelEngine, model: Path, folder: Path, rank: int) -> None:
    weights, state = dict(engine.shards()), engine.state()
    if rank == 0:
        folder.mkdir()
        weights.pop("lm_head.weight" if engine.shape.tied else "", None)
        save_file({n: w.detach().contiguous() for n, w in weights.items()}, folder / "model.safetensors")
        save_file({n: w.contiguous() for n, w in state.items()}, folder / "optimizer.safetensors")
        (folder / "config.json").write_bytes((model / "config.json").read_bytes())


TASKS: dict[str, Callable[[Rank, Mapping[str, Any], Path], dict[str, Any]]] = {"steps": steps}


def run(folder: Path, rank: int, world: int, tasks: Sequence[Mapping[str, Any]]) -> None:
    here = Rank(folder, rank, world)
    for task in tasks:
        here.task = task["name"]
        out = folder / task["name"]
        out.mkdir(exist_ok=True)
        try:
            found = TASKS[task["do"]](here, task, out)
        except Exception:
            found = {"error": traceback.format_exc()}
        (out / f"{rank}.json").write_text(json.dumps(found))
        if "error" in found:
            return


def main() -> int:
    folder, world, tasks = Path(sys.argv[1]), int(sys.argv[2]), [json.loads(text) for text in sys.argv[3:]]
    torch.set_num_threads(1)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            run(folder, rank, world, tasks)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
