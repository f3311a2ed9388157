"""The pieces of one tensor that ranks lack: for each, who holds it and who wants it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmq.common.layouts.layout import Box

Held = Mapping[int, tuple[Box, ...]]
Corners = NDArray[np.int64]


class Piece(NamedTuple):
    """A box that every holder holds whole and every receiver wants and lacks whole; ranks in order."""

    box: Box
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


class NobodyHolds(Exception):
    """Part of a wanted box is held by no rank."""

    def __init__(self, box: Box, found: int) -> None:
        self.box = box
        self.found = found


def missing_pieces(source: Held, target: Held) -> list[Piece]:
    """Pieces that together are, for each receiver, what it wants and does not hold; disjoint for each receiver.

    Raises:
        NobodyHolds: a wanted box is not covered by what ranks hold.
    """
    cells = _cells(_ranks_by_box(source))
    corners = _corners([box for box, _ in cells])
    pieces = []
    for wanted, ranks in sorted(_ranks_by_box(target).items()):
        found = 0
        for box, holders in _inside(wanted, cells, corners):
            found += box.count
            receivers = tuple(rank for rank in ranks if rank not in holders)
            if receivers:
                pieces.append(Piece(box, holders, receivers))
        if found < wanted.count:
            raise NobodyHolds(wanted, found)
    return pieces


def _ranks_by_box(held: Held) -> dict[Box, tuple[int, ...]]:
    ranks: dict[Box, list[int]] = {}
    for rank in sorted(held):
        for box in held[rank]:
            if box.count:
                ranks.setdefault(box, []).append(rank)
    return {box: tuple(of) for box, of in ranks.items()}


def _inside(
    wanted: Box, cells: Sequence[tuple[Box, tuple[int, ...]]], corners: tuple[Corners, Corners]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    starts, stops = corners
    meets = np.logical_and(starts < wanted.stop, stops > wanted.start).all(axis=1)
    for index in np.flatnonzero(meets):
        box, holders = cells[int(index)]
        both = box.intersection(wanted)
        if both is not None:
            yield both, holders


def _corners(boxes: Sequence[Box]) -> tuple[Corners, Corners]:
    dims = len(boxes[0].start) if boxes else 0
    starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(len(boxes), dims)
    stops = np.array([box.stop for box in boxes], dtype=np.int64).reshape(len(boxes), dims)
    return starts, stops


def _cells(held: Mapping[Box, tuple[int, ...]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Disjoint boxes, each with all ranks that hold it, in order of their corners.

    Boxes that overlap others (a replicated tensor here, a cut one there) are cut until none does.
    """
    boxes = sorted(held)
    starts, stops = _corners(boxes)
    whole: list[tuple[Box, tuple[int, ...]]] = []
    overlapping = []
    for index, box in enumerate(boxes):
        meets = np.logical_and(starts < stops[index], stops > starts[index]).all(axis=1)
        if int(meets.sum()) == 1:
            whole.append((box, held[box]))
        else:
            overlapping.append(box)
    return sorted(whole + _refined(overlapping, held))


def _refined(boxes: Sequence[Box], held: Mapping[Box, tuple[int, ...]]) -> list[tuple[Box, tuple[int, ...]]]:
    cells: list[tuple[Box, frozenset[int]]] = []
    for box in boxes:
        ranks = frozenset(held[box])
        rest, cut = [box], []
        for cell, holders in cells:
            both = cell.intersection(box)
            if both is None:
                cut.append((cell, holders))
                continue
            cut.append((both, holders | ranks))
            cut += [(part, holders) for part in without(cell, both)]
            rest = [part for left in rest for part in without(left, both)]
        cells = cut + [(part, ranks) for part in rest]
    return [(box, tuple(sorted(ranks))) for box, ranks in cells]


def without(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that are `box` less `hole`; at most two per dimension."""
    both = box.intersection(hole)
    if both is None:
        return [box]
    parts = []
    start, stop = list(box.start), list(box.stop)
    for dim in range(len(start)):
        for low, high in ((start[dim], both.start[dim]), (both.stop[dim], stop[dim])):
            if low < high:
                parts.append(Box((*start[:dim], low, *start[dim + 1 :]), (*stop[:dim], high, *stop[dim + 1 :])))
        start[dim], stop[dim] = both.start[dim], both.stop[dim]
    return parts
