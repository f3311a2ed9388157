"""What comes for one rank, put together tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlmq.common.errors import UsageError
from rlmq.common.layouts.layout import Box, Layout
from rlmq.common.layouts.views import copy_values, sub_view

if TYPE_CHECKING:
    import torch

Sink = Callable[[str, Box, "torch.Tensor"], None]
Find = Callable[[str], "torch.Tensor | None"]


class Intake:
    """`Views` of a rank that only receives; each box goes to the sink as soon as all of it is there.

    A box that comes in one piece is handed over where it lies, others are put together in `room`, or in memory of
    their own until they are complete.

    Args:
        layout: what the rank wants.
        rank: which it is in there.
        twins: names that are equal to a tensor, by its name; handed over right after it.
        sink: gets name, box and content; the memory is used again afterwards.
        room: memory that a whole tensor may be written into before the sink gets it.
    """

    def __init__(
        self, layout: Layout, rank: int, twins: Mapping[str, Sequence[str]], sink: Sink, room: Find | None
    ) -> None:
        self._boxes = {name: by.get(rank, ()) for name, by in layout.held.items()}
        self._twins = twins
        self._sink = sink
        self._room = room
        self._open: dict[tuple[str, Box], tuple[torch.Tensor, int]] = {}
        self._begin(layout)

    def _begin(self, layout: Layout) -> None:
        """Empty tensors come by themselves."""
        import torch

        from rlmq.common.dtypes import DTYPES

        for name, boxes in self._boxes.items():
            for box in boxes:
                if not box.count:
                    self._deliver(name, box, torch.empty(box.shape, dtype=DTYPES[layout.tensors[name].dtype]))

    def held(self, name: str, box: Box) -> torch.Tensor:
        """Nothing is sent from here."""
        raise UsageError(
            f"tensor {name}", got="a rank that only receives", expected="a plan in which it sends nothing"
        )

    arrived = held

    def room(self, name: str, box: Box) -> torch.Tensor | None:
        """See `Views`."""
        own = self._own(name, box)
        whole = self._whole(name, own)
        return None if whole is None else sub_view(whole, own, box)

    def _own(self, name: str, box: Box) -> Box:
        return next(one for one in self._boxes[name] if one.intersection(box) == box)

    def _whole(self, name: str, own: Box) -> torch.Tensor | None:
        """The sink's room for a box of the rank."""
        found = self._room(name) if self._room and len(self._boxes[name]) == 1 else None
        return found if found is not None and tuple(found.shape) == own.shape else None

    def write(self, name: str, box: Box, content: torch.Tensor) -> None:
        """See `Views`."""
        import torch

        own = self._own(name, box)
        if own == box:
            room = self._whole(name, own)
            same = room is not None and room.data_ptr() == content.data_ptr()
            self._deliver(name, box, room if room is not None and same else content)
            return
        if (name, own) not in self._open:
            room = self._whole(name, own)
            self._open[name, own] = (
                torch.empty(own.shape, dtype=content.dtype) if room is None else room,
                own.count,
            )
        whole, left = self._open[name, own]
        copy_values(sub_view(whole, own, box), content)
        self._open[name, own] = (whole, left - box.count)
        if left == box.count:
            del self._open[name, own]
            self._deliver(name, own, whole)

    def _deliver(self, name: str, box: Box, content: torch.Tensor) -> None:
        for one in (name, *self._twins.get(name, ())):
            self._sink(one, box, content)
