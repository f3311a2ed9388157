"""Layouts by rule: cut over a mesh, cut in flattened form, or read off a model of DTensors.

How a tensor is cut over tp is a `Cut`: for each tp index the intervals along one dimension. Intervals of different
ranks may overlap (KV heads that do not divide are held twice) and be uneven; a fused tensor has several a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from rlmq.common.errors import UsageError
from rlmq.common.layouts.layout import Box, Layout, MeshShape
from rlmq.common.layouts.views import Shards
from rlmq.common.weights import TensorSpec

if TYPE_CHECKING:
    import torch

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """Along dimension `dim`, the intervals that each tp index holds, in order."""

    dim: int
    parts: tuple[tuple[Interval, ...], ...]

    def boxes(self, shape: tuple[int, ...], index: int) -> tuple[Box, ...]:
        """What a tp index holds of a tensor of this shape."""
        dim = self.dim
        whole = Box.whole(shape)
        return tuple(
            Box((*whole.start[:dim], low, *whole.start[dim + 1 :]), (*shape[:dim], high, *shape[dim + 1 :]))
            for low, high in self.parts[index]
            if low < high
        )


def even(dim: int, size: int, parts: int, *, unit: int = 1, of: str = "a dimension") -> Cut:
    """Whole units of `unit` places to each part, the first ones with one more where they do not divide.

    Raises:
        UsageError: fewer units than parts (attention heads than tp), or `size` is no multiple of `unit`.
    """
    units, rest = divmod(size, unit)
    if rest or units < parts:
        raise UsageError(
            f"{of} of size {size} over {parts} ranks",
            got=f"{units} units of {unit}" + (f", {rest} left" if rest else ""),
            expected=f"whole units, at least {parts}",
            remedy="Lower tp",
        )
    return Cut(dim, tuple(((low * unit, high * unit),) for low, high in intervals(units, parts)))


def intervals(size: int, parts: int) -> list[Interval]:
    """`size` things in order over `parts`, as evenly as can be, the first ones with one more."""
    each, more = divmod(size, parts)
    starts = [index * each + min(index, more) for index in range(parts + 1)]
    return list(pairwise(starts))


def fused(cuts: Sequence[Cut], sizes: Sequence[int]) -> Cut:
    """Tensors of these sizes joined along the cut dimension (qkv, gate_up): a rank holds its part of each."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = [
        tuple(
            (start + low, start + high)
            for start, cut in zip(starts, cuts, strict=True)
            for low, high in cut.parts[index]
        )
        for index in range(len(cuts[0].parts))
    ]
    return Cut(cuts[0].dim, tuple(parts))


def stages(layers: int, pp: int) -> list[Interval]:
    """Layers of each pipeline stage.

    Raises:
        UsageError: more stages than layers.
    """
    if layers < pp:
        raise UsageError("pipeline stages", got=f"pp {pp} for {layers} layers", expected="at least a layer a stage")
    return intervals(layers, pp)


