"""The KL of the policy to the reference: its estimators, and a coefficient that is steered to a target.

Sources: the estimators k1, k2 and k3 from J. Schulman, "Approximating KL divergence"
(http://joschu.net/blog/kl-approx.html); the adaptive coefficient from Ziegler et al. 2019 (arXiv 1909.08593, 2.2).

Each estimate is of one token that the policy drew, from `x = log policy(token) - log reference(token)`. Their means
are: k1 the KL itself, k2 nearly, k3 the KL itself, and no token's k3 is negative. In a loss it is the gradient that
counts: that of k1 has mean 0, that of k2 is the gradient of the KL, that of k3 is near it while the two are close.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlmq.common.algorithms.algorithm import Floats

if TYPE_CHECKING:
    import torch

# exp(20) = 4.9e8: far outside every clip range and finite in float32, so that one absurd token can neither
# overflow the loss nor, its gradient being cut with the clamp, throw the weights away.
LOG_RATIO_LIMIT = 20.0


def safe_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """`exp`, its exponent clamped to ±LOG_RATIO_LIMIT."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kl_of_tokens(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """k1 `x`, k2 `x^2 / 2` or k3 `exp(-x) - 1 + x` of each token."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2.0
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-bounded).exp() - 1.0 + bounded


def kl_of_row(log_ratio: Floats, estimator: str) -> Floats:
    """The same of a row's tokens [tokens], in float64."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return np.square(log_ratio) / 2.0
    bounded = np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return np.exp(-bounded) - 1.0 + bounded


def next_coefficient(coefficient: float, *, measured: float, target: float, samples: int, horizon: float) -> float:
    """`c (1 + e · samples / horizon)`, with `e = (measured - target) / target` cut to ±0.2; never negative."""
    error = float(np.clip((measured - target) / target, -0.2, 0.2))
    return coefficient * max(0.0, 1.0 + error * samples / horizon)
