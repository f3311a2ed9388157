"""Dr. GRPO: GRPO without the two divisions that favour long wrong answers and easy prompts.

Source: arXiv 2503.20783, section 3.2: `A = r - mean` of the group, and a constant instead of a response's length.
"""

from __future__ import annotations

from rlmq.common.algorithms.algorithm import Spec
from rlmq.common.algorithms.grpo import GRPO_KEYS, Grpo

SPEC = Spec(
    "Dr. GRPO: GRPO without division by the group's deviation or the response's length.",
    Grpo,
    preset={"std_normalisation": False, "loss_agg": "sequence_sum"},
    keys=GRPO_KEYS,
)
