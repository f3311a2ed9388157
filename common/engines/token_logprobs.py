"""Log-probs and entropy of chosen tokens from logits, in float32, without a second copy of the logits."""

from __future__ import annotations

from typing import Any

import torch

# Rows are worked off in pieces that stay in the cache: at a vocabulary of 49152 one row is 192 KiB in float32.
_PIECE_VALUES = 1 << 20


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log softmax(logits / temperature)[ids]`, and the entropy of the same distribution.

    Shapes: `logits` [rows, places, vocabulary] of any float type, `ids` [rows, places]; both results
    [rows, places] in float32. The log-probs carry gradient, the entropy does not: it is a metric.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _TokenLogprobs.apply(flat, ids.reshape(-1), temperature)
    return logprobs.view(ids.shape), entropy.view(ids.shape)


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and one number per row; the softmax is made again in the backward pass, piece by piece."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits.shape[0]
        chosen, log_total, entropy = (torch.empty(rows, device=logits.device) for _ in range(3))
        for piece in _pieces(logits):
            scaled = logits[piece].float() / temperature
            total = torch.logsumexp(scaled, dim=-1)
            chosen[piece] = scaled.gather(1, ids[piece, None])[:, 0] - total
            log_total[piece] = total
            entropy[piece] = total - (scaled * (scaled - total[:, None]).exp_()).sum(dim=-1)
        ctx.save_for_backward(logits, ids, log_total)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        logits, ids, log_total = ctx.saved_tensors
        out = torch.empty_like(logits)
        for piece in _pieces(logits):
            share = gradient[piece, None] / ctx.temperature
            softmax = (logits[piece].float() / ctx.temperature).sub_(log_total[piece, None]).exp_()
            out[piece] = softmax.mul_(-share).scatter_add_(1, ids[piece, None], share)
        return out, None, None


def _pieces(logits: torch.Tensor) -> list[slice]:
    rows = max(1, _PIECE_VALUES // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
