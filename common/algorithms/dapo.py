"""DAPO: GRPO with a higher upper clip, no groups of equal rewards, a token-level loss and a length penalty.

Source: arXiv 2503.14476: clip-higher (eq. 10), dynamic sampling (eq. 11), the token-level loss (eq. 12), soft
punishment of overlong responses (eq. 13).
"""

from __future__ import annotations

from rlmq.common.algorithms.algorithm import Spec
from rlmq.common.algorithms.grpo import GRPO_KEYS, Grpo

SPEC = Spec(
    "DAPO: GRPO with clip-higher, dynamic sampling, a token-level loss and overlong shaping.",
    Grpo,
    preset={"clip": (0.2, 0.28), "dynamic_sampling": True, "loss_agg": "token_mean"},
    keys=GRPO_KEYS,
)
