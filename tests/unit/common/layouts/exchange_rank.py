"""One of four ranks that carry out plans: `exchange_rank.py FOLDER RANK`; writes what it saw as RANK.json."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from unit.common.layouts.test_plan import layers

from rlmq.common.dtypes import DTYPES
from rlmq.common.errors import RlmqError
from rlmq.common.layouts import exchange as module
from rlmq.common.layouts import rounds
from rlmq.common.layouts.build import flat_sharded, replicated
from rlmq.common.layouts.exchange import Exchange
from rlmq.common.layouts.groups import join
from rlmq.common.layouts.layout import Layout, MeshShape
from rlmq.common.layouts.plan import Plan, plan
from rlmq.common.layouts.views import ShardViews, cut_shards, empty_shards
from rlmq.common.layouts.zero_redundancy import Grouping, generation_layout

RANKS = 4
BUCKET_BYTES = 1024


def weights(layout: Layout) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {n: torch.randn(s.shape, generator=draw).to(DTYPES[s.dtype]) for n, s in layout.tensors.items()}


def plans() -> dict[str, Plan]:
    training = layers(3, MeshShape(2, 2, 1))
    specs = training.tensors.values()
    return {
        "zero_redundancy": plan(training, generation_layout(training, Grouping(MeshShape(2, 2, 1), 1, 2))),
        "rows_to_everywhere": plan(flat_sharded(specs, range(4), rule="rows"), replicated(specs, range(4))),
        "elements_to_mesh": plan(flat_sharded(specs, [0, 1, 2], rule="elements"), layers(3, MeshShape(1, 4, 1))),
        "chain": plan(replicated(specs, [0]), replicated(specs, [1, 2, 3])),
    }


def carry_out(made: Plan, rank: int, exchange: Exchange, name: str, seconds: float) -> bool:
    """Whether the rank's target shards are those cut from the whole model."""
    whole = weights(made.source)
    target = empty_shards(made.target, rank)
    views = ShardViews(cut_shards(made.source, rank, whole.items()), target)
    views.keep(made, rank)
    exchange.run(made, views, generation=name, deadline=time.monotonic() + seconds)
    wanted = cut_shards(made.target, rank, whole.items())
    return all(torch.equal(target[place], wanted[place]) for place in made.target.boxes(rank))


def main() -> int:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    store = dist.FileStore(str(folder / "store"), RANKS)
    seen: dict[str, Any] = {}
    rounds.LARGE_BYTES = 128  # some chunks are messages of their own

    def met(name: str) -> Exchange:
        group = join(store, name, rank, RANKS, 60.0)
        inside = dist.PrefixStore(f"told-{name}", store)
        return Exchange(group, rank, range(RANKS), bucket_bytes=BUCKET_BYTES, store=inside)

    def failing(name: str, seconds: float) -> None:
        started = time.monotonic()
        try:
            seen[name] = carry_out(plans()["zero_redundancy"], rank, met(name), name, seconds)
        except RlmqError as error:
            seen[name] = [type(error).__name__, str(error), time.monotonic() - started]
        (folder / f"{rank}.json").write_text(json.dumps(seen))

    exchange = met("g1")
    for name, made in plans().items():
        seen[name] = carry_out(made, rank, exchange, name, 60.0)

    check = module.is_whole
    if rank == 2:  # as if the wire had done it
        module.is_whole = lambda message, number: number != 1 and check(message, number)  # type: ignore[assignment]
    failing("damaged", 60.0)
    module.is_whole = check

    late = met("late")
    if rank == 3:
        time.sleep(5.0)
    else:
        started = time.monotonic()
        try:
            carry_out(plans()["chain"], rank, late, "late", 2.0)
        except RlmqError as error:
            seen["late"] = [type(error).__name__, str(error), time.monotonic() - started]
    (folder / f"{rank}.json").write_text(json.dumps(seen))

    dying = met("dying")
    store.set(f"there-{rank}", "1")
    if rank == 1:
        store.wait([f"there-{other}" for other in range(RANKS)])
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        carry_out(plans()["zero_redundancy"], rank, dying, "dying", 50.0)
    except RlmqError as error:
        seen["dying"] = [type(error).__name__, str(error)]
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
