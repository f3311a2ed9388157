"""The model's forward pass over rows that come and go one by one, without padding.

::

    one pass      | last token of row 0 | of row 1 | … | tokens of a new row | of another |    [1, tokens]
    buffers       row 0: places 0 … 41          each layer `[rows, kv_heads, places, dim]`; place = position
                  row 1: places 0 … 7           rows lie side by side: the last one fills the gap of one that leaves

Everything but attention is computed for all tokens together, so that a new row's prompt costs its own tokens only.
A new row copies the beginning that it has in common with another row, instead of computing it: the samples of one
prompt, a system prompt, an earlier turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from rlmq.common.engines.attention import by_products
from rlmq.common.engines.kv_cache import GrowingLayer, new_cache

NAME = "rlmq_flat"
# A shorter beginning is computed again: copying it costs a call per layer.
LEAST_COPIED_TOKENS = 8
_BLOCK_TOKENS = 64
_PROBE_TOLERANCE = 1e-3  # of the greatest logit
_COARSE_PROBE_TOLERANCE = 0.1  # bfloat16 and float16


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that joins: its tokens, and how many it copies from which row (`copied` < the number of tokens)."""

    tokens: Sequence[int]
    source: int = 0
    copied: int = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    forward: FlatForward
    new: Sequence[NewRow]
    positions: torch.Tensor  # of the running rows' tokens
    index: torch.Tensor  # of the running rows
    mask: torch.Tensor  # float [running, 1, 1, places]: 0 or -inf


_plan: ContextVar[_Plan] = ContextVar("rlmq_flat_plan")


