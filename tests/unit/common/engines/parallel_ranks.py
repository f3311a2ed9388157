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

from rlmq.common.engines.causal_forward import CausalForward
from rlmq.common.engines.decoder_shape import generation_places
from rlmq.common.engines.generation import Request, Sampling
from rlmq.common.engines.hybrid import Decoding, HybridEngine
from rlmq.common.engines.mesh_groups import MeshGroups, generation_groups, training_groups
from rlmq.common.engines.parallel_trainer import ParallelEngine
from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput
from rlmq.common.errors import DependencyError, RestartRequired
from rlmq.common.layouts.layout import MeshShape
from rlmq.common.layouts.zero_redundancy import Grouping

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


def train(
    engine: ParallelEngine, groups: MeshGroups, steps: Sequence[int], splits: Sequence[Sequence[int]] = SPLIT
) -> Iterator[dict[str, float]]:
    """Steps on the rows of this replica; each step has rows of its own."""
    for step in steps:
        rows = rows_of(ROWS + step)
        split = splits[groups.mesh.place(groups.rank)[2] :: groups.mesh.dp]
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


def plain(here: Rank, task: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """The steps of `switch` without one."""
    mesh = mesh_of(task["mesh"])
    if here.rank < mesh.size:
        groups = here.groups(mesh)
        engine = engine_of(task, groups, task["model"])
        list(train(engine, groups, [0, 1], SPLIT[:2]))
        save(engine, Path(task["model"]), out / "after", here.rank)
    return {}


def switch(here: Rank, task: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Steps, a switch to `pp, tp` and back, one more step; what was seen on the way."""
    mesh = mesh_of(task["mesh"])
    if here.rank >= mesh.size:
        return {}
    groups, grouping = here.groups(mesh), Grouping(mesh, task["pp"], task["tp"])
    engine = engine_of(task, groups, task["model"], generation=generation_places(grouping))
    hybrid = HybridEngine(
        engine,
        generation_groups(grouping, here.rank, here.make),
        Decoding(pad_id=0, eos_ids=(64,), max_batch=4),
        bucket_bytes=1 << 16,
    )
    list(train(engine, groups, [0], SPLIT[:2]))
    save(engine, Path(task["model"]), out / "served", here.rank)
    own = {name: (weight.data_ptr(), weight.clone()) for name, weight in engine.memory.training.items()}
    with hybrid.generation(version=7) as generator:
        peak = hybrid.ledger.balance_bytes
        logits = next_logits(generator)
        responses = generate(generator)
    kept = {
        name: w.data_ptr() == own[name][0] and torch.equal(w, own[name][1])
        for name, w in engine.memory.training.items()
    }
    list(train(engine, groups, [1], SPLIT[:2]))
    save(engine, Path(task["model"]), out / "after", here.rank)
    return {
        "logits": logits,
        "responses": responses,
        "changed": [name for name, same in kept.items() if not same],
        "sent": hybrid.switched.bytes,
        "foreign": peak,
        "balance": hybrid.ledger.balance_bytes,
        "replica": next(i for i, ranks in enumerate(grouping.replicas) if here.rank in ranks),
    }


def fail(here: Rank, task: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """A switch for which rank 1 lacks the memory, then one that works, then one in which rank 2 dies."""
    mesh = mesh_of(task["mesh"])
    if here.rank >= mesh.size:
        return {}
    groups, grouping = here.groups(mesh), Grouping(mesh, task["pp"], task["tp"])
    engine = engine_of(task, groups, task["model"], generation=generation_places(grouping))
    replica, decoding = generation_groups(grouping, here.rank, here.make), Decoding(0, (64,), 4)
    found = {}
    too_little = HybridEngine(engine, replica, decoding, bucket_bytes=1 << (46 if here.rank == 1 else 16))
    try:
        with too_little.generation():
            found["entered"] = "yes"
    except DependencyError as error:
        found["failed"] = str(error)
    found["balance"] = str(too_little.ledger.balance_bytes)
    hybrid = HybridEngine(engine, replica, decoding, bucket_bytes=1 << 16)
    found["losses"] = json.dumps(list(train(engine, groups, [0], SPLIT[:2])))
    with hybrid.generation() as generator:
        found["responses"] = json.dumps(generate(generator))
    if here.rank == 2:
        os._exit(0)
    try:
        with hybrid.generation():
            found["entered"] = "without a rank"
    except RestartRequired as error:
        found["died"] = str(error)
    found["balance"] += f" {hybrid.ledger.balance_bytes}"
    return found


PROMPTS = [[5, 9, 60], [7], [3, 3, 8, 1, 2], [5, 9, 60]]


def next_logits(generator: Any) -> list[list[float]]:
    """Of the token after each prompt, without a cache."""
    with torch.inference_mode():
        found = CausalForward(generator._model, 0).start(PROMPTS, 1)
    return found.tolist()  # type: ignore[no-any-return]


def generate(generator: Any) -> list[Any]:
    """Greedy and sampled responses to the prompts, in order."""
    greedy = [
        Request(f"g{i}", prompt, Sampling(temperature=0.0, max_tokens=5), 1) for i, prompt in enumerate(PROMPTS)
    ]
    drawn = [Request(f"s{i}", prompt, Sampling(max_tokens=5), 1) for i, prompt in enumerate(PROMPTS)]
    generator.submit(greedy)
    generator.submit(drawn)
    found: dict[str, Any] = {}
    while generator.pending:
        found |= {one.id: [one.token_ids, one.policy_versions] for one in generator.step()}
    return [found[request.id] for request in (*greedy, *drawn)]


TASKS: dict[str, Callable[[Rank, Mapping[str, Any], Path], dict[str, Any]]] = {
    "steps": steps,
    "switch": switch,
    "plain": plain,
    "fail": fail,
}


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
