"""The actor with `strategy: fsdp`: each rank holds a slice of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(600)

STEPS = 2
WHOLE = (
    "evaluate.every_steps=0",
    "train.mini_batches=2",
    "deterministic=false",  # other sums have other last bits: a deterministic run refuses to change them
    "placement.actor.workers=2",
    "placement.actor.threads=1",
)


def test_fully_sharded_ranks_go_on_where_whole_ones_ended(module_cli: Any) -> None:
    # given a run of two ranks that hold the whole model each, and one that ended after a step less
    cli = module_cli
    for name, steps in (("whole", STEPS), ("sliced", STEPS - 1)):
        done = cli.run("up", cli.tiny, *WHOLE, f"run.name={name}", f"train.steps={steps}", timeout_s=280)
        assert done.code == 0, done.text
    # when the second is continued by ranks that hold slices
    more = ("placement.actor.strategy=fsdp", "run.name=sliced", f"train.steps={STEPS}")
    again = cli.run("up", cli.tiny, *WHOLE, *more, timeout_s=280)
    # then both have the same weights, up to the order of sums
    assert again.code == 0, again.text
    path = Path("checkpoints") / f"step-{STEPS:06d}" / "model.safetensors"
    one, other = (load_file(cli.newest_run(name) / path) for name in ("whole", "sliced"))
    assert one.keys() == other.keys()
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-6
