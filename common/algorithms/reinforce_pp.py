"""REINFORCE++: REINFORCE with PPO's clip, its advantages whitened over the whole batch.

Source: arXiv 2501.03262. Plain: `A_t = r - kl_coef · sum of the KL from t on`. With a baseline: `A = r - mean` of
the group, and the KL (k2) in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmq.common.algorithms.algorithm import Floats, ScoredBatch, Spec
from rlmq.common.algorithms.gae import at_last_token, rewards_to_go
from rlmq.common.algorithms.grpo import Grpo
from rlmq.common.algorithms.policy_gradient import GROUP_KEYS, KEYS, PolicyGradient


class ReinforcePP(PolicyGradient):
    """REINFORCE++."""

    def token_advantages(self, batch: ScoredBatch, kl: Sequence[Floats]) -> list[Floats]:
        """What a token and those after it earn: the reward at the last one, less their KL."""
        last = at_last_token(batch.rewards, batch.masks)
        rewards = [reward - own for reward, own in zip(last, kl, strict=True)]
        return rewards_to_go(rewards, batch.masks, gamma=self._block.gamma)


SPEC = Spec(
    "REINFORCE++: REINFORCE with PPO's clip and advantages whitened over the batch.",
    ReinforcePP,
    preset={"group_size": 1, "whiten": True, "kl_in": "reward", "kl_estimator": "k1"},
    keys=KEYS | {"gamma"},
)
BASELINE_SPEC = Spec(
    "REINFORCE++ with the group's mean as a baseline.",
    Grpo,
    preset={"std_normalisation": False, "whiten": True, "kl_estimator": "k2"},
    keys=GROUP_KEYS | {"std_normalisation", "std_epsilon"},
)
