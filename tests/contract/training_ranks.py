"""Ranks of training engines: `training_ranks FOLDER TASK...`; processes are forked after the imports.

A task is JSON. Each step is on other rows; the last is made by a second engine, from what the first one saved. What
rank R found is in `FOLDER/TASK's name/R.json`, rank 0's weights beside it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  (once, before the forks)
from safetensors.torch import load_file, save_file
from unit.common.engines.torch_rows import ALGORITHM, LOSS, block, micro_batches, rows_of

from rlmq.common.engines.micro_batches import plan_micro_batches
from rlmq.common.engines.registry import TRAINING
from rlmq.common.engines.training import TrainingEngine, TrainingSettings
from rlmq.common.layouts.layout import MeshShape
from rlmq.common.recipe.lora_block import LoraBlock

ROWS = (7, 11, 13)  # of each step
HERE = Path(__file__).parent
SEED = 5
KEYS: dict[str, Any] = {"grad_clip": 0.5}


class Rank:
    """One forked process of a task."""

    def __init__(self, task: Mapping[str, Any], out: Path, rank: int) -> None:
        self.task, self.out, self.rank = task, out, rank
        self.mesh = MeshShape(task.get("pp", 1), task.get("tp", 1), task["dp"])
        self.store = dist.FileStore(str(out / "store"), self.mesh.size)
        self.group = None
        if self.mesh.size > 1:
            store = dist.PrefixStore("world", self.store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.mesh.size)
            self.group = dist.group.WORLD
        self.built = 0

    def part(self, name: str, ranks: Sequence[int]) -> Any:
        if len(ranks) < 2:
            return None
        store = dist.PrefixStore(f"{self.built} {name} {list(ranks)}", self.store)
        gloo: Any = dist.ProcessGroupGloo
        return gloo(store, list(ranks).index(self.rank), len(ranks), timedelta(seconds=60))

    def engine(self, folder: str) -> TrainingEngine:
        self.built += 1
        name, keys = self.task["engine"], dict(self.task.get("train", {}))
        if "lora" in keys:
            keys["lora"] = LoraBlock.model_validate_json(json.dumps(keys["lora"]))
        settings = TrainingSettings(
            model=folder,
            block=block(**KEYS, **keys),
            rank=self.rank,
            mesh=self.mesh,
            group=self.group,
            part=self.part,
            folder=HERE,
            seed=SEED,
            options=TRAINING.check(name, self.task.get("options", {}), HERE, deterministic=False),
        )
        return TRAINING.find(name, HERE)(settings)

    def train(self, engine: TrainingEngine, count: int) -> tuple[float, float]:
        """This rank's share of the loss, and the gradient's norm."""
        rows = rows_of(count)
        shares = plan_micro_batches(rows.lengths, self.task["tokens"], self.mesh.dp)
        share = shares[self.mesh.place(self.rank)[2]]
        sums = [engine.accumulate(batch, LOSS) for batch in micro_batches(rows, share)]
        if engine.even_passes:
            for _ in range(max(map(len, shares)) - len(share)):
                engine.idle(backward=True)
        denominators = ALGORITHM.denominators([len(response) for response in rows.responses])
        stats = engine.step(denominators)
        return sum(one.get("loss", 0.0) for one in sums) / math.prod(denominators), stats.grad_norm

    def saved(self, engine: TrainingEngine, folder: Path) -> dict[str, torch.Tensor]:
        """The optimizer's state, and rank 0's whole weights in a folder like the first model's."""
        weights = {name: weight.detach().clone().contiguous() for name, weight in engine.shards()}
        state = {name: value.detach().clone().contiguous() for name, value in engine.state().items()}
        if self.rank == 0:
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text((Path(self.task["model"]) / "config.json").read_text())
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            save_file(state, folder / "optimizer.safetensors")
        if self.group is not None:
            self.group.barrier().wait()
        return weights

    def run(self) -> dict[str, Any]:
        first = self.engine(self.task["model"])
        told = [self.train(first, count) for count in ROWS[:-1]]
        self.saved(first, self.out / "half")
        # Adapters lie in the state, beside the model that training began with.
        second = self.engine(self.task["model"] if "lora" in self.task.get("train", {}) else str(self.out / "half"))
        second.load_state(load_file(self.out / "half" / "optimizer.safetensors"))
        told.append(self.train(second, ROWS[-1]))
        self.saved(second, self.out / "whole")
        batch = micro_batches(rows_of(3), [range(3)])[0]
        boxes = [one for held in second.part().note.boxes.values() for one in held]
        return {
            "steps": told,
            "logprobs": second.logprobs(batch).logprobs.tolist(),
            "held": sum(math.prod(b - a for a, b in zip(*one, strict=True)) for one in boxes),
        }


def run(task: Mapping[str, Any], out: Path, rank: int) -> int:
    torch.set_num_threads(1)
    try:
        found = Rank(task, out, rank).run()
    except BaseException:
        found = {"error": traceback.format_exc()}
    (out / f"{rank}.json").write_text(json.dumps(found))
    return "error" in found


def main() -> int:
    folder, worst = Path(sys.argv[1]), 0
    if importlib.util.find_spec("deepspeed"):  # it takes seconds, once
        importlib.import_module("rlmq.common.engines.deepspeed_trainer").loaded()
    for task in map(json.loads, sys.argv[2:]):
        out = folder / task["name"]
        out.mkdir()
        children = []
        for rank in range(task["dp"] * task.get("pp", 1) * task.get("tp", 1)):
            child = os.fork()
            if child == 0:
                os._exit(run(task, out, rank))
            children.append(child)
        worst = max([worst, *(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)])
    return worst


if __name__ == "__main__":
    sys.exit(main())
