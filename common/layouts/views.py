"""Where an exchange reads from and writes to on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rlmq.common.errors import UsageError
from rlmq.common.layouts.layout import Box, Layout
from rlmq.common.layouts.plan import Plan

if TYPE_CHECKING:
    import torch


class Views(Protocol):
    """The tensors of one rank; a box is always inside one that the layout says the rank holds."""

    def held(self, name: str, box: Box) -> torch.Tensor:
        """What the rank holds in the source layout, to be sent."""

    def arrived(self, name: str, box: Box) -> torch.Tensor:
        """What came in this exchange, to be passed on."""

    def room(self, name: str, box: Box) -> torch.Tensor | None:
        """Where a box may come straight to, before it is checked; None: into a buffer."""

    def write(self, name: str, box: Box, content: torch.Tensor) -> None:
        """Take what came: that room, or memory that is used again."""


class Shards:
    """One rank's tensors, as a layout cuts them.

    Args:
        layout: what is where.
        rank: whose.
        tensors: for each name a tensor per box, in the layout's order.

    Raises:
        UsageError: other shapes than the layout's.
    """

    def __init__(self, layout: Layout, rank: int, tensors: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._parts: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        self._aliases = layout.aliases
        for name, by_rank in layout.held.items():
            boxes = by_rank.get(rank, ())
            own = tensors.get(name, ())
            shapes = [tuple(tensor.shape) for tensor in own]
            if shapes != [box.shape for box in boxes]:
                raise UsageError(
                    f"shards of {name} on rank {rank}",
                    got=f"shapes {shapes}",
                    expected=f"{[box.shape for box in boxes]} as in the layout",
                )
            self._parts[name] = list(zip(boxes, own, strict=True))

    def boxes(self, name: str) -> list[Box]:
        """What there is of a tensor."""
        return [box for box, _ in self._parts[name]]

    def copied(self) -> Shards:
        """The same with memory of its own, on the host."""
        copy = object.__new__(Shards)
        copy._aliases = self._aliases
        copy._parts = {
            name: [(box, tensor.detach().to("cpu", copy=True)) for box, tensor in parts]
            for name, parts in self._parts.items()
        }
        return copy

    def __getitem__(self, place: tuple[str, Box]) -> torch.Tensor:
        """A view of a box that one shard contains."""
        name, box = place
        for own, tensor in self._parts[name if name in self._parts else self._aliases[name]]:
            if own.intersection(box) == box:
                return sub_view(tensor, own, box)
        raise UsageError(f"box {box.start}..{box.stop} of {name}", got="no shard that contains it")


def sub_view(tensor: torch.Tensor, own: Box, box: Box) -> torch.Tensor:
    """The part of a tensor, which is box `own` of a larger one, that is `box` of that one."""
    places = zip(box.start, box.stop, own.start, strict=True)
    return tensor[tuple(slice(low - start, high - start) for low, high, start in places)]


def copy_values(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy between views of equal shape and type; on the host by numpy.

    There torch would open a pool of threads in each thread that copies.
    """
    import numpy as np
    import torch

    if into.data_ptr() == values.data_ptr():
        return
    if into.device.type != "cpu" or values.device.type != "cpu":
        into.copy_(values)
        return
    if into.dtype is torch.bfloat16:
        into, values = into.view(torch.int16), values.view(torch.int16)
    np.copyto(into.detach().numpy(), values.detach().numpy())


class ShardViews:
    """Views between two sets of shards, which may be the same memory."""

    def __init__(self, source: Shards | None, target: Shards | None) -> None:
        self._source = source
        self._target = target

    def held(self, name: str, box: Box) -> torch.Tensor:
        """See `Views`."""
        return _of(self._source, "source")[name, box]

    def arrived(self, name: str, box: Box) -> torch.Tensor:
        """See `Views`."""
        return _of(self._target, "target")[name, box]

    def room(self, name: str, box: Box) -> torch.Tensor | None:
        """See `Views`."""
        return _of(self._target, "target")[name, box]

    def write(self, name: str, box: Box, content: torch.Tensor) -> None:
        """See `Views`."""
        copy_values(_of(self._target, "target")[name, box], content)

    def keep(self, plan: Plan, rank: int) -> None:
        """Copy what the rank holds in both layouts, where that is not the same memory."""
        for name, box in plan.kept(rank):
            old, new = _of(self._source, "source")[name, box], _of(self._target, "target")[name, box]
            if old.data_ptr() != new.data_ptr():
                copy_values(new, old)


def _of(shards: Shards | None, which: str) -> Shards:
    if shards is None:
        raise UsageError(f"{which} shards of this rank", got="none", expected="those that its layout names")
    return shards


def empty_shards(layout: Layout, rank: int) -> Shards:
    """Fresh memory for what a rank holds."""
    import torch

    from rlmq.common.dtypes import DTYPES

    return Shards(
        layout,
        rank,
        {
            name: [
                torch.empty(box.shape, dtype=DTYPES[layout.tensors[name].dtype]) for box in by_rank.get(rank, ())
            ]
            for name, by_rank in layout.held.items()
        },
    )


def cut_shards(layout: Layout, rank: int, whole: Iterable[tuple[str, torch.Tensor]]) -> Shards:
    """What a rank holds of whole tensors, copied."""
    tensors = dict(whole)
    everything = Layout(layout.tensors, {n: {rank: (Box.whole(s.shape),)} for n, s in layout.tensors.items()})
    views = Shards(everything, rank, {name: [tensors[name]] for name in layout.tensors})
    return Shards(
        layout,
        rank,
        {name: [views[name, box].clone() for box in by.get(rank, ())] for name, by in layout.held.items()},
    )
