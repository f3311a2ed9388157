"""The fewest bytes that bring tensors from one layout to another, and who sends them to whom.

What a rank already holds never moves, and each byte that it lacks arrives exactly once. So the bytes received are
`lower_bound`, for any pair of layouts: on the same ranks, on overlapping or on other ones. Where several ranks
hold a piece the senders are balanced. Where one piece goes to many receivers, and sending it to each would make its
holders the bottleneck, receivers pass it on in a chain.

Everything here is a pure function of the two layouts: all ranks that compute a plan compute the same one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rlmq.common.errors import UsageError
from rlmq.common.layouts.balance import Holders, shares
from rlmq.common.layouts.layout import Box, Layout
from rlmq.common.layouts.pieces import Held, NobodyHolds, Piece, missing_pieces
from rlmq.common.weights import ITEM_BYTES

_CHAIN_GAIN = 0.9  # a chain is taken where its busiest sender has less than this of the busiest direct one
_FINE = 0.01  # of the busiest sender's bytes: nothing smaller is cut to balance


class Move(NamedTuple):
    """One box of a tensor from rank to rank; in its `hop` 0 the sender is a holder, later it got the box before."""

    name: str
    box: Box
    sender: int
    receiver: int
    hop: int = 0


@dataclass(frozen=True, eq=False)
class Plan:
    """Moves in the one order that all ranks know; a box is moved on only after the move that brings it.

    Example:
        >>> plan(training, generation).moves_of(3)   # what rank 3 sends and receives
    """

    source: Layout
    target: Layout
    moves: tuple[Move, ...]

    @cached_property
    def sent_bytes(self) -> Mapping[int, int]:
        """Bytes that each sender sends."""
        return self._totals(lambda move: move.sender)

    @cached_property
    def received_bytes(self) -> Mapping[int, int]:
        """Bytes that each receiver receives."""
        return self._totals(lambda move: move.receiver)

    @property
    def bytes(self) -> int:
        """Bytes that move: `lower_bound` of the two layouts."""
        return sum(self.received_bytes.values())

    def moves_of(self, rank: int) -> list[Move]:
        """What a rank sends or receives, in order."""
        return [move for move in self.moves if rank in (move.sender, move.receiver)]

    def kept(self, rank: int) -> Iterator[tuple[str, Box]]:
        """Boxes that the rank holds in both layouts."""
        for name, box in self.target.boxes(rank):
            for own in self.source.held[_source_name(self.source, name)].get(rank, ()):
                both = own.intersection(box)
                if both is not None:
                    yield name, both

    def _totals(self, rank_of: Callable[[Move], int]) -> dict[int, int]:
        totals: dict[int, int] = defaultdict(int)
        sizes = {name: ITEM_BYTES[spec.dtype] for name, spec in self.target.tensors.items()}
        for move in self.moves:
            totals[rank_of(move)] += move.box.count * sizes[move.name]
        return dict(sorted(totals.items()))


def lower_bound(source: Layout, target: Layout) -> int:
    """Sum over the target's ranks of the bytes of their shard less those that the same rank already holds.

    No plan can move less: what a rank lacks has to come.
    """
    return sum(missing_bytes(source, target).values())


def missing_bytes(source: Layout, target: Layout) -> dict[int, int]:
    """For each rank of the target the bytes that it lacks."""
    missing = dict.fromkeys(target.ranks, 0)
    for name, spec in target.tensors.items():
        held = source.held[_source_name(source, name)]
        for rank, boxes in target.held[name].items():
            for box in boxes:
                own = (box.intersection(one) for one in held.get(rank, ()))
                lacking = box.count - sum(part.count for part in own if part is not None)
                missing[rank] += lacking * ITEM_BYTES[spec.dtype]
    return missing


def plan(source: Layout, target: Layout) -> Plan:
    """The moves that bring the target's ranks what they lack.

    Raises:
        UsageError: a tensor of the target is not in the source, has another shape or type there, or part of it is
            held by no rank; names it.
    """
    wanted = _wanted(source, target)
    direct = _direct(wanted)
    if any(len(piece.receivers) > len(piece.holders) for _, _, piece in wanted):
        chained = _chained(wanted)
        if _busiest(chained, target) < _CHAIN_GAIN * _busiest(direct, target):
            return Plan(source, target, tuple(chained))
    return Plan(source, target, tuple(direct))


Wanted = list[tuple[str, int, Piece]]  # name, bytes of an element, piece


def _wanted(source: Layout, target: Layout) -> Wanted:
    known: dict[tuple[object, ...], list[Piece]] = {}  # layers are alike: pieces of one are those of another
    wanted: Wanted = []
    for name, spec in target.tensors.items():
        held = _held_alike(source, target, name)
        key = (_key(held), _key(target.held[name]))
        try:
            if key not in known:
                known[key] = missing_pieces(held, target.held[name])
        except NobodyHolds as error:
            raise UsageError(
                f"tensor {name}",
                got=f"{error.found} of {error.box.count} elements of box {error.box.start}..{error.box.stop} held",
                expected="every element of the target held by some rank of the source",
            ) from error
        wanted += [(name, ITEM_BYTES[spec.dtype], piece) for piece in known[key]]
    return wanted


def _key(held: Held) -> tuple[tuple[int, tuple[Box, ...]], ...]:
    return tuple(sorted(held.items()))


def _source_name(source: Layout, name: str) -> str:
    return name if name in source.tensors else source.aliases.get(name, name)


def _held_alike(source: Layout, target: Layout, name: str) -> Held:
    own = _source_name(source, name)
    wanted = target.tensors[name]
    if own not in source.tensors:
        raise UsageError(
            f"tensor {name}", got="no such tensor in the source", expected="the same names on both sides"
        )
    found = source.tensors[own]
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise UsageError(
            f"tensor {name}",
            got=f"{found.dtype} {list(found.shape)} in the source",
            expected=f"{wanted.dtype} {list(wanted.shape)} as in the target",
        )
    return source.held[own]


def _busiest(moves: Sequence[Move], target: Layout) -> int:
    return max(Plan(target, target, tuple(moves)).sent_bytes.values(), default=0)


def _direct(wanted: Wanted) -> list[Move]:
    """Every receiver is served by a holder."""
    demands: dict[Holders, float] = defaultdict(float)
    for _, item, piece in wanted:
        demands[piece.holders] += item * piece.box.count * len(piece.receivers)
    office = _Office(demands)
    return [
        Move(name, box, sender, receiver)
        for name, item, piece in wanted
        for receiver in piece.receivers
        for box, sender in office.serve(piece.box, item, piece.holders, receiver)
    ]


def _chained(wanted: Wanted) -> list[Move]:
    """Holders send each piece once; the receivers pass it on, and the busiest of them, as the last, does not."""
    demands: dict[Holders, float] = defaultdict(float)
    for _, item, piece in wanted:
        demands[piece.holders] += item * piece.box.count
    office = _Office(demands)
    passed: dict[int, int] = defaultdict(int)
    moves = []
    for name, item, piece in wanted:
        last = max(piece.receivers, key=lambda rank: (passed[rank], rank))
        at = piece.receivers.index(last) + 1
        chain = piece.receivers[at:] + piece.receivers[:at]
        for rank in chain[:-1]:
            passed[rank] += item * piece.box.count
        for box, sender in office.serve(piece.box, item, piece.holders, chain[0]):
            links = zip((sender, *chain), chain, strict=False)
            moves += [Move(name, box, one, other, hop) for hop, (one, other) in enumerate(links)]
    return moves


class _Office:
    """Chooses the holder that serves a receiver: near ones first, none beyond its share."""

    def __init__(self, demands: Mapping[Holders, float]) -> None:
        self._left: dict[Holders, dict[int, float]] = {}
        loads: dict[int, float] = defaultdict(float)
        for holders, parts in shares(demands).items():
            self._left[holders] = dict(zip(holders, parts, strict=True))
            for rank, part in self._left[holders].items():
                loads[rank] += part
        self._fine = _FINE * max(loads.values(), default=0.0)

    def serve(self, box: Box, item: int, holders: Holders, receiver: int) -> list[tuple[Box, int]]:
        """Parts of the box with the holder that sends each."""
        if len(holders) == 1:
            return [(box, holders[0])]
        left = self._left[holders]
        size = box.count * item
        # Ranks of one host, and of one replica, differ in their lowest bits.
        near = min(
            (rank for rank in holders if left[rank] >= size - self._fine),
            key=lambda rank: rank ^ receiver,
            default=None,
        )
        if near is not None:
            left[near] -= size
            return [(box, near)]
        most = max(holders, key=lambda rank: (left[rank], -rank))
        first, rest = _cut(box, int(left[most] // item))
        left[most] -= first.count * item
        return [(first, most), *(self.serve(rest, item, holders, receiver) if rest is not None else [])]


def _cut(box: Box, count: int) -> tuple[Box, Box | None]:
    """A first part of about so many elements, at least one slice of the longest dimension, and the rest."""
    dim = max(range(len(box.start)), key=lambda d: box.stop[d] - box.start[d], default=None)
    if dim is None:
        return box, None
    extent = box.stop[dim] - box.start[dim]
    slices = min(extent, max(1, round(count * extent / box.count)))
    if slices == extent:
        return box, None
    at = box.start[dim] + slices
    first = Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :]))
    return first, Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop)
