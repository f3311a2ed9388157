"""One FSDP2 rank: `sharded_ranks.py WORLD FOLDER KIND DTYPE RANK`; three steps, the last in a second engine."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from unit.common.engines.torch_rows import ALGORITHM, LOSS, block, micro_batches, rows_of, tiny_model

from rlmq.common.engines.micro_batches import plan_micro_batches
from rlmq.common.engines.torch_trainer import TorchEngine

ROWS = 7


def train(engine: TorchEngine, world: int, rank: int) -> float:
    rows = rows_of(ROWS)
    shares = plan_micro_batches(rows.lengths, 30, world)
    for batch in micro_batches(rows, shares[rank]):
        engine.accumulate(batch, LOSS)
    for _ in range(max(map(len, shares)) - len(shares[rank])):
        engine.idle(backward=True)
    return engine.step(ALGORITHM.denominators([len(response) for response in rows.responses])).grad_norm


def main() -> int:
    world, folder, kind, dtype, rank = (
        int(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
        int(sys.argv[5]),
    )
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    group = dist.group.WORLD

    def engine() -> TorchEngine:
        return TorchEngine(tiny_model(kind), block(dtype=dtype, grad_clip=0.5), group=group, sharded=True)

    first = engine()
    norms = [train(first, world, rank) for _ in range(2)]
    state, weights = first.state(), dict(first.shards())
    second = engine()
    with torch.no_grad():
        for weight, made in zip(second.model.parameters(), first.model.parameters(), strict=True):
            weight.copy_(made)
    second.load_state(state)
    norms.append(train(second, world, rank))
    weights = {name: weight.clone() for name, weight in second.shards()}
    held = sum(p.to_local().numel() for p in second.model.parameters())  # type: ignore[attr-defined]
    save_file(weights, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps({"norms": norms, "held": held}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
