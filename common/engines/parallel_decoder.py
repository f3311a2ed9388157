"""A Llama-, Qwen2- or Qwen3-like decoder on one rank's shards of its weights (see `decoder_shape`).

The forward pass is transformers' own, layer by layer, with two sums over the tensor ranks in each layer: after
attention and after the feed-forward block. Hidden states are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlmq.common.engines.decoder_shape import EMBEDDING, HEAD, LAST_NORM, DecoderShape, Place
from rlmq.common.engines.tensor_parallel import embed, spread, summed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import DynamicCache


class _Pass(NamedTuple):
    """What all layers of one forward pass share."""

    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor | None
    cache: DynamicCache | None


class ParallelDecoder:
    """One rank's part of the model.

    Args:
        config: the model's.
        place: which part this is.
        weights: its shards as they lie (see `shard_memory`), by name; they may change in place at any time.
        group: the tensor ranks of this stage; None for one.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        place: Place,
        weights: Mapping[str, torch.Tensor],
        group: ProcessGroup | None,
    ) -> None:
        self.config = config
        self.shape = DecoderShape.of(config)
        self.place = place
        self.group = group
        self.recompute = False
        """Keep only the layers' inputs, and compute a layer again in the backward pass."""
        self._weights = weights
        self.device = next(iter(weights.values())).device
        self.dtype = next(iter(weights.values())).dtype
        self._rotary = LlamaRotaryEmbedding(config).to(self.device)
        self._key_of_query = self._pair_heads()

    def _pair_heads(self) -> torch.Tensor | None:
        """For each query head its key head, both of this rank; None where equal numbers share each."""
        queries, keys = self.shape.heads_at(self.place), self.shape.kv_heads_at(self.place)
        group = self.shape.heads // self.shape.kv_heads
        found = [head // group - keys.start for head in queries]
        each = len(queries) // len(keys)
        if found == [head // each for head in range(len(queries))]:
            return None
        return torch.tensor(found, device=self.device)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states `[rows, places, hidden]` before the first layer."""
        return embed(ids, self._weights[EMBEDDING], self.shape.vocabulary_at(self.place), self.group)

    def layers(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        cache: DynamicCache | None = None,
    ) -> torch.Tensor:
        """Hidden states after this stage's layers.

        Args:
            hidden: `[rows, new, hidden]`.
            mask: as `visible` makes it, or additive; None: each place sees those before it and itself.
            positions: `[rows, new]`.
            cache: of this rank's key heads; takes the new places in.
        """
        cos, sin = self._rotary(hidden, positions)
        shared = _Pass(cos[:, None], sin[:, None], mask, cache)
        for index, layer in enumerate(self.shape.layers_at(self.place)):
            if self.recompute and hidden.requires_grad:
                hidden = checkpoint(self._layer, hidden, layer, index, shared, use_reentrant=False)
            else:
                hidden = self._layer(hidden, layer, index, shared)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[…, own vocabulary]` of hidden states `[…, hidden]` after the last layer."""
        normed = self._norm(hidden, LAST_NORM)
        return functional.linear(spread(normed, self.group), self._weights[EMBEDDING if self.shape.tied else HEAD])

    # -- a layer -------------------------------------------------------------------------------------------

    def _layer(self, hidden: torch.Tensor, layer: int, index: int, shared: _Pass) -> torch.Tensor:
        prefix = f"model.layers.{layer}"
        normed = spread(self._norm(hidden, f"{prefix}.input_layernorm.weight"), self.group)
        attended = self._attention(normed, f"{prefix}.self_attn", index, shared)
        hidden = hidden + self._row(attended, f"{prefix}.self_attn.o_proj")
        normed = spread(self._norm(hidden, f"{prefix}.post_attention_layernorm.weight"), self.group)
        gate, up = (self._column(normed, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
        return hidden + self._row(functional.silu(gate) * up, f"{prefix}.mlp.down_proj")

    def _attention(self, normed: torch.Tensor, prefix: str, index: int, shared: _Pass) -> torch.Tensor:
        rows, new, _ = normed.shape
        query, key, value = (
            self._column(normed, f"{prefix}.{name}_proj").view(rows, new, -1, self.shape.head_dim) for name in "qkv"
        )
        if self.shape.head_norms:
            query, key = self._norm(query, f"{prefix}.q_norm.weight"), self._norm(key, f"{prefix}.k_norm.weight")
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        query, key = (_rotated(each, shared.cos, shared.sin) for each in (query, key))
        if shared.cache is not None:
            key, value = shared.cache.update(key, value, index)
        return _attended(query, key, value, shared.mask, self._key_of_query).transpose(1, 2).reshape(rows, new, -1)

    def _column(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(values, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _row(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """The bias is added once, after the sum."""
        found = summed(values @ self._weights[f"{name}.weight"], self.group)
        bias = self._weights.get(f"{name}.bias")
        return found if bias is None else found + bias

    def _norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        wide = values.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.epsilon)
        return self._weights[name] * wide.to(values.dtype)


def visible(attention_mask: torch.Tensor, new: int) -> torch.Tensor:
    """Which of the places `[rows, places]` (1 where real) the last `new` of them see: bool `[rows, 1, new,
    places]`.

    A padded place sees itself: a softmax over nothing would be NaN.
    """
    places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    query = places[-new:, None]
    return (((places <= query) & attention_mask[:, None, :].bool()) | (places == query))[:, None]


def _rotated(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = values.chunk(2, dim=-1)
    return values * cos + torch.cat([-second, first], dim=-1) * sin


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    key_of_query: torch.Tensor | None,
) -> torch.Tensor:
    """Attention `[rows, heads, new, dim]`; `key_of_query` pairs heads that do not share keys evenly."""
    rows, heads, new, dim = query.shape
    if key_of_query is not None:
        key, value = key[:, key_of_query], value[:, key_of_query]
    kv_heads = key.shape[1]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None}
    if new == 1 and not torch.is_grad_enabled():
        # The query heads of a key head become rows of one small matrix: keys are not copied for each of them.
        folded = query.reshape(rows, kv_heads, heads // kv_heads, dim)
        found = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask)
        return found.reshape(rows, heads, 1, dim)
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=kv_heads != heads, **options)
