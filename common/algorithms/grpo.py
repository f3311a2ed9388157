"""Group-relative policy optimisation: the mean of a prompt's samples is the baseline.

Source: DeepSeekMath (arXiv 2402.03300, eqs. 3 and 4).
"""

from __future__ import annotations

import numpy as np

from rlmq.common.algorithms.algorithm import Floats, ScoredBatch, Spec
from rlmq.common.algorithms.policy_gradient import KEYS, PolicyGradient


class Grpo(PolicyGradient):
    """GRPO."""

    def advantages(self, batch: ScoredBatch) -> Floats:
        """`(r - mean) / (std + epsilon)` within each group [rows], in float64.

        `std` is the sample standard deviation (n - 1); without `std_normalisation` only the mean is taken
        off. A group of one, or of equal rewards, has nothing to say: 0.
        """
        rewards = np.asarray(batch.rewards, dtype=np.float64)
        advantages = np.zeros_like(rewards)
        _, group_of = np.unique(np.asarray(batch.groups, dtype=np.str_), return_inverse=True)
        for group in range(int(group_of.max(initial=-1)) + 1):
            members = group_of == group
            own = rewards[members]
            if own.size < 2 or own.min() == own.max():
                continue
            scale = own.std(ddof=1) + self._block.std_epsilon if self._block.std_normalisation else 1.0
            advantages[members] = (own - own.mean()) / scale
        return advantages


SPEC = Spec(
    "Group-relative policy optimisation: the mean of a prompt's samples is the baseline, no critic.",
    Grpo,
    keys=KEYS | {"std_normalisation", "std_epsilon"},
)
