"""Prompts by their measured pass rate."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rlmq.buffer.batch_log import BatchEntry
from rlmq.common.errors import UsageError
from rlmq.common.recipe.data_block import DifficultyBlock
from rlmq.producers.measured_order import MeasuredOrder
from rlmq.producers.prompt_order import PromptOrder

COUNT, PER_STEP, MEMBERS = 60, 6, 4


class Log:
    """A batch log in which prompt n passes `n % 5` of its four samples."""

    def __init__(self) -> None:
        self.steps: list[BatchEntry] = []

    def train(self, prompts: list[int]) -> None:
        step = len(self.steps) + 1
        rows = [f"train-{step:06d}-{g:04d}-{m:02d}" for g in range(len(prompts)) for m in range(MEMBERS)]
        rewards = [2.0 if m < prompt % 5 else 0.5 for prompt in prompts for m in range(MEMBERS)]
        entry = BatchEntry(step, step, tuple(rows), (), (), (0, 0), 0, rewards=tuple(rewards))
        self.steps.append(entry)

    def entries(self, after: int) -> Iterable[BatchEntry]:
        return [entry for entry in self.steps if entry.step > after]


def measured(log: Log, **block: object) -> MeasuredOrder:
    given = DifficultyBlock.model_validate({"window": (0.25, 0.75), "pass_reward": 1.0, **block})
    return MeasuredOrder(PromptOrder(COUNT, PER_STEP, seed=3), given, log.entries)


def trained(log: Log, order: MeasuredOrder, steps: int) -> list[list[int]]:
    found = []
    for step in range(1, steps + 1):
        found.append(order.of_step(step))
        log.train(found[-1])
    return found


def test_prompts_outside_the_window_come_no_more_once_they_are_measured() -> None:
    log = Log()
    steps = trained(log, measured(log, outside=0.0), 40)
    # the first pass takes every prompt once, in the plain order
    plain = PromptOrder(COUNT, PER_STEP, seed=3)
    assert steps[:10] == [plain.step_prompts(step) for step in range(1, 11)]
    # later ones only those that pass 1, 2 or 3 of 4, each about as often
    later = [prompt for step in steps[10:] for prompt in step]
    assert {prompt % 5 for prompt in later} == {1, 2, 3}
    counts = [later.count(prompt) for prompt in range(COUNT) if prompt % 5 in (1, 2, 3)]
    assert max(counts) - min(counts) <= 1


def test_a_run_that_goes_on_takes_the_same_prompts() -> None:
    log = Log()
    steps = trained(log, measured(log, outside=0.2), 30)
    again = measured(log, outside=0.2)
    assert [again.of_step(step) for step in (30, 7, 31)][:2] == [steps[29], steps[6]]
    assert again.of_step(31) == measured(log, outside=0.2).of_step(31)


def test_some_of_the_others_are_measured_again() -> None:
    log = Log()
    steps = trained(log, measured(log, outside=0.25), 210)
    later = [prompt for step in steps[10:] for prompt in step]
    share = sum(prompt % 5 in (0, 4) for prompt in later) / len(later)
    assert share == pytest.approx(0.25 * 24 / (36 + 0.25 * 24), abs=0.04)


def test_a_step_is_filled_though_no_prompt_fits_and_needs_the_step_before() -> None:
    log = Log()
    order = measured(log, window=(0.9, 0.95), outside=0.0)
    steps = trained(log, order, 12)
    assert all(len(set(step)) == PER_STEP for step in steps)
    order.of_step(13)
    with pytest.raises(UsageError, match="without step 13"):
        order.of_step(14)
