"""The memory of one rank's weights: the shards that it generates with, of which those that it trains are slices.

::

    a tensor of the generation shard   | rows of others | rows that this rank trains | rows of others |
                                                        ^ the training shard: a view, always resident

A matrix that is cut in its second dimension lies transposed (`named` gives it back as Hugging Face has it), so
that each training shard is one stretch of memory. On the CPU, pages that hold only rows of others are given back
to the system while training runs.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from rlmq.common.engines.decoder_shape import CutTensor
from rlmq.common.layouts.layout import Box

_ALIGN_BYTES = 64


@dataclass(slots=True)
class Ledger:
    """Bytes that are held only while the generation layout lasts, by what they are for."""

    held: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0

    def take(self, what: str, count: int) -> None:
        """Note memory that is used from now on."""
        self.held[what] = self.held.get(what, 0) + count
        self.peak_bytes = max(self.peak_bytes, self.balance_bytes)

    def give(self, what: str) -> None:
        """Note that all memory of this kind is free again."""
        self.held.pop(what, None)

    @property
    def balance_bytes(self) -> int:
        """What is held now; 0 in the training layout."""
        return sum(self.held.values())


def named(tensor: CutTensor, stored: torch.Tensor) -> torch.Tensor:
    """A view of a shard as Hugging Face has it, and back."""
    return stored.T if tensor.dim == 1 else stored


class ShardMemory:
    """Weights by name for both layouts; the training ones are views into the generation ones.

    Args:
        tensors: the model's.
        training: what this rank trains, by name; absent where it has nothing of a tensor.
        generation: what it generates with; holds the training box of every tensor.
        dtype: of all of them.

    Attributes:
        training, generation: tensors by name, as they lie.
    """

    def __init__(
        self,
        tensors: Sequence[CutTensor],
        training: Mapping[str, Box],
        generation: Mapping[str, Box],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.boxes = {"training": dict(training), "generation": dict(generation)}
        places, end = [], 0
        for tensor in tensors:
            if tensor.name in generation:
                places.append((tensor, end))
                end += -(-generation[tensor.name].count * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        self._pages: mmap.mmap | None = None
        if device.type == "cpu":
            self._pages = mmap.mmap(-1, max(end, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        else:
            memory = torch.empty(end, dtype=torch.uint8, device=device)
        self.generation: dict[str, torch.Tensor] = {}
        self.training: dict[str, torch.Tensor] = {}
        self._foreign: list[tuple[int, int]] = []
        for tensor, begin in places:
            self._place(tensor, memory, begin, dtype)

    def _place(self, tensor: CutTensor, memory: torch.Tensor, begin: int, dtype: torch.dtype) -> None:
        whole, own = self.boxes["generation"][tensor.name], self.boxes["training"].get(tensor.name)
        rows, width = whole.shape[tensor.dim], prod(whole.shape) // max(1, whole.shape[tensor.dim])
        size = rows * width * dtype.itemsize
        stored = memory[begin : begin + size].view(dtype).view(rows, width)
        row_bytes = width * dtype.itemsize

        flat = len(whole.shape) == 1
        self.generation[tensor.name] = stored[:, 0] if flat else stored
        if own is None:
            self._foreign.append((begin, begin + size))
            return
        first, last = (edge[tensor.dim] - whole.start[tensor.dim] for edge in (own.start, own.stop))
        self.training[tensor.name] = self.generation[tensor.name][first:last]
        self._foreign.append((begin, begin + first * row_bytes))
        self._foreign.append((begin + last * row_bytes, begin + size))

    @property
    def foreign_bytes(self) -> int:
        """Bytes of the generation shard that are not trained here."""
        return sum(stop - start for start, stop in self._foreign)

    def release(self) -> None:
        """Give back what is not trained here; the training shards are not touched."""
        if self._pages is None:
            return
        for start, stop in self._merged():
            first, last = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE
            if first < last:
                self._pages.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)

    def _merged(self) -> Iterator[tuple[int, int]]:
        """Stretches without rows of this rank; gaps of alignment are nobody's."""
        open_start, open_stop = -1, -1
        for start, stop in sorted(one for one in self._foreign if one[0] < one[1]):
            if open_start >= 0 and start - open_stop < _ALIGN_BYTES:
                open_stop = stop
                continue
            if open_start >= 0:
                yield open_start, open_stop
            open_start, open_stop = start, stop
        if open_start >= 0:
            yield open_start, open_stop
