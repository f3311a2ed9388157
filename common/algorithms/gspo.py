"""GSPO: GRPO whose ratio is that of the whole response, its length's root.

Source: arXiv 2507.18071, eqs. 5 to 7; the clip range from its section 5.1.
"""

from __future__ import annotations

from rlmq.common.algorithms.algorithm import Spec
from rlmq.common.algorithms.grpo import GRPO_KEYS, Grpo

SPEC = Spec(
    "GSPO: GRPO with one ratio for the whole response.",
    Grpo,
    preset={"ratio": "sequence", "clip": (3.0e-4, 4.0e-4), "loss_agg": "sequence_mean"},
    keys=GRPO_KEYS,
)