def sharded(
    tensors: Iterable[TensorSpec],
    mesh: MeshShape,
    cuts: Mapping[str, Cut],
    on: Mapping[str, Collection[int]] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Layout:
    """A model over a mesh.

    Args:
        tensors: the whole tensors, tied ones once.
        mesh: its size, and by its module's order the place of each rank.
        cuts: how each tensor is cut over tp; one that is not named is whole on every tp index.
        on: the pipeline stages that hold a tensor; one that is not named is held by all of them.
        ranks: the rank at each place, where they are not 0, 1, 2, …
        aliases: tied names, each with the tensor that it is.

    Raises:
        UsageError: a rank is named twice, there are not as many as places, or a cut has another number of parts.
    """
    at = distinct(range(mesh.size) if ranks is None else ranks, mesh.size)
    held: dict[str, dict[int, tuple[Box, ...]]] = {}
    named = {spec.name: spec for spec in tensors}
    for name, spec in named.items():
        cut = cuts.get(name)
        if cut is not None and len(cut.parts) != mesh.tp:
            raise UsageError(f"cut of {name}", got=f"{len(cut.parts)} parts", expected=f"tp {mesh.tp}")
        parts = [(Box.whole(spec.shape),) if cut is None else cut.boxes(spec.shape, i) for i in range(mesh.tp)]
        where = range(mesh.pp) if on is None or name not in on else on[name]
        held[name] = {
            at[mesh.rank(stage, index, replica)]: parts[index]
            for replica in range(mesh.dp)
            for stage in where
            for index in range(mesh.tp)
        }
    return Layout(named, held, aliases or {})


def distinct(ranks: Sequence[int], expected: int) -> tuple[int, ...]:
    """The ranks, each named once.

    Raises:
        UsageError: one is named twice, or there are not as many as expected.
    """
    twice = sorted({rank for rank in ranks if list(ranks).count(rank) > 1}) if len(set(ranks)) < len(ranks) else []
    if twice or len(ranks) != expected:
        got = f"rank {twice[0]} twice" if twice else f"{len(ranks)} ranks"
        raise UsageError("ranks of a layout", got=got, expected=f"{expected} distinct ranks")
    return tuple(ranks)


def replicated(
    tensors: Iterable[TensorSpec], ranks: Sequence[int], *, aliases: Mapping[str, str] | None = None
) -> Layout:
    """Every rank holds everything."""
    return sharded(tensors, MeshShape(dp=len(ranks)), {}, ranks=ranks, aliases=aliases)


def flat_sharded(
    tensors: Iterable[TensorSpec],
    ranks: Sequence[int],
    *,
    rule: Literal["rows", "elements"],
    aliases: Mapping[str, str] | None = None,
) -> Layout:
    """Every tensor cut over all ranks in chunks of equal size, the last ones shorter or empty.

    `rows` cuts the first dimension, as FSDP2 (`torch.distributed.fsdp.fully_shard`) does; `elements` the flattened
    tensor, as DeepSpeed's ZeRO-3 does.
    """
    at = distinct(ranks, len(ranks))
    named = {spec.name: spec for spec in tensors}
    held: dict[str, dict[int, tuple[Box, ...]]] = {}
    for name, spec in named.items():
        count = prod(spec.shape)
        row = prod(spec.shape[1:]) if rule == "rows" else 1
        chunk = -(-(count // row if row else 0) // len(at)) * row
        parts = {
            rank: flat_boxes(spec.shape, min(i * chunk, count), min((i + 1) * chunk, count))
            for i, rank in enumerate(at)
        }
        held[name] = {rank: boxes for rank, boxes in parts.items() if boxes}
    return Layout(named, held, aliases or {})


def flat_views(layout: Layout, rank: int, flat: Mapping[str, torch.Tensor]) -> Shards:
    """The boxes of a rank as views into its flat partitions, padded or not.

    DeepSpeed's ZeRO-3 has them as `{name: p.ds_tensor for name, p in model.named_parameters()}`: of each flattened
    parameter a stretch of `ceil(elements / ranks)`, the last ones padded. The layout is that of `flat_sharded` with
    rule `elements`.

    Raises:
        UsageError: a partition that is shorter than what the layout says the rank holds.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for name, by_rank in layout.held.items():
        boxes = by_rank.get(rank, ())
        lengths = [box.count for box in boxes]
        if boxes and flat[name].numel() < sum(lengths):
            raise UsageError(
                f"partition of {name} on rank {rank}",
                got=f"{flat[name].numel()} elements",
                expected=f"at least {sum(lengths)}",
            )
        parts = flat[name].reshape(-1)[: sum(lengths)].split(lengths) if boxes else ()
        found[name] = [part.view(box.shape) for part, box in zip(parts, boxes, strict=True)]
    return Shards(layout, rank, found)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes that elements `start` to `stop` of the flattened tensor are; at most 2 per dimension less 1."""
    if start >= stop:
        return ()
    if not shape:
        return (Box((), ()),)
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if start == first * row and stop == (last + 1) * row:
        return (Box((first, *(0,) * len(shape[1:])), (last + 1, *shape[1:])),)
    if first == last:
        inner = flat_boxes(shape[1:], start - first * row, stop - first * row)
        return tuple(Box((first, *box.start), (first + 1, *box.stop)) for box in inner)
    edge = (first + 1) * row if start > first * row else start
    end = last * row if stop < (last + 1) * row else stop
    return (
        *flat_boxes(shape, start, edge),
        *flat_boxes(shape, edge, end),
        *flat_boxes(shape, end, stop),
    )


def of_dtensors(
    tensors: Iterable[tuple[str, torch.Tensor]], ranks: Sequence[int], *, aliases: Mapping[str, str] | None = None
) -> Layout:
    """The layout of a model whose parameters are DTensors (FSDP2, HSDP, TP by `parallelize_module`, and both).

    A plain tensor is held whole by all `ranks`. Every rank of the mesh gets the same layout.

    Raises:
        UsageError: a placement that holds no plain part (`Partial`).
    """
    from torch.distributed.tensor import DTensor

    from rlmq.common.dtypes import spec_of

    named: dict[str, TensorSpec] = {}
    held: dict[str, dict[int, tuple[Box, ...]]] = {}
    for name, tensor in tensors:
        named[name] = spec_of(name, tensor)
        if not isinstance(tensor, DTensor):
            held[name] = dict.fromkeys(ranks, (Box.whole(tuple(tensor.shape)),))
            continue
        places = tensor.device_mesh.mesh
        held[name] = {}
        for at in places.new_ones(places.shape).nonzero().tolist():
            if any(placement.is_partial() for placement in tensor.placements):
                raise UsageError(f"tensor {name}", got=f"{tensor.placements}", expected="shards or replicas")
            boxes = dtensor_boxes(tensor, at)
            if boxes:
                held[name][int(places[tuple(at)])] = boxes
    return Layout(named, held, aliases or {})


def dtensor_boxes(tensor: Any, at: Sequence[int]) -> tuple[Box, ...]:
    """The box at a place of the mesh."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as local

    shape, offset = local(tensor.shape, tensor.device_mesh.shape, list(at), tensor.placements)
    box = Box(tuple(offset), tuple(o + s for o, s in zip(offset, shape, strict=True)))
    return (box,) if box.count else ()
