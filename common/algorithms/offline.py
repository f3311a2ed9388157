"""What the algorithms share that learn from rows whose responses the data bring.

A row's `advantages` say where it pulls: 1 towards its response, -1 away from it. Pairs are groups of two rows; in
training order the chosen one is just before the rejected one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlmq.common.algorithms.algorithm import Floats, ScoredBatch
from rlmq.common.algorithms.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    import torch

    from rlmq.common.engines.training import MicroBatch

DATA_NEEDS = ("prompt_ids", "response_ids", "loss_mask")


class Offline(PolicyGradient):
    """The common part: no rewards, and the loop of the others, in which nothing is generated."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that a row must have before it can be trained on."""
        return (*DATA_NEEDS, "ref_logprobs") if self.needs_reference else DATA_NEEDS

    @property
    def needs_reference(self) -> bool:
        """None, if the algorithm does not say otherwise."""
        return False

    def advantages(self, batch: ScoredBatch) -> Floats:
        """1 for each row [rows]."""
        return np.ones(len(batch.masks))


class Pairwise(Offline):
    """Learns from pairs: a group is a chosen and a rejected row."""

    whole_groups = True

    def advantages(self, batch: ScoredBatch) -> Floats:
        """1 for the chosen row of a pair, which comes first, -1 for the rejected one; 0 for a row alone [rows]."""
        found = np.zeros(len(batch.groups))
        for row in range(len(batch.groups) - 1):
            if batch.groups[row] == batch.groups[row + 1]:
                found[row], found[row + 1] = 1.0, -1.0
        return found

    def denominators(self, lengths: Sequence[int]) -> tuple[float, ...]:
        """Pairs."""
        return (float(max(1, len(lengths) // 2)),)


def split_pairs(batch: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One number a row [rows] as those of the chosen rows and of the rejected ones [pairs]."""
    pull = batch.columns["advantages"].sum(dim=1)
    return values[pull > 0], values[pull < 0]
