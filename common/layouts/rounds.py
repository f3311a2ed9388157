"""A plan as rounds: in each one a rank sends and receives no more than fits into its buffers.

All ranks compute the same rounds, and each takes its own in their order. To end round i a rank needs of others only
that they have posted round i, which only takes ended rounds before i: by induction over i no two ranks wait
for each other for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from rlmq.common.errors import UsageError
from rlmq.common.layouts.layout import Box
from rlmq.common.layouts.plan import Move, Plan
from rlmq.common.weights import ITEM_BYTES

WORD_BYTES = 8
TRAILER_BYTES = 3 * WORD_BYTES
SUMS_BYTES = 2 * WORD_BYTES
LARGE_BYTES = 1 << 20
BUFFERS = 4  # two that are sent from and two that are received into: one is on the wire, the other is (un)packed
_FULL = 0.9  # of a buffer: no more room is looked for in it

Chunk = tuple[Move, int, int]  # move, byte where its content begins in the message, bytes of its content


@dataclass(slots=True)
class Parcel:
    """What goes to one peer: a message of chunks, each at a whole word, and a trailer; and large chunks as messages
    of their own, which need no packing where they lie in one piece. Their checksums are in the first message."""

    peer: int
    chunks: list[Chunk] = field(default_factory=list)
    large: list[tuple[Move, int]] = field(default_factory=list)
    payload_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Of the first message."""
        return self.payload_bytes + SUMS_BYTES * len(self.large) + TRAILER_BYTES

    @property
    def memory_bytes(self) -> int:
        """Of all messages, where none lies in one piece."""
        return self.bytes + sum(size for _, size in self.large)

    def add(self, move: Move, size: int) -> None:
        """Append a chunk."""
        if is_large(size):
            self.large.append((move, size))
            return
        self.chunks.append((move, self.payload_bytes, size))
        self.payload_bytes += whole_words(size)


def is_large(size: int) -> bool:
    """Whether a chunk is a message of its own."""
    return size >= LARGE_BYTES and size % WORD_BYTES == 0


@dataclass(slots=True)
class Round:
    """What one rank sends and receives at once; `after` is its last round whose content it passes on here."""

    number: int
    sends: dict[int, Parcel] = field(default_factory=dict)
    receives: dict[int, Parcel] = field(default_factory=dict)
    after: int = -1


def whole_words(size: int) -> int:
    """The next multiple of a word."""
    return -(-size // WORD_BYTES) * WORD_BYTES


@lru_cache(maxsize=8)
def rounds_of(plan: Plan, rank: int, bucket_bytes: int) -> tuple[Round, ...]:
    """The rounds in which the rank takes part, in order; its buffers are together `bucket_bytes`.

    Raises:
        UsageError: a bucket that is too small for one element.
    """
    return tuple(_rounds(plan, rank, buffer_bytes(bucket_bytes)))


def buffer_bytes(bucket_bytes: int) -> int:
    """Of one of the buffers of a bucket.

    Raises:
        UsageError: too small.
    """
    size = bucket_bytes // BUFFERS // WORD_BYTES * WORD_BYTES
    least = TRAILER_BYTES + SUMS_BYTES + WORD_BYTES
    if size < least:
        raise UsageError("bucket", got=f"{bucket_bytes} bytes", expected=f"at least {BUFFERS * least}")
    return size


def _rounds(plan: Plan, rank: int, limit: int) -> list[Round]:
    sizes = {name: ITEM_BYTES[spec.dtype] for name, spec in plan.target.tensors.items()}
    desk = _Desk(limit)
    own: dict[int, Round] = {}
    arrived: dict[tuple[str, Box, int], int] = {}
    chained = any(move.hop for move in plan.moves)
    for move in plan.moves:
        item = sizes[move.name]
        for box in chunks_of(move.box, (limit - TRAILER_BYTES - SUMS_BYTES) // item):
            size = box.count * item
            came = arrived[move.name, box, move.sender] if move.hop else -1
            number = desk.place(move.sender, move.receiver, size, came + 1)
            if chained:
                arrived[move.name, box, move.receiver] = number
            if rank not in (move.sender, move.receiver):
                continue
            mine = own.setdefault(number, Round(number))
            peer, parcels = (move.receiver, mine.sends) if rank == move.sender else (move.sender, mine.receives)
            parcels.setdefault(peer, Parcel(peer)).add(move._replace(box=box), size)
            if rank == move.sender:
                mine.after = max(mine.after, came)
    return [own[number] for number in sorted(own)]


class _Desk:
    """The first round in which both ends have room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._filled: dict[tuple[int, bool, int], int] = defaultdict(int)  # rank, whether it sends, round -> bytes
        self._first: dict[tuple[int, bool], int] = defaultdict(int)
        self._pairs: set[tuple[int, int, int]] = set()

    def place(self, sender: int, receiver: int, size: int, earliest: int) -> int:
        number = max(self._first[sender, True], self._first[receiver, False], earliest)
        while True:
            needed = whole_words(size) + (SUMS_BYTES if is_large(size) else 0)
            needed += TRAILER_BYTES if (sender, receiver, number) not in self._pairs else 0
            ends = ((sender, True, number), (receiver, False, number))
            if all(self._filled[end] + needed <= self._limit for end in ends):
                break
            number += 1
        self._pairs.add((sender, receiver, number))
        for rank, sends, _ in ends:
            self._filled[rank, sends, number] += needed
            while self._filled[rank, sends, self._first[rank, sends]] > _FULL * self._limit:
                self._first[rank, sends] += 1
        return number


def chunks_of(box: Box, most: int) -> Iterator[Box]:
    """Parts of at most so many elements: slices of the first dimension that is not 1 long, cut again if need be."""
    if box.count <= most:
        yield box
        return
    dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
    slice_count = box.count // box.shape[dim]
    step = max(1, most // slice_count)
    for low in range(box.start[dim], box.stop[dim], step):
        high = min(low + step, box.stop[dim])
        part = Box((*box.start[:dim], low, *box.start[dim + 1 :]), (*box.stop[:dim], high, *box.stop[dim + 1 :]))
        yield from chunks_of(part, most)
