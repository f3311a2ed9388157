"""Gradients of sharded weights: made whole over the ranks that share them, and their norm on any mesh."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rlmq.common.engines.decoder_shape import EMBEDDING, CutTensor, DecoderShape, Place
from rlmq.common.engines.mesh_groups import MeshGroups
from rlmq.common.engines.tensor_parallel import all_reduce
from rlmq.common.engines.torch_trainer import sum_over_ranks


class ShardGradients:
    """The gradients of one rank's weights.

    Args:
        weights: by name, as they lie: the cut dimension first.
    """

    def __init__(self, shape: DecoderShape, groups: MeshGroups, weights: Mapping[str, nn.Parameter]) -> None:
        self._shape, self._groups = shape, groups
        self._weights = dict(weights)
        place = groups.place
        tensors = {tensor.name: tensor for tensor in shape.tensors() if tensor.name in weights}
        keys_shared = any(
            set(shape.kv_heads_at(place.of_rank(i))) & set(shape.kv_heads_at(place.of_rank(i + 1)))
            for i in range(place.tps - 1)
        )
        self._partial = [t for t in tensors.values() if t.partial or (t.along == "keys" and keys_shared)]
        self._counted = {name: self._counted_rows(tensor, place) for name, tensor in tensors.items()}

    def _counted_rows(self, tensor: CutTensor, place: Place) -> slice:
        """The stored rows whose norm this rank counts: those that no lower tensor rank or stage holds."""
        nothing = slice(0, 0)
        if tensor.name == EMBEDDING and place.pp > 0:
            return nothing
        if tensor.along == "whole":
            return slice(None) if place.tp == 0 else nothing
        own = self._shape.box(tensor, place)
        before = self._shape.box(tensor, place.of_rank(place.tp - 1)) if place.tp else None
        assert own is not None
        first = 0 if before is None else max(0, before.stop[tensor.dim] - own.start[tensor.dim])
        return slice(first, None)

    def sum_over_ranks(self) -> None:
        """After this, equal weights have equal gradients on every rank: those of the sum over all rows.

        Raises:
            RestartRequired: another rank died or did not answer in time.
        """
        with torch.no_grad():
            if self._groups.tp is not None and self._partial:
                self._sum_partial()
            if self._groups.ends is not None and self._shape.tied:
                all_reduce(self._gradient(EMBEDDING), self._groups.ends)
            if self._groups.dp is not None:
                sum_over_ranks([self._gradient(name) for name in self._weights], self._groups.dp)

    def norm(self) -> float:
        """Norm of the whole model's gradient, each element counted once; the same number on every rank.

        Raises:
            RestartRequired: as `sum_over_ranks`.
        """
        parts = [self._gradient(name)[rows] for name, rows in self._counted.items()]
        squares = [norm.double().square() for norm in torch._foreach_norm([p for p in parts if p.numel()])]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        return float(all_reduce(total.reshape(1), self._groups.replica).sqrt())

    def _sum_partial(self) -> None:
        """Each rank puts its part at its place in the whole tensor; one sum for all tensors."""
        wholes = []
        for tensor in self._partial:
            gradient = self._gradient(tensor.name)
            whole = gradient.new_zeros(tensor.shape[tensor.dim], *gradient.shape[1:])
            whole[self._own_rows(tensor)] = gradient
            wholes.append(whole)
        assert self._groups.tp is not None
        sum_over_ranks(wholes, self._groups.tp)
        for tensor, whole in zip(self._partial, wholes, strict=True):
            self._gradient(tensor.name).copy_(whole[self._own_rows(tensor)])

    def _own_rows(self, tensor: CutTensor) -> slice:
        box = self._shape.box(tensor, self._groups.place)
        assert box is not None
        return slice(box.start[tensor.dim], box.stop[tensor.dim])

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self._weights[name].grad
        assert gradient is not None
        return gradient
