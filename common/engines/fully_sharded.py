"""FSDP2: each rank holds a slice of every weight, of its gradient and of its optimizer state.

Weights are gathered layer by layer for a forward or backward pass, so all ranks make the same number of passes. The
gradient is summed, not averaged: the engine divides by global denominators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlmq.common.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shard_fully(model: nn.Module, group: ProcessGroup, *, low_precision: bool) -> None:
    """Shard a model in place over a group; each repeated layer is gathered by itself.

    Args:
        group: a group of `torch.distributed`'s own making (FSDP2 looks it up by name).
        low_precision: compute in bf16; weights, gradient sums and optimizer stay float32.

    Raises:
        UsageError: no repeated layers were found: the whole model would be gathered at once.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low_precision else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def _layers(model: nn.Module) -> Iterable[nn.Module]:
    """The longest list of modules of one kind: the decoder's layers."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(x) for x in m}) == 1]
    if not lists:
        raise UsageError(
            "strategy fsdp", got=f"{type(model).__name__} without a list of layers", expected="a transformer"
        )
    return max(lists, key=len)


def whole(tensor: Any) -> torch.Tensor:
    """A plain tensor; a sharded one is gathered, by all ranks at once."""
    found: torch.Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor
    return found


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor."""
    return tensor


def whole_by_name(
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None = None,
    keep: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather one after the other; names of one sharded tensor (tied weights) get one and the same whole one.

    Args:
        dtype: of the floating-point ones; None: their own.
        keep: makes what is yielded of a whole one.
    """
    named = list(tensors)
    names: dict[int, int] = {}
    for _, tensor in named:
        names[_memory(tensor)] = names.get(_memory(tensor), 0) + 1
    shared: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        memory = _memory(tensor)
        found = shared.get(memory)
        if found is None:
            found = whole(tensor.detach())
            found = found.to(dtype) if dtype is not None and found.is_floating_point() else found
            found = keep(found)
            if names[memory] > 1:
                shared[memory] = found
        yield name, found


def like(tensor: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor that every rank has, cut as `tensor` is; a copy."""
    full = full.to(tensor.device)
    if not _is_sharded(tensor):
        return full.clone()
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = tensor
    return distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def _memory(tensor: Any) -> int:
    local: torch.Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
    return local.data_ptr() or id(tensor)  # an empty part has no address
