"""Micro-batches: which rows go through the model together, and the rectangles that they become.

Everything here is a pure function of the rows' order and lengths, so that a step can be redone from its
batch-log entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlmq.common.errors import UsageError

if TYPE_CHECKING:
    import torch

    from rlmq.common.engines.training import MicroBatch

Plan = tuple[tuple[tuple[int, ...], ...], ...]
_Number = TypeVar("_Number", np.int64, np.float32, np.bool_)


def plan_micro_batches(
    lengths: Sequence[tuple[int, int]],
    budget_tokens: int,
    world_size: int,
    units: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """Distribute rows over ranks and cut each rank's rows into micro-batches.

    Args:
        lengths: (prompt, response) tokens per row, in training order.
        budget_tokens: most tokens of one micro-batch, padding included; a longer unit goes alone.
        world_size: data-parallel ranks.
        units: rows that stay together in one micro-batch; none: each row is one.

    Returns:
        `plan[rank][i]`: row indices, ascending. Each row of a unit appears once. Ranks may have different numbers
        of micro-batches, or none: nothing collective happens before the optimizer step.

    Example:
        >>> plan_micro_batches([(4, 4), (4, 4), (4, 2)], budget_tokens=16, world_size=2)
        (((0,),), ((1, 2),))
    """
    if world_size < 1 or budget_tokens < 1:
        raise UsageError(
            "micro-batch plan",
            got=f"world_size={world_size}, budget_tokens={budget_tokens}",
            expected="both at least 1",
        )
    together = [(row,) for row in range(len(lengths))] if units is None else [tuple(unit) for unit in units]
    sizes = [_size(unit, lengths) for unit in together]
    shares = _balanced_shares(sizes, world_size)
    return tuple(tuple(_cut(share, together, sizes, budget_tokens)) for share in shares)


def padded_tokens(lengths: Sequence[tuple[int, int]], rows: Sequence[int]) -> int:
    """Places of the rectangle that these rows fill: rows · (longest prompt + longest response)."""
    if not rows:
        return 0
    return len(rows) * (max(lengths[i][0] for i in rows) + max(lengths[i][1] for i in rows))


class _Size(NamedTuple):
    """Of a unit: its longest prompt and response, and the tokens of all its rows."""

    prompt: int
    response: int
    tokens: int


def _size(unit: Sequence[int], lengths: Sequence[tuple[int, int]]) -> _Size:
    prompts, responses = zip(*(lengths[row] for row in unit), strict=True)
    return _Size(max(prompts), max(responses), sum(prompts) + sum(responses))


def _balanced_shares(sizes: Sequence[_Size], world_size: int) -> list[list[int]]:
    """Longest unit first, each to the rank with the fewest tokens so far (Graham's LPT rule)."""
    loads = [0] * world_size
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for unit in sorted(range(len(sizes)), key=lambda i: (-sizes[i].tokens, i)):
        rank = min(range(world_size), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(unit)
        loads[rank] += sizes[unit].tokens
    return shares


def _cut(
    share: Sequence[int], units: Sequence[tuple[int, ...]], sizes: Sequence[_Size], budget_tokens: int
) -> list[tuple[int, ...]]:
    """Neighbours in length share a rectangle; rows in the same one return to their training order."""
    cuts: list[list[int]] = []
    longest_prompt = longest_response = 0
    for unit in sorted(share, key=lambda i: (-sizes[i].tokens, -sizes[i].prompt, i)):
        prompt, response = max(longest_prompt, sizes[unit].prompt), max(longest_response, sizes[unit].response)
        if cuts and (len(cuts[-1]) + len(units[unit])) * (prompt + response) <= budget_tokens:
            cuts[-1] += units[unit]
            longest_prompt, longest_response = prompt, response
        else:
            cuts.append(list(units[unit]))
            longest_prompt, longest_response, _ = sizes[unit]
    return [tuple(sorted(cut)) for cut in cuts]


def build_micro_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    loss_masks: Sequence[Sequence[bool]] | None = None,
    columns: Mapping[str, Sequence[Sequence[float]]] | None = None,
    *,
    pad_id: int = 0,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pad ragged rows into the rectangles of a `MicroBatch`: prompts to the left, responses to the right.

    Args:
        prompts, responses: token ids per row; a response may be empty, a prompt may not.
        loss_masks: per response token, whether it counts in the loss; None counts all.
        columns: per response token, named float columns; a row may be empty only if its response is.
        pad_id: id in padded places; masked everywhere, so it may equal the EOS id.

    Raises:
        UsageError: an empty prompt, or a mask or column whose row is not as long as the response.
    """
    import torch

    from rlmq.common.engines.training import MicroBatch

    if any(len(p) == 0 for p in prompts):
        raise UsageError("prompt_ids", got="a prompt without tokens", expected="at least one token in each")
    lengths = [len(r) for r in responses]
    masks = [[True] * n for n in lengths] if loss_masks is None else loss_masks
    for name, ragged in [("loss_mask", masks), *(columns or {}).items()]:
        _require_lengths(name, ragged, lengths)
    width = max(lengths, default=0)
    ids = np.concatenate(
        [_left(prompts, np.dtype(np.int64), pad_id), _right(responses, width, np.dtype(np.int64), pad_id)], axis=1
    )
    attended = np.concatenate(
        [
            _left([[1] * len(p) for p in prompts], np.dtype(np.int64)),
            _right([[1] * n for n in lengths], width, np.dtype(np.int64)),
        ],
        axis=1,
    )
    positions = np.maximum(attended.cumsum(axis=1) - 1, 0)
    return MicroBatch(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=torch.from_numpy(attended).to(device),
        position_ids=torch.from_numpy(positions).to(device),
        response_mask=torch.from_numpy(_right(masks, width, np.dtype(np.float32))).to(device),
        columns={
            name: torch.from_numpy(_right(ragged, width, np.dtype(np.float32))).to(device)
            for name, ragged in (columns or {}).items()
        },
    )


def _require_lengths(name: str, ragged: Sequence[Sequence[object]], lengths: Sequence[int]) -> None:
    found = [len(row) for row in ragged]
    if found != list(lengths):
        raise UsageError(name, got=f"rows of {found} values", expected=f"one per response token: {list(lengths)}")


def _left(ragged: Sequence[Sequence[float]], dtype: np.dtype[_Number], fill: float = 0) -> NDArray[_Number]:
    width = max((len(row) for row in ragged), default=0)
    out = np.full((len(ragged), width), fill, dtype=dtype)
    for i, row in enumerate(ragged):
        out[i, width - len(row) :] = row
    return out


def _right(
    ragged: Sequence[Sequence[float]], width: int, dtype: np.dtype[_Number], fill: float = 0
) -> NDArray[_Number]:
    out = np.full((len(ragged), width), fill, dtype=dtype)
    for i, row in enumerate(ragged):
        out[i, : len(row)] = row
    return out
