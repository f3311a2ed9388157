"""A layout: which rank holds which part of each named tensor.

The ranks form a mesh `pp x tp x dp` in which tp is fastest, then pp, then dp::

    rank = (dp_index * pp + pp_index) * tp + tp_index

so one training replica is `pp * tp` consecutive ranks. What a rank holds of a tensor is a set of disjoint boxes of
the whole tensor under its Hugging Face name: one for a replicated or evenly cut tensor, several for a fused one
(qkv, gate_up) or one that is cut in its flattened form (FSDP2, ZeRO), none on another pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from rlmq.common.weights import TensorSpec


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open box: elements `start[d] <= index[d] < stop[d]` in every dimension d."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """The part that both hold; None when it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Sizes of the mesh's dimensions; which rank is where is said at the top of this module."""

    pp: int = 1
    tp: int = 1
    dp: int = 1

    @property
    def size(self) -> int:
        """Ranks."""
        return self.pp * self.tp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """`(pp_index, tp_index, dp_index)` of a rank."""
        replica, inside = divmod(rank, self.pp * self.tp)
        stage, part = divmod(inside, self.tp)
        return stage, part, replica

    def rank(self, pp: int, tp: int, dp: int) -> int:
        """The rank at a place."""
        return (dp * self.pp + pp) * self.tp + tp

    def __str__(self) -> str:
        return f"{self.pp}-{self.tp}-{self.dp}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Which boxes of which tensor each rank holds.

    Args:
        tensors: every tensor of the model, by name, without aliases.
        held: for each tensor, the boxes of each rank that holds some of it; disjoint within a rank.
        aliases: tied names, each with the name of the tensor that it is.
    """

    tensors: Mapping[str, TensorSpec]
    held: Mapping[str, Mapping[int, tuple[Box, ...]]]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds something, in order."""
        return tuple(sorted({rank for by_rank in self.held.values() for rank in by_rank}))

    def boxes(self, rank: int) -> Iterator[tuple[str, Box]]:
        """What a rank holds, in the order of `tensors`."""
        for name in self.tensors:
            for box in self.held[name].get(rank, ()):
                yield name, box
