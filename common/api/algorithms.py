"""What a loop's `map` takes: how the trainers shall read the rows. Nothing is computed on the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]
"""Keys of the recipe, and their values."""


def kl_penalty(coef: float, *, estimator: str = "k1") -> Settings:
    """The KL to the reference, taken off each token's reward."""
    return {"algorithm.kl_coef": coef, "algorithm.kl_in": "reward", "algorithm.kl_estimator": estimator}


def gae(gamma: float = 1.0, lam: float = 0.95) -> Settings:
    """Advantages from a critic's values."""
    return {"algorithm.gamma": gamma, "algorithm.lam": lam}
