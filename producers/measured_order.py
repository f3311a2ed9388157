"""Prompts by their measured pass rate: a pure function of the order, the recipe and the batch log.

The log says what every step trained on and with which rewards, so that a run that goes on takes the same prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from rlmq.buffer.batch_log import BatchEntry
from rlmq.common.errors import UsageError
from rlmq.common.recipe.data_block import DifficultyBlock
from rlmq.producers.prompt_order import PromptOrder


class MeasuredOrder:
    """Goes through the order, and passes over prompts whose pass rate lies outside of the window.

    The rate of a prompt is the part of its samples that passed in the newest step that trained on it. Prompts that
    were never measured are taken, and of those outside a seeded part. Where no others are left, a step is filled
    with the first ones that were passed over.

    Args:
        order: of all prompts, without an end.
        entries: the batch log's entries after a step, in order.
    """

    def __init__(
        self, order: PromptOrder, block: DifficultyBlock, entries: Callable[[int], Iterable[BatchEntry]]
    ) -> None:
        assert block.window is not None
        self._order = order
        self._block = block
        self._window = block.window
        self._entries = entries
        self._place = 0
        self._steps: list[list[int]] = []
        self.rates: dict[int, float] = {}
        """Pass rate by index of the prompt, as far as the steps that were asked for tell it."""

    def of_step(self, step: int) -> list[int]:
        """Indices of the prompts of a step (from 1); the same ones when asked again.

        Raises:
            UsageError: the step before it is not in the log yet.
        """
        if not self._steps:
            self._steps.append(self._next_step())
        done = len(self._steps)
        logged = iter(self._entries(done - 1) if done < step else ())
        for before in range(done, step):
            entry = next(logged, None)
            if entry is None or entry.step != before:
                raise UsageError(
                    f"data.difficulty, step {step}",
                    got=f"a batch log without step {before}",
                    expected="a loop that admits a step after it has trained on the one before",
                )
            self._measure(entry)
            self._steps.append(self._next_step())
        return self._steps[step - 1]

    def _measure(self, entry: BatchEntry) -> None:
        passed: dict[int, list[bool]] = {}
        for row, reward in zip(entry.rows, entry.rewards, strict=True):
            passed.setdefault(int(row.split("-")[2]), []).append(reward >= self._block.pass_reward)
        for group, found in passed.items():  # `train-STEP-GROUP-MEMBER`
            self.rates[self._steps[entry.step - 1][group]] = sum(found) / len(found)

    def _next_step(self) -> list[int]:
        """Two passes over the data show every prompt; none comes twice in a step, if there are enough of them."""
        count, taken, over = self._order.count, list[int](), list[int]()
        once = count >= self._order.per_step
        for _ in range(max(2 * count, self._order.per_step)):
            [index] = self._order.prompts_at(self._place, 1)
            if not once or index not in (*taken, *over):
                (taken if self._fits(index) else over).append(index)
            self._place += 1
            if len(taken) == self._order.per_step:
                break
        return (taken + over)[: self._order.per_step]

    def _fits(self, index: int) -> bool:
        rate = self.rates.get(index)
        if rate is None or self._window[0] <= rate <= self._window[1]:
            return True
        digest = hashlib.sha256(f"{self._order.seed} {self._place}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48 < self._block.outside
