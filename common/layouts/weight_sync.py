"""Weights from the trainer's ranks to the replicas that generate, shard to shard.

::

    trainer rank 0 opens a meeting place: a store on a free port
    every trainer rank leaves a note of its part of the model      sender/0, sender/1, …
    every rank of a replica leaves a note of what it wants         here/REPLICA/0, …
    all of them compute one plan out of the notes, form a group and carry it out: in full, or the changes alone
    all of them confirm; each replica commits by itself

Each replica has a group of its own with all trainer ranks: one that dies or stops hurts no other.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import torch.distributed as dist

from rlmq.common.errors import DeadlineExceeded, IntegrityError, RlmqError, UsageError
from rlmq.common.layouts.changes import (
    Changes,
    agreed_sizes,
    blob_plan,
    blob_shards,
    take_changes,
    tell_sizes,
)
from rlmq.common.layouts.exchange import BUCKET_BYTES, Exchange
from rlmq.common.layouts.groups import HOST, join, open_store
from rlmq.common.layouts.intake import Find, Intake, Sink
from rlmq.common.layouts.meeting import Arrival, Clock, Met, Offer, connect, meet, offers_of, read
from rlmq.common.layouts.neighbours import can_read, this_process
from rlmq.common.layouts.part import PartNote, WeightPart
from rlmq.common.layouts.plan import Plan
from rlmq.common.layouts.views import ShardViews, Views, empty_shards
from rlmq.common.weights import Rendezvous, SyncStats

_ASK = timedelta(seconds=1)


class WeightSender:
    """One trainer rank's end.

    Args:
        rank: of the trainer's `ranks`.
        delta: send the changes alone to replicas that have what was sent last, where they are less; a copy of this
            rank's part is kept for it.
        timeout_s: how long a transfer may go without progress.
        bucket_bytes: memory for messages, for each replica.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        *,
        delta: bool = False,
        timeout_s: float = 120.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._delta = delta
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._incarnation = secrets.token_hex(4)
        self._stores: dict[str, dist.TCPStore] = {}
        self._sent: tuple[str, WeightPart] | None = None

    def offer(self, generation: str, members: tuple[str, ...]) -> Rendezvous:
        """Open the meeting place for a generation (rank 0), on a free port; those of older ones are closed."""
        self._stores.clear()
        self._stores[generation], port = open_store(self._timeout_s)
        return Rendezvous(HOST, port, generation, members, self._timeout_s, self._ranks)

    def send(
        self,
        meeting: Rendezvous,
        part: WeightPart,
        version: int,
        gone: Callable[[str], bool] = lambda _: False,
    ) -> SyncStats:
        """Send this rank's share of what each replica lacks; returns when all of them have confirmed everything.

        Replicas that have not come yet and are `gone` (asked once a second) are not waited for.

        Raises:
            DeadlineExceeded: a replica did not come or stopped; names it and the generation.
            IntegrityError: a replica received damaged bytes.
            UsageError: a replica is of another model.
            The other replicas have their weights in either case.
        """
        if self._rank == 0 and meeting.generation not in self._stores:
            raise UsageError(
                f"weight transfer {meeting.generation}", expected="a generation that this process offered"
            )
        started = time.monotonic()
        mark = f"{self._incarnation}.{version}"
        offer = Offer(part.note, mark, self._bucket_bytes, self._delta, this_process())
        changes = Changes(self._rank, part, self._sent)
        lanes = [_Lane(meeting, member, self._rank, offer, part, changes, gone) for member in meeting.members]
        threads = [threading.Thread(target=lane.run, name=f"weights-{lane.member}") for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._stores.pop(meeting.generation, None)
        if self._delta:
            self._sent = (mark, part.copied())
        _raise_failures(meeting, lanes)
        moved, full = (sum(getattr(lane, name) for lane in lanes) for name in ("moved_bytes", "full_bytes"))
        return SyncStats(moved, time.monotonic() - started, full, changes.share)


@dataclass(slots=True)
class _Lane:
    """One trainer rank's thread for one replica."""

    meeting: Rendezvous
    member: str
    rank: int
    offer: Offer
    part: WeightPart
    changes: Changes
    gone: Callable[[str], bool]
    moved_bytes: int = 0
    full_bytes: int = 0
    failure: Exception | None = field(default=None)

    def run(self) -> None:
        """Send everything and wait for the confirmation; an error stays in `failure`."""
        try:
            self._send(Clock(self.meeting.timeout_s, f"member {self.member}"))
        except Exception as error:  # noqa: BLE001  (the thread's edge: `send` raises it)
            self.failure = error

    def _send(self, clock: Clock) -> None:
        # One client connection per lane: a wait on a shared one would block the other lanes.
        store = connect(self.meeting, clock)
        with clock.names("to join the group"):
            store.set(f"sender/{self.rank}", msgspec.json.encode(self.offer).decode())
            self._await_arrival(store, clock)
        met = meet(store, self.member, self.meeting.senders, clock)
        self.full_bytes = met.plan.sent_bytes.get(self.rank, 0)
        blobs = sizes = None
        if met.may_be_delta:
            blobs = self.changes.of(met)
            tell_sizes(store, met, self.rank, blobs)
            sizes = agreed_sizes(store, met, clock)
        made, shards = met.plan, self.part.shards
        if sizes is not None and blobs is not None:
            made = blob_plan(sizes)
            shards = blob_shards(made, self.rank, blobs)
        _carry_out(store, met, self.member, self.rank, made, ShardViews(shards, None), clock)
        self.moved_bytes = made.sent_bytes.get(self.rank, 0)

    def _await_arrival(self, store: dist.TCPStore, clock: Clock) -> None:
        while True:
            try:
                store.wait([f"here/{self.member}/0"], min(clock.left(), _ASK))
                return
            except dist.DistStoreError:
                if self.gone(self.member):
                    raise DeadlineExceeded(clock.subject, got="left", expected="it at the meeting place") from None
                if clock.over:
                    raise


class WeightReceiver:
    """One rank's end, in a replica that generates.

    Args:
        member: the replica's name.
        rank: in the replica, of its `ranks`.
    """

    def __init__(self, member: str, rank: int = 0, ranks: int = 1) -> None:
        self._member = member
        self._rank = rank
        self._ranks = ranks
        self._has: tuple[str, ...] = ()
        self._coming: tuple[str, ...] = ()

    def receive(
        self,
        meeting: Rendezvous,
        part: PartNote,
        sink: Sink,
        *,
        room: Find | None = None,
        served: Find | None = None,
        progress: Callable[[], object] = lambda: None,
    ) -> SyncStats:
        """Receive what the part says and hand it to `sink` box by box; its memory is used again afterwards.

        A tied name comes right after the tensor that it is equal to. The content is known to be right only when
        this returns: serve nothing of it before, and call `committed` when it is served.

        Args:
            part: what this rank wants; tied names may be listed as tensors.
            room: memory for a whole tensor to be written into before `sink` gets it, where there is some.
            served: what this rank serves under a name, if changes may start from it.

        Raises:
            IntegrityError: a checksum differs.
            UsageError: the trainer has another model.
            DeadlineExceeded: a trainer rank did not come, or stopped; names it.
        """
        started = time.monotonic()
        clock = Clock(meeting.timeout_s, f"weight transfer {meeting.generation} to {self._member}")
        store = connect(meeting, clock)
        has, self._has = self._has, ()  # after a transfer that fails, everything is wanted
        lane = secrets.token_hex(4)
        if self._rank:
            first = read(store, f"here/{self._member}/0", clock, f"{self._member}, rank 0")
            lane = msgspec.json.decode(first, type=Arrival).lane
        offers = offers_of(store, meeting.senders, clock)
        reads = tuple(rank for rank, offer in enumerate(offers) if can_read(offer.process))
        with clock.names("the sender at the meeting place"):
            arrival = Arrival(lane, self._ranks, part, has if served is not None else (), reads)
            store.set(f"here/{self._member}/{self._rank}", msgspec.json.encode(arrival).decode())
        met = meet(store, self._member, meeting.senders, clock)
        own = met.senders + self._rank
        intake = Intake(met.plan.target, own, met.twins, sink, room)
        sizes = agreed_sizes(store, met, clock) if met.may_be_delta else None
        made = met.plan
        if sizes is None or served is None:
            _carry_out(store, met, self._member, own, made, intake, clock, progress)
        else:
            made = blob_plan(sizes)
            blobs = empty_shards(made.target, own)
            _carry_out(store, met, self._member, own, made, ShardViews(None, blobs), clock, progress)
            take_changes(met.plan, own, blobs, intake, served, clock.subject)
        self._coming = tuple(offer.mark for offer in met.offers)
        moved, full = made.received_bytes.get(own, 0), met.plan.received_bytes.get(own, 0)
        return SyncStats(moved, time.monotonic() - started, full)

    def committed(self) -> None:
        """What came last is served now."""
        self._has = self._coming


def _carry_out(
    store: dist.Store,
    met: Met,
    member: str,
    rank: int,
    made: Plan,
    views: Views,
    clock: Clock,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Form the group and run the exchange."""
    size = met.senders + len(met.arrivals)
    with clock.names("the others to join the group"):
        group = join(store, f"group/{met.lane}", rank, size, clock.left().total_seconds())
    exchange = Exchange(
        group,
        rank,
        range(size),
        bucket_bytes=met.offers[0].bucket_bytes,
        store=dist.PrefixStore(f"told/{met.lane}", store),
        names=met.names(member),
        shared=met.shared,
    )
    deadline = time.monotonic() + clock.limit_s
    exchange.run(
        made, views, generation=clock.subject, deadline=deadline, extend_s=clock.limit_s, progress=progress
    )


def _raise_failures(meeting: Rendezvous, lanes: Sequence[_Lane]) -> None:
    failures = {lane.member: lane.failure for lane in lanes if lane.failure is not None}
    for failure in failures.values():
        if not isinstance(failure, RlmqError):
            raise failure
    if not failures:
        return
    found = {type(failure) for failure in failures.values()}
    kind: type[RlmqError] = next((one for one in (UsageError, IntegrityError) if one in found), DeadlineExceeded)
    raise kind(
        f"weight transfer {meeting.generation}",
        got="; ".join(str(failure).rstrip(".") for failure in failures.values()),
        expected=f"{len(lanes)} members to take everything, without a pause of {meeting.timeout_s:g} s",
        remedy=f"Look at the log of {', '.join(failures)}",
    )
