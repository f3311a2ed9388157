"""The model's forward pass over rows of unequal length, with a KV cache that survives between tokens.

::

    cache places     0 … c-1      c … width-1                     width …
    each row         common       padding | rest of the prompt    new tokens
                     beginning    (masked)

All prompts of a batch that begin alike (a system prompt, a chat template) share that beginning: it is computed
once, as one row. Equal prompts are computed once and their rows repeated. Position ids count a row's own tokens, so
padding changes nothing but the place of a token in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from rlmq.common.engines.kv_cache import GrowingLayer, new_cache

# Below this many tokens a pass of its own for the common beginning costs more than it saves.
LEAST_SHARED_TOKENS = 16


class CausalForward:
    """Rows of one batch: `start` them with their sequences, then `extend` all by one token at a time.

    Args:
        model: a causal language model in evaluation mode.
        pad_id: fills the padding; may be any id, padding is masked by place and not by id.
    """

    def __init__(self, model: PreTrainedModel, pad_id: int) -> None:
        self._model = model
        self._pad_id = pad_id
        self._device = model.device
        self._cache: DynamicCache | None = None
        self._mask = torch.empty(0)  # int64 [rows, places]
        self._positions = torch.empty(0)  # int64 [rows]: position of the next token
        self._width = 0

    @property
    def started(self) -> bool:
        """Whether the rows' past is in the cache."""
        return self._cache is not None

    def start(self, sequences: Sequence[Sequence[int]], new_tokens: int) -> torch.Tensor:
        """Compute the rows' tokens so far.

        Args:
            sequences: token ids of each row, none empty.
            new_tokens: most tokens that `extend` will add.

        Returns:
            float32 logits of each row's next token `[rows, vocabulary]`.
        """
        index: dict[tuple[int, ...], int] = {}
        row_of = [index.setdefault(tuple(sequence), len(index)) for sequence in sequences]
        unique = list(index)
        width = max(map(len, unique))
        cache = new_cache(self._model.config, width + new_tokens)
        shared = self._start_shared(cache, unique)
        ids, mask = self._padded([sequence[shared:] for sequence in unique])
        positions = (mask.cumsum(-1) - 1).clamp_(min=0) + shared
        mask = torch.cat([mask.new_ones(len(unique), shared), mask], dim=1)
        logits = self._forward(ids, mask, positions, cache)
        self._cache = cache
        self._width = mask.shape[1]
        self._mask = torch.cat([mask, mask.new_ones(len(unique), new_tokens)], dim=1)
        self._positions = torch.tensor([len(sequence) for sequence in unique], device=self._device)
        if len(unique) == len(sequences):
            return logits
        rows = torch.tensor(row_of, device=self._device)
        self.keep(rows)
        return logits[rows]

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token per row, int64 `[rows]`; returns the next logits, float32 `[rows, vocabulary]`."""
        self._width += 1
        mask = self._mask[:, : self._width]
        logits = self._forward(tokens[:, None], mask, self._positions[:, None], self._cache)
        self._positions += 1
        return logits

    def keep(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        assert self._cache is not None
        self._cache.batch_select_indices(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def drop(self) -> None:
        """Free the cache; the rows must be started again."""
        self._cache = None

    def _start_shared(self, cache: DynamicCache, unique: Sequence[tuple[int, ...]]) -> int:
        """Compute the beginning that all sequences have in common; returns its length."""
        # A padded place would shift a window or a state, which count places and not positions.
        if not all(type(layer) is GrowingLayer for layer in cache.layers) or not cache.layers:
            return 0
        # At least one token stays for the second pass, which gives the logits.
        shared = min(_common_length(unique), min(map(len, unique)) - 1)
        if len(unique) == 1 or shared < LEAST_SHARED_TOKENS:
            return 0
        ids = torch.tensor([unique[0][:shared]], device=self._device)
        positions = torch.arange(shared, device=self._device)[None]
        self._forward(ids, torch.ones_like(ids), positions, cache)
        cache.batch_repeat_interleave(len(unique))
        return shared

    def _padded(self, sequences: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, sequences))
        ids = torch.full((len(sequences), width), self._pad_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, width - len(sequence) :] = torch.tensor(sequence)
            mask[row, width - len(sequence) :] = 1
        return ids.to(self._device), mask.to(self._device)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache | None
    ) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()


def _common_length(sequences: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all sequences begin with; the least and the greatest differ first."""
    low, high = min(sequences), max(sequences)
    for index, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return index
    return min(len(low), len(high))
