"""Generalised advantage estimation over the counted tokens of responses, and whitening.

Source: arXiv 1506.02438, eq. 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlmq.common.algorithms.algorithm import Floats

Masks = Sequence[NDArray[np.bool_]]


def gae(
    rewards: Sequence[Floats], values: Sequence[Floats], masks: Masks, *, gamma: float, lam: float
) -> tuple[list[Floats], list[Floats]]:
    """Advantages and returns, per row [tokens]; 0 at tokens that do not count.

    `A_t = sum over k >= 0 of (gamma lam)^k d_{t+k}` with `d_t = r_t + gamma V_{t+1} - V_t`, where t counts the
    counted tokens only and the value after the last one is 0. A return is the advantage plus the value.
    """
    reward, value = _packed(rewards, masks), _packed(values, masks)
    advantages = np.zeros_like(reward)
    after, next_value = np.zeros(len(reward)), np.zeros(len(reward))
    for t in range(reward.shape[1] - 1, -1, -1):
        after = reward[:, t] + gamma * next_value - value[:, t] + gamma * lam * after
        advantages[:, t], next_value = after, value[:, t]
    return _spread(advantages, masks), _spread(advantages + value, masks)


def rewards_to_go(rewards: Sequence[Floats], masks: Masks, *, gamma: float) -> list[Floats]:
    """`sum over k >= 0 of gamma^k r_{t+k}` at each counted token: GAE without values, its lambda 1."""
    return gae(rewards, [np.zeros(len(mask)) for mask in masks], masks, gamma=gamma, lam=1.0)[0]


def at_last_token(rewards: Floats, masks: Masks) -> list[Floats]:
    """One reward a row [rows] at its last counted token, per row [tokens]; nowhere in a row without one."""
    found = [np.zeros(len(mask)) for mask in masks]
    for row, mask, reward in zip(found, masks, rewards, strict=True):
        if mask.any():
            row[np.flatnonzero(mask)[-1]] = reward
    return found


def whitened(advantages: Sequence[Floats], masks: Masks) -> list[Floats]:
    """`(A - mean) / sqrt(var + 1e-8)` over the counted tokens of all rows; 0 where all are equal."""
    packed = np.concatenate([row[mask] for row, mask in zip(advantages, masks, strict=True)] or [np.zeros(0)])
    if packed.size == 0 or packed.min() == packed.max():
        return [np.zeros(len(mask)) for mask in masks]
    mean, scale = packed.mean(), np.sqrt(packed.var() + 1e-8)
    return [np.where(mask, (row - mean) / scale, 0.0) for row, mask in zip(advantages, masks, strict=True)]


def _packed(rows: Sequence[Floats], masks: Masks) -> Floats:
    """The counted tokens of each row, pushed together, 0 behind them [rows, most of them]."""
    packed = np.zeros((len(masks), max((int(mask.sum()) for mask in masks), default=0)))
    for place, row, mask in zip(packed, rows, masks, strict=True):
        place[: int(mask.sum())] = row[mask]
    return packed


def _spread(packed: Floats, masks: Masks) -> list[Floats]:
    rows = [np.zeros(len(mask)) for mask in masks]
    for row, place, mask in zip(rows, packed, masks, strict=True):
        row[mask] = place[: int(mask.sum())]
    return rows
