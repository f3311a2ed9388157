"""Log-probs and entropy of chosen tokens from logits, in float32, without a second copy of the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rlmq.common.engines.tensor_parallel import all_gather, all_reduce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Rows are worked off in pieces that stay in the cache: at a vocabulary of 49152 one row is 192 KiB in float32.
_PIECE_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The token ids whose logits this rank has, of a vocabulary that lies on the ranks of a group."""

    own: range
    group: ProcessGroup


def token_logprobs(
    logits: torch.Tensor,
    source: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    part: VocabularyPart | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log softmax(logits[source] / temperature)[tokens]`, and the entropy of the same distributions.

    Shapes: `logits` [places, vocabulary] of any float type; `source, tokens` [n]: the place that predicts a
    token (several tokens may have the same one), and its id. Both results are [n] in float32, and carry gradient.

    Args:
        part: `logits` are those of this part of the vocabulary; all ranks of its group call at once, and get the
            same results.
    """
    found = _TokenLogprobs.apply(logits, source, tokens, temperature, part)  # type: ignore[no-untyped-call]
    logprobs, entropy = found
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and one number per place; the softmax is made again in the backward pass, by pieces."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        source: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        part: VocabularyPart | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = logits.shape[0]
        log_total, entropy = (torch.empty(places, device=logits.device) for _ in range(2))
        for piece in _pieces(logits):
            scaled = logits[piece].float() / temperature
            total = torch.logsumexp(scaled, dim=-1)
            log_total[piece] = total
            entropy[piece] = total - (scaled * (scaled - total[:, None]).exp_()).sum(dim=-1)
        held = torch.ones_like(tokens, dtype=torch.bool)
        if part is not None:
            log_total, entropy = _over_ranks(log_total, entropy, part)
            held = (tokens >= part.own.start) & (tokens < part.own.stop)
            tokens = torch.where(held, tokens - part.own.start, 0)
        chosen = torch.where(held, logits[source, tokens].float() / temperature, 0.0)
        if part is not None:
            all_reduce(chosen, part.group)
        chosen -= log_total[source]
        ctx.save_for_backward(logits, source, tokens, log_total, entropy, held)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # a loss without the entropy costs nothing for it
        return chosen, entropy[source]

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None, None]:
        """d logprob / d logits = (one-hot(token) - softmax) / temperature.

        d entropy / d logits = -softmax (log softmax + entropy) / temperature.
        """
        logits, source, tokens, log_total, entropy, held = ctx.saved_tensors
        if gradient is None:
            gradient = torch.zeros_like(log_total[source])
        pull = None
        if of_entropy is not None:
            pull = torch.zeros_like(log_total).index_add_(0, source, of_entropy / ctx.temperature)
        by_place = torch.argsort(source, stable=True)
        source, tokens = source[by_place], tokens[by_place]
        shares = gradient[by_place] / ctx.temperature
        # index_add over one dimension adds in order: the same sum in every run.
        totals = torch.zeros_like(log_total).index_add_(0, source, shares)
        shares = shares * held[by_place]
        out = torch.empty_like(logits)
        for piece in _pieces(logits):
            values = (logits[piece].float() / ctx.temperature).sub_(log_total[piece, None])
            spread = None if pull is None else (values + entropy[piece, None]).mul_(pull[piece, None])
            values.exp_()
            values.mul_(-totals[piece, None] if spread is None else -(spread + totals[piece, None]))
            first, last = torch.searchsorted(source, torch.tensor([piece.start, piece.stop], device=source.device))
            own = slice(int(first), int(last))
            flat = (source[own] - piece.start) * logits.shape[1] + tokens[own]
            values.view(-1).index_add_(0, flat, shares[own])
            out[piece] = values
        return out, None, None, None, None


def _over_ranks(
    log_total: torch.Tensor, entropy: torch.Tensor, part: VocabularyPart
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the whole vocabulary, from each part's `L = log sum exp` and entropy `H`: log-sum-exp of the parts' L, and
    `sum of p_r (H_r - log p_r)` with `p_r = exp(L_r - L)`."""
    found = torch.stack(all_gather(torch.stack([log_total, entropy]), part.group))
    total = torch.logsumexp(found[:, 0], dim=0)
    log_share = found[:, 0] - total
    return total, (log_share.exp() * (found[:, 1] - log_share)).sum(dim=0)


def _pieces(logits: torch.Tensor) -> list[slice]:
    rows = max(1, _PIECE_VALUES // logits.shape[1])
    return [slice(start, min(start + rows, logits.shape[0])) for start in range(0, logits.shape[0], rows)]
