"""Tensor parallelism on plain tensors: sums over ranks that autograd knows, and a vocabulary cut over ranks.

`spread` and `summed` are the two conjugate operators of Megatron-LM (arXiv 1909.08053, section 3): before a
column-parallel layer, and after a row-parallel one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional

from rlmq.common.errors import RestartRequired

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_reduce(tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Sum in place over a group; None is a group of one.

    Raises:
        RestartRequired: another rank died or did not answer in time.
    """
    if group is not None:
        try:
            group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise lost(error) from error
    return tensor


def all_gather(
    tensor: torch.Tensor, group: ProcessGroup | None, *, timeout_s: float | None = None
) -> list[torch.Tensor]:
    """Every rank's tensor, all of one shape; `timeout_s` where it is not the group's.

    Raises:
        RestartRequired: as `all_reduce`.
    """
    if group is None:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    try:
        work = group.allgather([parts], [tensor])
        work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise lost(error) from error
    return parts


def broadcast(tensor: torch.Tensor, group: ProcessGroup | None, source: int) -> torch.Tensor:
    """Fill every rank's tensor with that of rank `source` of the group.

    Raises:
        RestartRequired: as `all_reduce`.
    """
    if group is not None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        try:
            group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise lost(error) from error
    return tensor


def lost(error: RuntimeError) -> RestartRequired:
    """What a failed collective means: a mesh shares its fate."""
    return RestartRequired(
        "trainer mesh", got=str(error).splitlines()[0], expected="every rank of it", remedy="The role restarts"
    )


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return all_reduce(values.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def spread(values: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """The same values, used by every rank's part of a layer: their gradient is summed over ranks."""
    return values if group is None else _Spread.apply(values, group)  # type: ignore[no-untyped-call]


def summed(values: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """The sum of every rank's values; their gradient is that of the sum."""
    return values if group is None else _Summed.apply(values, group)  # type: ignore[no-untyped-call]


def embed(ids: torch.Tensor, rows: torch.Tensor, own: range, group: ProcessGroup | None) -> torch.Tensor:
    """Rows of an embedding of which this rank has those of the token ids `own`."""
    if group is None:
        return functional.embedding(ids, rows)
    outside = (ids < own.start) | (ids >= own.stop)
    found = functional.embedding((ids - own.start).masked_fill(outside, 0), rows)
    return summed(found.masked_fill(outside[..., None], 0), group)


def whole_logits(logits: torch.Tensor, widths: list[int], group: ProcessGroup | None) -> torch.Tensor:
    """Logits `[rows, vocabulary]` of all ranks side by side, on every rank; `widths` are those of the ranks."""
    if group is None:
        return logits
    padded = functional.pad(logits, (0, max(widths) - logits.shape[1])).contiguous()
    parts = all_gather(padded, group)
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
