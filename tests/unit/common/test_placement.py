"""Who runs where: estimates against what is really held, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from unit.common.engines.torch_rows import ALGORITHM, LOSS, block, micro_batches, rows_of, tiny_model

from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.errors import UsageError
from rlmq.common.placement import Devices, Placed, check_devices, check_memory, device_of, placements
from rlmq.common.recipe.load import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
GIB = 1 << 30
GPUS = Devices("gpu", (80 * GIB, 80 * GIB))


def recipe_of(*overrides: str) -> Any:
    return load_recipe(RECIPES / "tiny.yaml", overrides).recipe


def test_workers_get_their_devices_in_turn_and_pools_are_names_of_them() -> None:
    pools = "placement.pools=[{name: train, devices: [1, 0]}]"
    recipe = recipe_of(pools, "placement.actor.pool=train", "placement.rollout={workers: 3, devices: [0, 1]}")
    assert recipe.placement.actor.workers == 2
    assert [device_of(recipe, "actor", i) for i in range(2)] == [1, 0]
    assert [device_of(recipe, "rollout", i) for i in range(3)] == [0, 1, 0]
    assert device_of(recipe, "reward", 0) is None
    check_devices(recipe, GPUS)
    assert recipe_of("placement.rollout.devices=[0, 1]").workers()["rollout"] == 2


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("placement.rollout.devices=[0, 0]", "each once"),
        ("placement.rollout={devices: [0, 1], workers: 1}", "at least one for each of the 2 devices"),
        ("placement.rollout.pool=nowhere", "the name of an item of placement.pools, not 'nowhere'"),
        ("placement.pools=[{name: a, devices: [0]}, {name: a, devices: [1]}]", "each name once"),
    ],
)
def test_what_is_no_placement_is_refused(override: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        recipe_of(override)


def test_devices_that_do_not_exist_are_refused() -> None:
    recipe = recipe_of("placement.rollout.devices=[1, 2]")
    with pytest.raises(UsageError, match=r"placement.rollout.devices: got 2, expected 0 to 1: this machine"):
        check_devices(recipe, GPUS)


def test_a_device_that_cannot_hold_its_processes_is_named() -> None:
    recipe = recipe_of("placement.pools=[{name: small, devices: [1], memory_gib: 10.0}]")
    apart = [Placed("actor-0", "actor", 0, 60 * GIB), Placed("rollout-0", "rollout", 1, 9 * GIB)]
    check_memory(recipe, apart, GPUS)
    with pytest.raises(
        UsageError, match=r"memory of GPU 0: got 85.0 GiB for 1 actor, 1 critic, expected at most 80"
    ):
        check_memory(recipe, [*apart, Placed("critic-0", "critic", 0, 25 * GIB)], GPUS)
    with pytest.raises(UsageError, match=r"memory of GPU 1: got 11.0 GiB for 1 rollout, expected at most 10.0 GiB"):
        check_memory(recipe, [Placed("rollout-0", "rollout", 1, 11 * GIB)], GPUS)
    with pytest.raises(UsageError, match=r"memory of this machine: got 69.0 GiB"):
        check_memory(recipe, apart, Devices("core", (64 * GIB,)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_of_the_actor_is_what_an_engine_holds(dtype: str, tmp_path: Path) -> None:
    # given an engine after a step, with the gradients of the next one
    engine, rows = TorchEngine(tiny_model(), block(dtype=dtype)), rows_of(7)
    for _ in range(2):
        for batch in micro_batches(rows, [range(7)]):
            engine.accumulate(batch, LOSS)
        held = {id(one): one for one in engine.model.parameters()} | {id(one): one for one in engine._masters}
        gradients = [one.grad for one in engine._masters if one.grad is not None]
        if engine._updates == 0:
            engine.step(ALGORITHM.denominators([len(response) for response in rows.responses]))
    moments = [v for one in engine._optimizer.state.values() for v in one.values() if isinstance(v, torch.Tensor)]
    nbytes = sum(one.nbytes for one in [*held.values(), *gradients, *moments] if one.dim())
    # then the estimate is that, and a constant
    tiny_model().save_pretrained(tmp_path)
    some = (f"model={tmp_path}", f"train.dtype={dtype}")
    one, none = (
        {p.role: p.bytes for p in placements(recipe_of(*some, f"train.micro_batch_tokens={n}"), RECIPES)}["actor"]
        for n in (1, 2)
    )
    logits = none - one
    assert one - logits - (150 << 20) == pytest.approx(nbytes, rel=0.02)
