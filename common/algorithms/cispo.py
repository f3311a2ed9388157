"""CISPO: the ratio is a clipped weight without gradient, so that no token is left out of the loss.

Source: MiniMax-M1 (arXiv 2506.13585, eqs. 4 and 5). As there, the weight is not bounded below; its upper bound
is a knob, preset to 1 + 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlmq.common.algorithms.algorithm import Spec
from rlmq.common.algorithms.grpo import GRPO_KEYS, Grpo
from rlmq.common.algorithms.policy_losses import clipped_weight

if TYPE_CHECKING:
    import torch


class Cispo(Grpo):
    """CISPO."""

    def _surrogate(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return clipped_weight(ratio, logprobs, advantages, self._bounds)


SPEC = Spec(
    "CISPO: a clipped importance weight without gradient instead of a clipped surrogate.",
    Cispo,
    preset={"clip": (1.0, 4.0)},
    keys=GRPO_KEYS - {"ratio"},
)
