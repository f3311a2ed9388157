"""One data-parallel rank: `torch_ranks.py WORLD COUNT FOLDER DIES RANK`; makes one step and saves its weights."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from unit.common.engines.torch_rows import ALGORITHM, LOSS, block, micro_batches, rows_of, tiny_model

from rlmq.common.engines.micro_batches import plan_micro_batches
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.errors import RlmqError


def main() -> int:
    world, count, folder, dies, rank = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        *map(int, sys.argv[4:]),
    )
    store = dist.FileStore(str(folder / "store"), world)
    group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=60)) if world > 1 else None
    rows = rows_of(count)
    engine = TorchEngine(tiny_model(), block(), group=group)
    for batch in micro_batches(rows, plan_micro_batches(rows.lengths, 30, world)[rank]):
        engine.accumulate(batch, LOSS)
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        stats = engine.step(ALGORITHM.denominators([len(response) for response in rows.responses]))
    except RlmqError as error:
        return int(error.exit_code)
    weights = {name: weight.detach().contiguous() for name, weight in engine.model.named_parameters()}
    save_file(weights, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(asdict(stats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
