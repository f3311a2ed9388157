"""One rank's part of a model as it tells the others of it, and the layout that all parts together are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from rlmq.common.errors import UsageError
from rlmq.common.layouts.layout import Box, Layout
from rlmq.common.layouts.views import Shards
from rlmq.common.weights import TensorSpec, WeightManifest

if TYPE_CHECKING:
    import torch

Corners = tuple[tuple[int, ...], tuple[int, ...]]


class PartNote(msgspec.Struct, frozen=True):
    """What a rank holds: of these tensors the boxes under their names; tied names are no tensors of their own."""

    tensors: tuple[TensorSpec, ...]
    boxes: Mapping[str, tuple[Corners, ...]]
    aliases: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class WeightPart:
    """What a rank holds, with its memory."""

    note: PartNote
    shards: Shards

    def copied(self) -> WeightPart:
        """The same with memory of its own."""
        return WeightPart(self.note, self.shards.copied())


def whole_part(manifest: WeightManifest) -> PartNote:
    """Everything."""
    return PartNote(
        manifest.tensors, {spec.name: (((0,) * len(spec.shape), spec.shape),) for spec in manifest.tensors}
    )


def part_of(layout: Layout, rank: int) -> PartNote:
    """What a layout says of a rank."""
    held = {name: tuple((box.start, box.stop) for box in by.get(rank, ())) for name, by in layout.held.items()}
    return PartNote(tuple(layout.tensors.values()), held, dict(layout.aliases))


def own_part(named: Iterable[tuple[str, Any]], *, dtype: torch.dtype | None = None) -> WeightPart:
    """The part of a rank whose weights are plain tensors, held whole, or DTensors.

    Args:
        named: names and tensors; one whose memory is that of an earlier one is tied to it.
        dtype: of floating-point ones as they are served; None: their own.
    """
    from rlmq.common.dtypes import spec_of
    from rlmq.common.layouts.build import dtensor_boxes

    owners: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    specs: list[TensorSpec] = []
    boxes: dict[str, tuple[Box, ...]] = {}
    tensors: dict[str, tuple[torch.Tensor, ...]] = {}
    for name, tensor in named:
        sharded = hasattr(tensor, "to_local")
        local = tensor.detach().to_local() if sharded else tensor.detach()
        memory = (local.data_ptr(), local.dtype, tuple(tensor.shape), local.stride())
        owner = owners.setdefault(memory, name) if local.numel() else name
        if owner != name:
            aliases[name] = owner
            continue
        if dtype is not None and local.is_floating_point():
            local = local.to(dtype)
        whole: Box = Box.whole(tuple(tensor.shape))
        at = tensor.device_mesh.get_coordinate() if sharded else None
        boxes[name] = (whole,) if at is None else dtensor_boxes(tensor, at)
        tensors[name] = (local,) if boxes[name] else ()
        specs.append(TensorSpec(name, tuple(tensor.shape), spec_of(name, local).dtype))
    layout = Layout({spec.name: spec for spec in specs}, {name: {0: held} for name, held in boxes.items()}, aliases)
    return WeightPart(part_of(layout, 0), Shards(layout, 0, tensors))


def together(parts: Sequence[PartNote], first: int) -> Layout:
    """The layout of ranks `first`, `first + 1`, … that hold these parts.

    Raises:
        UsageError: they are parts of different models.
    """
    tensors = {spec.name: spec for spec in parts[0].tensors}
    held: dict[str, dict[int, tuple[Box, ...]]] = {name: {} for name in tensors}
    for rank, part in enumerate(parts, start=first):
        if part.tensors != parts[0].tensors:
            raise UsageError("weights", got="ranks with different tensors", expected="parts of one model")
        for name, corners in part.boxes.items():
            if corners:
                held[name][rank] = tuple(Box(start, stop) for start, stop in corners)
    return Layout(tensors, held, parts[0].aliases)
