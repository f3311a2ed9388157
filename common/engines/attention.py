"""Attention for one new token per row without copying keys and values for every query head.

transformers' `sdpa` repeats grouped keys and values whenever a padding mask is there: for SmolLM2 that triples
what a decoding step reads and writes. Here the query heads that share a key head become rows of one small
matrix; the result is the same product.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rlmq_grouped_sdpa"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `query` `[rows, heads, new, dim]`, `key`, `value` `[rows, kv_heads,
    past, dim]`, mask `[rows, 1, new, past]` or None; returns `[rows, new, heads, dim]`."""
    rows, heads, new, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    per_head_mask = attention_mask is not None and attention_mask.shape[1] != 1
    unusual = per_head_mask or dropout > 0 or kwargs.get("position_bias") is not None
    if new != 1 or unusual or torch.is_grad_enabled():
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    folded = query.reshape(rows, kv_heads, groups, dim)
    if query.device.type == "cpu":
        out = by_products(folded, key, value, attention_mask, dim**-0.5 if scaling is None else scaling)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=attention_mask, scale=scaling
        )
    return out.reshape(rows, 1, heads, value.shape[-1]), None


def by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Two matrix products and a softmax: with so few queries twice as fast as torch's fused kernel on the CPU."""
    scores = torch.matmul(query * scaling, key.transpose(-1, -2))
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else scores.add_(mask)
    return torch.matmul(scores.softmax(dim=-1), value)


def use_grouped_sdpa(model: PreTrainedModel) -> None:
    """Switch a model that uses `sdpa` to `grouped_sdpa`; others keep what they have."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, grouped_sdpa)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
