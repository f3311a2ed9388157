"""A delta sync: for each pair of ranks one blob with the changes of all boxes that would move between them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from rlmq.common.dtypes import DTYPES
from rlmq.common.errors import IntegrityError
from rlmq.common.layouts.delta import Bytes, apply, encode, numbers
from rlmq.common.layouts.intake import Find, Intake
from rlmq.common.layouts.layout import Box, Layout
from rlmq.common.layouts.meeting import Clock, Met, read
from rlmq.common.layouts.part import WeightPart
from rlmq.common.layouts.plan import Plan, plan
from rlmq.common.layouts.views import Shards, sub_view
from rlmq.common.weights import TensorSpec

Sizes = Mapping[tuple[int, int], int]
"""Bytes by sender and receiver."""


class Changes:
    """What changed in a trainer rank's part since it was sent last.

    Args:
        rank: of the trainer.
        part: the weights now.
        before: mark and copy of the weights that were sent last; None: nothing can be said.
    """

    def __init__(self, rank: int, part: WeightPart, before: tuple[str, WeightPart] | None) -> None:
        self._rank = rank
        self._part = part
        self._before = before
        self._made: tuple[Plan, dict[int, Bytes]] | None = None
        self._lock = threading.Lock()
        self._changed = 0
        self._elements = 0

    @property
    def share(self) -> float | None:
        """Changed elements of all; None while nobody has asked."""
        return self._changed / self._elements if self._elements else None

    def of(self, met: Met) -> dict[int, Bytes] | None:
        """Blobs by receiver; None when the replica started from something else than what this rank sent last."""
        if self._before is None or any(one.has[self._rank] != self._before[0] for one in met.arrivals):
            return None
        with self._lock:  # replicas that want the same get the same
            if self._made is None or self._made[0] is not met.plan:
                self._made = (met.plan, self._encode(met.plan, self._before[1].shards))
            return self._made[1]

    def _encode(self, made: Plan, before: Shards) -> dict[int, Bytes]:
        blobs: dict[int, list[Bytes]] = {}
        self._changed = self._elements = 0
        for move in made.moves:
            if move.sender == self._rank:
                new, old = (numbers(shards[move.name, move.box]) for shards in (self._part.shards, before))
                blob, changed = encode(new, old)
                blobs.setdefault(move.receiver, []).append(blob)
                self._changed += changed
                self._elements += new.size
        return {receiver: np.concatenate(parts) for receiver, parts in blobs.items()}


def tell_sizes(store: dist.Store, met: Met, rank: int, blobs: Mapping[int, Bytes] | None) -> None:
    """A trainer rank says how long its blobs are, or that it has none."""
    sizes = None if blobs is None else [(receiver, blob.size) for receiver, blob in blobs.items()]
    store.set(f"delta/{met.lane}/{rank}", msgspec.json.encode(sizes).decode())


def agreed_sizes(store: dist.Store, met: Met, clock: Clock) -> Sizes | None:
    """Sizes of all blobs where every trainer rank has them, and together they are less than everything."""
    sizes: dict[tuple[int, int], int] = {}
    for rank in range(met.senders):
        note = read(store, f"delta/{met.lane}/{rank}", clock, f"trainer rank {rank}")
        told = msgspec.json.decode(note, type=list[tuple[int, int]] | None)
        if told is None:
            return None
        sizes.update({(rank, receiver): size for receiver, size in told})
    return sizes if sum(sizes.values()) < met.plan.bytes else None


def blob_plan(sizes: Sizes) -> Plan:
    """The moves of the blobs."""
    specs = {f"{a}>{b}": TensorSpec(f"{a}>{b}", (size,), "U8") for (a, b), size in sizes.items()}
    boxes = {name: (Box.whole(spec.shape),) for name, spec in specs.items()}
    source = Layout(specs, {f"{a}>{b}": {a: boxes[f"{a}>{b}"]} for a, b in sizes})
    return plan(source, Layout(specs, {f"{a}>{b}": {b: boxes[f"{a}>{b}"]} for a, b in sizes}))


def blob_shards(made: Plan, rank: int, blobs: Mapping[int, Bytes]) -> Shards:
    """A trainer rank's blobs."""
    return Shards(made.source, rank, {f"{rank}>{to}": [torch.from_numpy(blob)] for to, blob in blobs.items()})


def take_changes(made: Plan, rank: int, blobs: Shards, intake: Intake, served: Find, subject: str) -> None:
    """Hand over what is served with the changes made in it.

    Raises:
        IntegrityError: the result is not what the trainer has.
    """
    own: dict[str, tuple[Box, ...]] = {name: by.get(rank, ()) for name, by in made.target.held.items()}
    at: dict[int, int] = {}
    for move in made.moves:
        if move.receiver != rank:
            continue
        old = served(move.name)
        if old is None or len(own[move.name]) != 1:
            raise IntegrityError(subject, got=f"nothing that changes of {move.name} could start from")
        content = numbers(sub_view(old, own[move.name][0], move.box)).copy()
        name = f"{move.sender}>{rank}"
        blob = numbers(blobs[name, blobs.boxes(name)[0]])
        start = at.get(move.sender, 0)
        at[move.sender] = start + apply(blob[start:], content, f"{subject}: {move.name}")
        dtype = DTYPES[made.target.tensors[move.name].dtype]
        new = torch.from_numpy(content.view(np.uint8)).view(dtype).reshape(move.box.shape)
        intake.write(move.name, move.box, new)
