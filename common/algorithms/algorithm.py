"""What an algorithm is: the columns that it needs, an advantage, a loss, and a control loop.

The controller imports an algorithm's file for its loop and must stay free of torch: algorithm files import
torch inside their loss only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RewardedBatch:
    """What advantages are made of, row by row: `rewards` [rows], `groups` [rows] (group ids),
    `lengths` [rows] (response tokens that count)."""

    rewards: Floats
    groups: Sequence[str]
    lengths: NDArray[np.int64]


class Steering(Protocol):
    """What a control loop may do. Every method makes calls, whose ids are the step and their ordinal in it: after
    a crash the loop runs again from the open step, and calls that have finished return their stored results at
    once. So a loop must be deterministic between calls; else it ends with `ControlLoopDiverged`.
    """

    def steps(self) -> Iterator[int]:
        """Step numbers from the open step on, 1-based; ends at `train.steps` or when the data end."""

    def call(
        self, role: str, method: str, args: Mapping[str, Any] | None = None, *, ranks: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Call a method of these ranks of a role, or of everyone who is there; what they answer, by rank.

        Of roles whose workers may come and go, one that dies meanwhile has no answer.
        """

    def admit(self, step: int) -> int:
        """Add the step's prompts to the train table; returns the number of samples."""

    def wait_batch(self, step: int) -> int:
        """Wait until every admitted sample of the step is ready to train or ended; returns the ready ones."""

    def train(self, step: int) -> None:
        """Train the actor on the batch; logs its metrics; makes policy version `step`."""

    def publish(self, version: int) -> None:
        """Move the actor's weights to every rollout worker."""

    def evaluate(self, step: int) -> None:
        """Generate and score the evaluation sets with the published weights, when it is their turn."""

    def checkpoint(self, step: int) -> None:
        """Save a checkpoint when it is its turn."""


class Algorithm(Protocol):
    """One algorithm, built from the recipe's `algorithm` block."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that a row must have before it can be trained on."""

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy must score the rows."""

    def advantages(self, batch: RewardedBatch) -> Floats:
        """One advantage per row [rows]."""

    def denominators(self, lengths: Sequence[int]) -> tuple[float, ...]:
        """Global denominators of the loss for rows with these numbers of counted response tokens."""

    def loss(self, output: PolicyOutput, batch: MicroBatch) -> LossTerms:
        """The loss as an unnormalised sum, and metric sums."""

    def loop(self, run: Steering) -> None:
        """The control loop."""
