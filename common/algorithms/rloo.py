"""REINFORCE leave-one-out: the mean of a prompt's *other* samples is the baseline.

Source: arXiv 2402.14740, eq. 6. The whole response is one action there: its KL is taken off its reward, and a row's
log-probs are summed and not averaged (`loss_agg: sequence_sum`, here divided by a constant).
"""

from __future__ import annotations

from rlmq.common.algorithms.algorithm import Floats, ScoredBatch, Spec
from rlmq.common.algorithms.group_baseline import against_the_others, by_group
from rlmq.common.algorithms.policy_gradient import GROUP_KEYS, PolicyGradient


class Rloo(PolicyGradient):
    """RLOO."""

    def advantages(self, batch: ScoredBatch) -> Floats:
        """`r - mean of the others' r` within each group [rows]; a group of one has nothing to say: 0."""
        return by_group(batch.rewards, batch.groups, against_the_others)


SPEC = Spec(
    "REINFORCE leave-one-out: the mean of a prompt's other samples is the baseline.",
    Rloo,
    preset={"kl_in": "reward", "kl_estimator": "k1", "loss_agg": "sequence_sum"},
    keys=GROUP_KEYS,
)
