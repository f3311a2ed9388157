"""Keys and values of past tokens in buffers that grow in blocks: appending one token does not copy the others."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

BLOCK_TOKENS = 32


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's cache: `keys` and `values` `[rows, heads, tokens, head_dim]` are views into larger buffers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.expected_tokens = 0  # room to take at once when the buffer must grow anyway
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[rows, heads, new, head_dim]`; returns all keys and values so far."""
        past, new = self.get_seq_length(), key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[2] < past + new:
            self._grow(past, past + new, key_states, value_states)
        assert self._buffers is not None
        keys, values = self._buffers
        keys[:, :, past : past + new] = key_states
        values[:, :, past : past + new] = value_states
        self.keys, self.values = keys[:, :, : past + new], values[:, :, : past + new]
        return self.keys, self.values

    def _grow(self, past: int, needed: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        tokens = max(-(-needed // BLOCK_TOKENS) * BLOCK_TOKENS, min(self.expected_tokens, 2 * needed))
        grown = []
        for old, like in ((self.keys, keys), (self.values, values)):
            rows, heads, _, dim = like.shape
            buffer = like.new_empty(rows, heads, tokens, dim)
            if past:
                buffer[:, :, :past] = old
            grown.append(buffer)
        self._buffers = (grown[0], grown[1])
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep (or repeat) rows; the next append allocates the room."""
        super().batch_select_indices(indices)
        self._buffers = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row; the next append allocates the room."""
        super().batch_repeat_interleave(repeats)
        self._buffers = None


def new_cache(config: PretrainedConfig, expected_tokens: int) -> DynamicCache:
    """An empty cache for a model: layers of full attention grow in place, others (sliding windows, states) are
    transformers' own.

    Args:
        config: the model's configuration.
        expected_tokens: places (padding included) that the batch may come to need.
    """
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer()
            cache.layers[index].expected_tokens = expected_tokens
    return cache
