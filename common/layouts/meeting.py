"""Who meets for a weight sync, what each of them has and wants, and the plan that follows from it."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache

import msgspec
import torch.distributed as dist

from rlmq.common.errors import DeadlineExceeded, RlmqError, UsageError
from rlmq.common.layouts.groups import reason
from rlmq.common.layouts.layout import Layout
from rlmq.common.layouts.neighbours import Neighbour
from rlmq.common.layouts.part import PartNote, together
from rlmq.common.layouts.plan import Plan, plan
from rlmq.common.weights import Rendezvous

_CONNECT = timedelta(seconds=5)


class Offer(msgspec.Struct, frozen=True):
    """A trainer rank's part, and the mark of the weights that it sends."""

    part: PartNote
    mark: str
    bucket_bytes: int
    delta: bool = False
    process: Neighbour | None = None


class Arrival(msgspec.Struct, frozen=True):
    """A replica's rank that has come: what it wants, and the marks of what it serves (by trainer rank).

    `lane` names the group; it is new for each attempt, as a process that died on the way may have left addresses.
    `reads` are trainer ranks of this host, whose buffers it can map.
    """

    lane: str
    ranks: int
    part: PartNote
    has: tuple[str, ...] = ()
    reads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Met:
    """What every member of a replica's group knows. Trainer ranks come first in plan and group."""

    lane: str
    plan: Plan
    twins: Mapping[str, Sequence[str]]
    offers: tuple[Offer, ...]
    arrivals: tuple[Arrival, ...]

    @property
    def senders(self) -> int:
        """Trainer ranks."""
        return len(self.offers)

    @property
    def may_be_delta(self) -> bool:
        """Whether changes alone may do: where trainer ranks have what the replica starts from, which they tell."""
        return all(offer.delta for offer in self.offers) and all(one.has for one in self.arrivals)

    @property
    def shared(self) -> dict[tuple[int, int], int]:
        """Process ids of trainer ranks whose buffers a receiver maps, by the ranks of both."""
        return {
            (sender, self.senders + rank): process.pid
            for rank, arrival in enumerate(self.arrivals)
            for sender in arrival.reads
            if (process := self.offers[sender].process) is not None
        }

    def names(self, member: str) -> list[str]:
        """What to call the members of the group."""
        inside = [member] if len(self.arrivals) == 1 else [f"{member}, rank {i}" for i in range(len(self.arrivals))]
        return [f"trainer rank {rank}" for rank in range(self.senders)] + inside


class Clock:
    """How long one side may go without progress; turns what torch raises into who was waited for."""

    def __init__(self, limit_s: float, subject: str) -> None:
        self.limit_s = limit_s
        self.subject = subject
        self._deadline = time.monotonic() + limit_s

    def left(self) -> timedelta:
        """Time to the deadline, at least 1 ms: torch takes zero for its own default of minutes."""
        return timedelta(seconds=max(0.001, self._deadline - time.monotonic()))

    @property
    def over(self) -> bool:
        """Whether it is past."""
        return time.monotonic() >= self._deadline

    def names(self, what: str) -> _Naming:
        """Context in which an error of torch is raised as DeadlineExceeded, waiting for `what`."""
        return _Naming(self.subject, what)


@dataclass(slots=True)
class _Naming:
    subject: str
    what: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, RlmqError):
            raise DeadlineExceeded(self.subject, got=reason(error), expected=self.what) from error


def connect(meeting: Rendezvous, clock: Clock) -> dist.TCPStore:
    """The meeting place, which was there before anybody was called to it: when it refuses, the trainer has left.

    Raises:
        DeadlineExceeded: it refuses.
    """
    while True:
        try:
            socket.create_connection((meeting.host, meeting.port), timeout=meeting.timeout_s).close()
        except OSError as error:
            raise DeadlineExceeded(
                clock.subject, got=f"no meeting place ({error})", expected="the sender there"
            ) from error
        with clock.names("the sender at the meeting place"):
            try:  # torch asks again and again also where nobody listens any more
                store = dist.TCPStore(
                    meeting.host, meeting.port, is_master=False, timeout=min(clock.left(), _CONNECT)
                )
            except dist.DistError:
                if clock.over:
                    raise
                continue
        store.set_timeout(clock.left())
        return store


def read(store: dist.Store, key: str, clock: Clock, who: str) -> bytes:
    """What somebody leaves there.

    Raises:
        DeadlineExceeded: he does not.
    """
    with clock.names(who):
        store.wait([key], clock.left())
        return bytes(store.get(key))


def offers_of(store: dist.Store, senders: int, clock: Clock) -> tuple[Offer, ...]:
    """What all trainer ranks say of themselves.

    Raises:
        DeadlineExceeded: one does not come; named.
    """
    return tuple(
        msgspec.json.decode(read(store, f"sender/{rank}", clock, f"trainer rank {rank}"), type=Offer)
        for rank in range(senders)
    )


def meet(store: dist.Store, member: str, senders: int, clock: Clock) -> Met:
    """All notes of a replica's group, and the plan.

    Raises:
        DeadlineExceeded: somebody does not come; names who.
        UsageError: trainer and replica have different models.
    """
    offers = offers_of(store, senders, clock)
    arrivals: list[Arrival] = []
    while not arrivals or len(arrivals) < arrivals[0].ranks:
        who = f"{member}, rank {len(arrivals)}"
        note = read(store, f"here/{member}/{len(arrivals)}", clock, who)
        arrivals.append(msgspec.json.decode(note, type=Arrival))
    parts = [[msgspec.json.encode(one.part) for one in side] for side in (offers, arrivals)]
    made, twins = _plan(tuple(parts[0]), tuple(parts[1]))
    return Met(arrivals[0].lane, made, twins, offers, tuple(arrivals))


@lru_cache(maxsize=4)
def _plan(offered: tuple[bytes, ...], wanted: tuple[bytes, ...]) -> tuple[Plan, Mapping[str, Sequence[str]]]:
    """The plan between these parts, and tied names by their tensor. Layouts do not change from step to step."""
    decode = msgspec.json.Decoder(PartNote).decode
    source = together([decode(part) for part in offered], 0)
    target, twins = _without_twins(source, together([decode(part) for part in wanted], len(offered)))
    try:
        return plan(source, target), twins
    except UsageError as error:
        raise UsageError(
            f"weights, {error.subject}",
            got=f"another model: {error.got}",
            expected=error.expected,
            remedy="Check that trainer and generation engine load the same model and train.dtype",
        ) from error


def _without_twins(source: Layout, target: Layout) -> tuple[Layout, dict[str, list[str]]]:
    """The target without names that the source ties to another tensor, cut alike; these by that tensor."""
    extra = sorted(source.tensors.keys() - target.tensors.keys() - set(target.aliases))
    if extra:
        raise UsageError(
            f"weights, tensor {extra[0]}",
            got="another model: the generation engine has no such tensor",
            expected="the trainer's tensors",
            remedy="Check that trainer and generation engine load the same model and train.dtype",
        )
    twins: dict[str, list[str]] = {}
    for alias, owner in (*target.aliases.items(), *source.aliases.items()):
        if alias in target.aliases or (owner in target.held and target.held.get(alias) == target.held[owner]):
            twins.setdefault(owner, []).append(alias)
    dropped = {alias for aliases in twins.values() for alias in aliases}
    tensors = {name: spec for name, spec in target.tensors.items() if name not in dropped}
    return Layout(tensors, {name: target.held[name] for name in tensors}), twins
