"""ReMax: the reward of the prompt's greedy response is the baseline.

Source: arXiv 2310.10505, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlmq.common.algorithms.algorithm import Floats, ScoredBatch, Spec
from rlmq.common.algorithms.gae import at_last_token, rewards_to_go
from rlmq.common.algorithms.policy_gradient import KEYS, PolicyGradient


class ReMax(PolicyGradient):
    """ReMax."""

    greedy_baseline = True

    @property
    def group_columns(self) -> tuple[str, ...]:
        """The greedy response's reward."""
        return ("baseline",)

    def group(self, rewards: Floats, greedy: float | None) -> tuple[Mapping[str, float], str]:
        """No group is dropped that has a baseline."""
        assert greedy is not None
        return {"baseline": greedy}, ""

    def token_advantages(self, batch: ScoredBatch, kl: Sequence[Floats]) -> list[Floats]:
        """`r - baseline`, less the KL of the token and those after it."""
        gains = batch.rewards - np.array(batch.columns["baseline"], dtype=np.float64)
        last = at_last_token(gains, batch.masks)
        rewards = [gain - own for gain, own in zip(last, kl, strict=True)]
        return rewards_to_go(rewards, batch.masks, gamma=1.0)


SPEC = Spec(
    "ReMax: REINFORCE whose baseline is the reward of the prompt's greedy response.",
    ReMax,
    preset={"group_size": 1, "kl_in": "reward", "kl_estimator": "k1"},
    keys=KEYS,
)
