"""Advantages of a row among the samples of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlmq.common.algorithms.algorithm import Floats


def by_group(rewards: Floats, groups: Sequence[str], advantage: Callable[[Floats], Floats]) -> Floats:
    """`advantage` of each group's rewards [rows], in float64; 0 for a group of one, or of equal rewards."""
    rewards = np.asarray(rewards, dtype=np.float64)
    found = np.zeros_like(rewards)
    _, group_of = np.unique(np.asarray(groups, dtype=np.str_), return_inverse=True)
    for group in range(int(group_of.max(initial=-1)) + 1):
        members = group_of == group
        own = rewards[members]
        if own.size >= 2 and own.min() != own.max():
            found[members] = advantage(own)
    return found


def centred(own: Floats) -> Floats:
    """`r - mean`."""
    found: Floats = own - own.mean()
    return found


def standardised(own: Floats, epsilon: float) -> Floats:
    """`(r - mean) / (std + epsilon)`, `std` being the sample standard deviation (n - 1)."""
    found: Floats = centred(own) / (own.std(ddof=1) + epsilon)
    return found


def against_the_others(own: Floats) -> Floats:
    """`r - mean of the others' r`, which is `n / (n - 1) (r - mean)`."""
    return centred(own) * (own.size / (own.size - 1))