class FlatForward:
    """Keys and values of the rows that run, and the pass over them.

    Args:
        model: a causal language model in evaluation mode that `supports_flat`.
        max_rows: most rows at once.
    """

    def __init__(self, model: PreTrainedModel, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self._lengths: list[int] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def rows(self) -> int:
        """Rows that run."""
        return len(self._lengths)

    def step(self, last: Sequence[int], new: Sequence[NewRow]) -> torch.Tensor:
        """Give each running row one token, and start new rows behind them.

        Args:
            last: the token of each running row.
            new: rows that join; one may copy from a running row or from one that joins before it.

        Returns:
            float32 logits of each row's next token `[running + new, vocabulary]`.
        """
        device, running = self._model.device, len(last)
        ids, positions, wanted = list(last), list(self._lengths), list(range(running))
        for row in new:
            ids += row.tokens[row.copied :]
            positions += range(row.copied, len(row.tokens))
            wanted.append(len(ids) - 1)
        places = torch.tensor(positions, device=device)
        width = max(self._lengths, default=0) + 1
        beyond = torch.arange(width, device=device) > places[:running, None]
        mask = torch.zeros(beyond.shape, dtype=self._model.dtype, device=device).masked_fill_(beyond, -torch.inf)
        index = torch.arange(running, device=device)
        token = _plan.set(_Plan(self, new, places[:running], index, mask[:, None, None]))
        try:
            logits: torch.Tensor = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=places[None],
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, device=device),
            ).logits[0]
        finally:
            _plan.reset(token)
        self._lengths = [*(length + 1 for length in self._lengths), *(len(row.tokens) for row in new)]
        return logits.float()

    def remove(self, row: int) -> None:
        """Take a row out; the last one takes its place."""
        last, length = len(self._lengths) - 1, self._lengths[-1]
        if row < last:
            for keys, values in self._buffers:
                keys[row, :, :length] = keys[last, :, :length]
                values[row, :, :length] = values[last, :, :length]
            self._lengths[row] = length
        self._lengths.pop()

    def drop(self) -> None:
        """All rows leave, and their memory is free."""
        self._lengths, self._buffers = [], []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Store a layer's new keys and values `[kv_heads, tokens, dim]` and attend `query` `[heads, tokens, dim]`.

        Returns:
            `[tokens, heads, dim]`.
        """
        plan = _plan.get()
        keys, values = self._room(layer, key, value, plan)
        heads, tokens, dim = query.shape
        running, kv_heads = len(plan.index), key.shape[0]
        out = query.new_empty(tokens, heads, value.shape[-1])
        if running:
            keys[plan.index, :, plan.positions] = key[:, :running].transpose(0, 1)
            values[plan.index, :, plan.positions] = value[:, :running].transpose(0, 1)
            folded = query[:, :running].transpose(0, 1).reshape(running, kv_heads, heads // kv_heads, dim)
            width = plan.mask.shape[-1]
            found = by_products(folded, keys[:running, :, :width], values[:running, :, :width], plan.mask, scaling)
            out[:running] = found.reshape(running, heads, -1)
        first = running
        for place, row in enumerate(plan.new, start=running):
            end = first + len(row.tokens) - row.copied
            for buffer, fresh in ((keys, key), (values, value)):
                if row.copied:
                    buffer[place, :, : row.copied] = buffer[row.source, :, : row.copied]
                buffer[place, :, row.copied : len(row.tokens)] = fresh[:, first:end]
            past = keys[place, :, : len(row.tokens)], values[place, :, : len(row.tokens)]
            out[first:end] = _causal(query[:, first:end], *past, row.copied, scaling).transpose(0, 1)
            first = end
        return out

    def _room(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, plan: _Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's buffers, grown to what this pass needs."""
        rows = len(plan.index) + len(plan.new)
        places = max([plan.mask.shape[-1], *(len(row.tokens) for row in plan.new)])
        while len(self._buffers) <= layer:
            self._buffers.append((key.new_empty(0), value.new_empty(0)))
        keys, values = self._buffers[layer]
        have_rows, have_places = (keys.shape[0], keys.shape[2]) if keys.dim() == 4 else (0, 0)
        if rows > have_rows or places > have_places:
            rows = min(max(rows, 2 * have_rows), max(rows, self._max_rows)) if rows > have_rows else have_rows
            places = _whole_blocks(max(places, have_places * 5 // 4)) if places > have_places else have_places
            keys, values = (_grown(old, like, rows, places) for old, like in ((keys, key), (values, value)))
            self._buffers[layer] = (keys, values)
        return keys, values


def flat_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over one flat row of tokens; what belongs together is in the plan."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return _plan.get().forward.attend(layer, query[0], key[0], value[0], scale)[None], None


def use_flat(model: PreTrainedModel) -> bool:
    """Switch a model to flat attention if it computes the same with it; whether it does.

    Windows, soft caps and states are other arithmetic: such models keep what they have. So does one whose code
    goes past the attention interface, which a pass over two short rows shows.
    """
    layers = new_cache(model.config, 1).layers
    text = model.config.get_text_config()
    plain = layers and all(type(layer) is GrowingLayer for layer in layers)
    if not plain or getattr(text, "attn_logit_softcapping", None) or model.config._attn_implementation == "eager":
        return False
    before = model.config._attn_implementation
    ids = [index % text.vocab_size for index in range(1, 8)]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float()
        # No mask function has this name: transformers then makes no mask at all.
        AttentionInterface.register(NAME, flat_attention)
        model.set_attn_implementation(NAME)
        forward = FlatForward(model, 2)
        try:
            forward.step([], [NewRow(ids[:3]), NewRow(ids[:6], copied=2)])
            found = forward.step([ids[3], ids[6]], [])
            tolerance = _PROBE_TOLERANCE if model.dtype is torch.float32 else _COARSE_PROBE_TOLERANCE
            same = torch.allclose(found, expected[[3, 6]], rtol=0, atol=tolerance * float(expected.abs().max()))
        except (AttributeError, TypeError, LookupError, RuntimeError, ValueError):  # code of another shape
            same = False
    if not same:
        model.set_attn_implementation(before)
    return same


def common_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, past: int, scaling: float) -> torch.Tensor:
    """Attention of `[heads, new, dim]` to `[kv_heads, past + new, dim]`."""
    mask = None
    if past:
        new = query.shape[1]
        mask = torch.ones(new, past + new, dtype=torch.bool, device=query.device).tril(past)
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scaling,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0]  # fmt: skip


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK_TOKENS) * _BLOCK_TOKENS


def _grown(old: torch.Tensor, like: torch.Tensor, rows: int, places: int) -> torch.Tensor:
    # Zeros: places beyond a row's end weigh nothing, and nothing times what memory happens to hold may be NaN.
    grown = like.new_zeros(rows, like.shape[0], places, like.shape[-1])
    if old.dim() == 4:
        grown[: old.shape[0], :, : old.shape[2]] = old
    return grown
