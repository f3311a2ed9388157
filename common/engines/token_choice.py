"""From logits to tokens: temperature, cuts, one uniform number per token, and the log-probability of the choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlmq.common.engines.generation import Sampling
from rlmq.common.errors import IntegrityError

_BLOCK = 256


class TokenChoice:
    """The sampling parameters of a batch's rows as tensors `[rows, 1]`."""

    def __init__(self, rows: Sequence[Sampling], device: torch.device) -> None:
        self.temperature = _column([s.temperature if s.temperature > 0 else 1.0 for s in rows], device).float()
        self.greedy = torch.tensor([s.temperature <= 0 for s in rows], device=device)
        self.top_k = [s.top_k for s in rows]
        self.top_p = [s.top_p for s in rows]
        self._plain = all(s.temperature in (0.0, 1.0) for s in rows)
        self._any_greedy = any(s.temperature <= 0 for s in rows)
        self._all_greedy = all(s.temperature <= 0 for s in rows)
        self._cut = any(s.temperature > 0 and (s.top_k > 0 or s.top_p < 1) for s in rows)

    def choose(self, logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose one token per row.

        Args:
            logits: float32 `[rows, vocabulary]`; overwritten.
            uniforms: float64 in [0, 1) `[rows]`.

        Returns:
            Tokens int64 `[rows]` and their log-probs float32 `[rows]`: of the distribution after temperature
            and before the cuts; of the untempered one where temperature is 0.

        Raises:
            IntegrityError: the model's output is not finite.
        """
        if not self._plain:
            logits.div_(self.temperature)
        best, greedy_tokens = logits.max(dim=-1, keepdim=True)
        weights = logits.sub_(best).exp_()  # unnormalised probabilities, the greatest is 1
        sums = _block_sums(weights)
        total = sums.sum(-1, keepdim=True)
        if not torch.isfinite(total).all():
            raise IntegrityError(
                "generation", got="logits that are not finite", remedy="Look at grad_norm and lr of the last steps"
            )
        tokens = greedy_tokens
        if not self._all_greedy:
            drawn = self._draw(weights, sums, uniforms[:, None])
            tokens = torch.where(self.greedy[:, None], greedy_tokens, drawn) if self._any_greedy else drawn
        chosen = weights.gather(1, tokens).double()
        return tokens[:, 0], (chosen.log() - total.log())[:, 0].float()

    def _draw(self, weights: torch.Tensor, sums: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        if self._cut:
            # The chosen token survives the cut, so its weight is the same in both.
            weights = weights.masked_fill(weights < self._floors(weights), 0.0)
            sums = _block_sums(weights)
        return _inverse_cdf(weights, sums, uniforms)

    def _floors(self, weights: torch.Tensor) -> torch.Tensor:
        """The smallest weight that each row keeps, `[rows, 1]`: first `top_k`, then the nucleus of what is left.

        Tokens as likely as the last one kept are kept too, so that the order of equal ones does not matter.
        """
        vocabulary = weights.shape[-1]
        ordered = weights.sort(dim=-1, descending=True).values
        kept = torch.tensor(
            [min(k, vocabulary) if k > 0 else vocabulary for k in self.top_k], device=weights.device
        )
        last = ordered.gather(1, kept[:, None] - 1)
        mass = ordered.double().masked_fill_(ordered < last, 0.0).cumsum(-1)
        limit = _column(self.top_p, weights.device) * mass[:, -1:]
        # The nucleus ends with the first token at which the mass reaches top_p.
        count = (mass < limit).sum(-1, keepdim=True) + 1
        full = torch.tensor([p >= 1 for p in self.top_p], device=weights.device)[:, None]
        nucleus = ordered.gather(1, count.clamp_(max=vocabulary) - 1)
        return torch.where(full, last, torch.maximum(last, nucleus))


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Float64 sums of blocks of `_BLOCK` weights, `[rows, blocks]`; the last block may be shorter.

    Float64 throughout: a float32 sum over a large vocabulary would move the borders between tokens.
    """
    rows, vocabulary = weights.shape
    whole = vocabulary // _BLOCK * _BLOCK
    sums = weights[:, :whole].view(rows, -1, _BLOCK).sum(-1, dtype=torch.float64)
    if whole == vocabulary:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=1)


def _inverse_cdf(weights: torch.Tensor, sums: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative weight exceeds `uniform × total`, `[rows, 1]`: two levels, blocks first."""
    vocabulary = weights.shape[-1]
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    block = (ends <= target).sum(-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    rest = target - (ends.gather(1, block) - sums.gather(1, block))
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=vocabulary - 1)).double().masked_fill_(places >= vocabulary, 0.0)
    # Rounding may leave the target a hair above the block's end: the last token with weight takes it.
    last = (torch.arange(_BLOCK, device=weights.device) * (inside > 0)).amax(-1, keepdim=True)
    offset = (inside.cumsum(-1) <= rest).sum(-1, keepdim=True)
    return block * _BLOCK + torch.minimum(offset, last)
