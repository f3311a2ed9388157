"""Group-relative policy optimisation: the mean of a prompt's samples is the baseline.

Source: DeepSeekMath (arXiv 2402.03300, eqs. 3 and 4).
"""

from __future__ import annotations

from functools import partial

from rlmq.common.algorithms.algorithm import Floats, ScoredBatch, Spec
from rlmq.common.algorithms.group_baseline import by_group, centred, standardised
from rlmq.common.algorithms.policy_gradient import GROUP_KEYS, PolicyGradient


class Grpo(PolicyGradient):
    """GRPO."""

    def advantages(self, batch: ScoredBatch) -> Floats:
        """`(r - mean) / (std + epsilon)` within each group [rows], in float64.

        `std` is the sample standard deviation (n - 1); without `std_normalisation` only the mean is taken
        off. A group of one, or of equal rewards, has nothing to say: 0.
        """
        scaled = partial(standardised, epsilon=self._block.std_epsilon)
        return by_group(batch.rewards, batch.groups, scaled if self._block.std_normalisation else centred)


GRPO_KEYS = GROUP_KEYS | {"std_normalisation", "std_epsilon"}

SPEC = Spec(
    "Group-relative policy optimisation: the mean of a prompt's samples is the baseline, no critic.",
    Grpo,
    keys=GRPO_KEYS,
)
