"""The schedule against transformers' own, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from rlmq.common.engines.learning_rate import learning_rate
from rlmq.common.recipe.schema import TrainBlock


def reference(schedule: str, warmup: int, end: int, count: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    builders: dict[str, Any] = {
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, warmup),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, warmup, end),
        "cosine": lambda: get_cosine_schedule_with_warmup(optimizer, warmup, end),
    }
    scheduler = builders[schedule]()
    rates = []
    for _ in range(count):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("end", [None, 12])
def test_rates_are_those_of_transformers(schedule: str, warmup: int, end: int | None) -> None:
    block = TrainBlock(steps=17, lr=3e-4, lr_schedule=schedule, warmup_steps=warmup, lr_steps=end)

    last = (end or 17) + 1  # transformers' cosine rises again after its end
    found = [learning_rate(step, block) for step in range(last)]

    assert found == pytest.approx(reference(schedule, warmup, end or 17, last), rel=1e-9, abs=1e-20)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rates_stay_at_zero_after_the_end(schedule: str) -> None:
    assert learning_rate(30, TrainBlock(steps=17, lr=3e-4, lr_schedule=schedule)) == 0.0


def test_a_warm_up_longer_than_the_schedule_only_rises_then_ends() -> None:
    block = TrainBlock(steps=4, lr=1.0, lr_schedule="linear", warmup_steps=6)

    assert learning_rate(3, block) == 0.5
    assert learning_rate(7, block) == 0.0
