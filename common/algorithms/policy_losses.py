"""The parts of policy-gradient losses: one number per token, [rows, R] each; masked places hold 0.

Sources: the clipped surrogate from PPO (arXiv 1707.06347, eq. 7); the ratio of the whole sequence from GSPO
(arXiv 2507.18071, eq. 7); the clipped weight from CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5); the weights
of old against rollout from decoupled PPO (Hilton et al. 2021, arXiv 2110.00641, eq. 5), cut as in truncated
importance sampling (Ionides 2008) or masked as in AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlmq.common.algorithms.kl import safe_exp

if TYPE_CHECKING:
    import torch


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    """`-min(ratio · A, clip(ratio) · A)`."""
    import torch

    return -torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages)


def clipped_weight(
    ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, bounds: tuple[float, float]
) -> torch.Tensor:
    """`-sg(clip(ratio)) · A · logprobs`: every token keeps its gradient, none weighs more than the bound."""
    return -ratio.detach().clamp(*bounds) * advantages * logprobs


def of_sequence(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of a row's counted log-ratios at each of its tokens: the logarithm of GSPO's ratio."""
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mean.expand_as(log_ratio) * mask


def importance_weight(log_weight: torch.Tensor, kind: str, cap: float) -> torch.Tensor:
    """`exp(old - rollout)` without gradient: whole, cut at `cap`, or 0 beyond it."""
    import torch

    weight = safe_exp(log_weight.detach())
    if kind == "truncated":
        return weight.clamp(max=cap)
    return torch.where(weight > cap, 0.0, weight) if kind == "masked" else weight


def value_error(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`max((V - R)^2, (clip(V) - R)^2) / 2`, clip(V) within `clip` of the old value; and where that one counts."""
    import torch

    free = (values - returns).square()
    if clip is None:
        return free / 2.0, torch.zeros_like(free, dtype=torch.bool)
    held = (old + (values - old).clamp(-clip, clip) - returns).square()
    return torch.maximum(free, held) / 2.0, held > free
