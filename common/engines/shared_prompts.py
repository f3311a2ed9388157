"""Where a micro-batch's tokens lie when they go through the model: rows as they are, or prompts shared.

The samples of a group have one prompt. Computing it once instead of once per sample leaves logits and gradient
what they are, and with short responses it is most of the work. A packed row is one prompt and its responses::

    place      0 … P-1            P …             …               …
    holds      prompt             response 0      response 1      padding
    sees       prompt so far      prompt, itself  prompt, itself  itself

Positions go on from the prompt in every response, so that the model cannot tell that they lie side by side. A
response's last token predicts nothing that is wanted and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlmq.common.engines.training import MicroBatch

# Models whose attention is full, causal, and takes a mask per query and key.
_FULL_ATTENTION = frozenset({"llama", "qwen2", "qwen3", "mistral", "smollm3"})
# A packed mask has a value per pair of places; beyond 256 MiB of it sharing is not tried.
_MOST_MASK_VALUES = 64 << 20


@dataclass(frozen=True, slots=True)
class Places:
    """Input of one forward pass, and which of its outputs predict which response token.

    Shapes: `input_ids, position_ids` [packed, L]; `attention_mask` [packed, L], or [packed, 1, L, L] (0 where a
    query sees a key, else the least value of the type); `keep` [K] the places whose logits are needed, the same
    in all rows; `source` [tokens] the index within those packed · K outputs that predicts each real response
    token, in row-major order of the micro-batch.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    keep: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharingCost:
    """What decides whether sharing pays.

    Attributes:
        attention: cost of one more key in attention, relative to a place's cost in all weight matrices.
        mask_dtype: type of the model's queries, which a packed mask must have.
    """

    attention: float
    mask_dtype: torch.dtype

    def of(self, rows: int, length: int) -> float:
        """Cost of a forward pass over [rows, length], in places."""
        return rows * length * (1.0 + self.attention * length)


def sharing_cost(model: nn.Module, dtype: torch.dtype | None = None) -> SharingCost | None:
    """None if the model's attention is not of a kind for which packed rows are known to be right.

    Args:
        dtype: of computing, where it is not that of the weights.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", "") not in _FULL_ATTENTION:
        return None
    layers = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    implementation = getattr(config, "_attn_implementation", "")
    if window is not None or not set(layers) <= {"full_attention"} or implementation not in ("sdpa", "eager"):
        return None
    # Vectors (norms, biases) are no matrices; the embedding's and the head's share of the work does not change.
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    # Per place a matrix costs one multiplication per value; a key costs hidden_size each for score and value.
    attention = 2 * config.hidden_size * config.num_hidden_layers / sum(p.numel() for p in matrices)
    return SharingCost(attention, dtype or matrices[0].dtype)


def places_of(batch: MicroBatch, cost: SharingCost | None) -> Places:
    """The cheaper of both ways; rows as they are if `cost` is None."""
    prompt = batch.input_ids.shape[1] - batch.response_length
    lengths = batch.attention_mask[:, prompt:].sum(dim=1).cpu().numpy()
    if cost is not None:
        members = _rows_by_prompt(batch, prompt)
        length = prompt + max(sum(max(0, int(lengths[row]) - 1) for row in rows) for rows in members)
        plain = cost.of(batch.input_ids.shape[0], batch.input_ids.shape[1] - 1)
        if cost.of(len(members), length) < plain and len(members) * length**2 <= _MOST_MASK_VALUES:
            return _packed(batch, members, lengths, prompt, length, cost.mask_dtype)
    return _plain(batch, prompt)


def _plain(batch: MicroBatch, prompt: int) -> Places:
    device = batch.input_ids.device
    keep = torch.arange(prompt - 1, prompt - 1 + batch.response_length, device=device)
    real = batch.attention_mask[:, prompt:].flatten()
    return Places(
        input_ids=batch.input_ids[:, :-1],
        attention_mask=batch.attention_mask[:, :-1],
        position_ids=batch.position_ids[:, :-1],
        keep=keep,
        source=real.nonzero()[:, 0],
    )


def _rows_by_prompt(batch: MicroBatch, prompt: int) -> list[list[int]]:
    """Row numbers of each distinct prompt, in order of their first rows."""
    # Padded places differ from real ones even where the pad id is a real token of another prompt.
    keys = torch.where(batch.attention_mask[:, :prompt].bool(), batch.input_ids[:, :prompt], -1).cpu().numpy()
    members: dict[bytes, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key.tobytes(), []).append(row)
    return list(members.values())


def _packed(
    batch: MicroBatch,
    members: list[list[int]],
    lengths: NDArray[np.int64],
    prompt: int,
    length: int,
    mask_dtype: torch.dtype,
) -> Places:
    ids, positions = batch.input_ids.cpu().numpy(), batch.position_ids.cpu().numpy()
    first = [rows[0] for rows in members]
    kept = length - prompt + 1
    # A place's holder: -1 the prompt, -2 nothing, else the number of its response.
    holder = np.full((len(members), length), -2, dtype=np.int64)
    holder[:, :prompt] = np.where(batch.attention_mask[first, :prompt].cpu().numpy() > 0, -1, -2)
    packed_ids, packed_positions = np.zeros_like(holder), np.zeros_like(holder)
    packed_ids[:, :prompt], packed_positions[:, :prompt] = ids[first, :prompt], positions[first, :prompt]
    sources: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(lengths)
    for packed, rows in enumerate(members):
        start = prompt
        for row in rows:
            fed = max(0, int(lengths[row]) - 1)
            packed_ids[packed, start : start + fed] = ids[row, prompt : prompt + fed]
            packed_positions[packed, start : start + fed] = positions[row, prompt : prompt + fed]
            holder[packed, start : start + fed] = row
            # The prompt's last place predicts the first token, the place before it every other one.
            before = np.concatenate([[prompt - 1], np.arange(start, start + fed)])[: lengths[row]]
            sources[row] = packed * kept + before - (prompt - 1)
            start += fed
    device = batch.input_ids.device
    return Places(
        input_ids=torch.from_numpy(packed_ids).to(device),
        attention_mask=_mask(torch.from_numpy(holder).to(device), mask_dtype),
        position_ids=torch.from_numpy(packed_positions).to(device),
        keep=torch.arange(prompt - 1, length, device=device),
        source=torch.from_numpy(np.concatenate(sources)).to(device),
    )


def _mask(holder: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [packed, 1, L, L]: earlier places of the prompt and of the own response are seen."""
    place = torch.arange(holder.shape[1], device=holder.device)
    key, query = holder[:, None, :], holder[:, :, None]
    visible = (place[:, None] >= place) & ((key == -1) | ((key == query) & (key >= 0)))
    # A padded query sees itself: a softmax over nothing would be NaN.
    visible |= torch.eye(holder.shape[1], dtype=torch.bool, device=holder.device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=holder.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
