"""Decoupled PPO: clipped around the policy before the step, weighted for the policy that generated.

Source: Hilton et al. 2021 (arXiv 2110.00641, eq. 5); without a critic, and with tokens of too great a weight left
out, as in AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

from rlmq.common.algorithms.algorithm import Spec
from rlmq.common.algorithms.grpo import GRPO_KEYS, Grpo

SPEC = Spec(
    "Decoupled PPO: clipped around the policy before the step, weighted for the policy that generated.",
    Grpo,
    preset={"importance": "masked", "importance_cap": 5.0},
    keys=GRPO_KEYS - {"old_logprobs"},
)
