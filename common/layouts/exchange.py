"""Carrying a plan out: point to point, in rounds, checksummed, until a deadline.

::

    post(0)                                    two buffers each way; while one is on the wire
    for i: post(i + 1), finish(i)              the other is packed or unpacked
    agree                                      all members say what they found

Every member goes through the same rounds in the same order, so the same code serves gloo and, with grouped calls,
NCCL. A member that died is noticed at once (gloo), one that hangs at the deadline; the error names it, and not a
member that waited for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from rlmq.common.dtypes import DTYPES
from rlmq.common.errors import DeadlineExceeded, IntegrityError, RlmqError
from rlmq.common.layouts.groups import reason
from rlmq.common.layouts.neighbours import SharedBuffer, mapped
from rlmq.common.layouts.plan import Move, Plan
from rlmq.common.layouts.rounds import Parcel, Round, buffer_bytes, rounds_of
from rlmq.common.layouts.sealing import Words, checksum, is_whole, seal
from rlmq.common.layouts.views import Views, copy_values
from rlmq.common.weights import TransferStats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

BUCKET_BYTES = 64 << 20
_TAGS = 1 << 12  # messages of one round to one peer have tags of their own
_TAKEN = _TAGS - 1
_TELL_S = 2.0  # after a failure: until the others have said for whom they waited


class Exchange:
    """One generation of a group of members that carries out plans.

    Args:
        group: all members; abandoned after a failure.
        rank: of this process in the group.
        members: the plan's rank of each member, by group rank.
        bucket_bytes: memory for messages beside the shards themselves.
        store: where members that fail tell for whom they wait; without it an error names only who was waited for.
        names: what to call the members in errors.
        device: where messages are packed: `cpu` for gloo, the GPU for NCCL.
        shared: by sender and receiver, the process of a sender whose buffers the receiver maps (see `neighbours`);
            then only a word for each message goes through the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        members: Sequence[int],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        store: dist.Store | None = None,
        names: Sequence[str] = (),
        device: str = "cpu",
        shared: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        self._shared = shared or {}
        self._group = group
        self._own = members[rank]
        self._at = {member: at for at, member in enumerate(members)}
        self._names = dict(zip(members, names or [f"rank {member}" for member in members], strict=True))
        self._store = store
        self._bucket_bytes = bucket_bytes
        self._device = torch.device(device)
        self._grouped = self._device.type != "cpu"

    def run(
        self,
        plan: Plan,
        views: Views,
        *,
        generation: str,
        deadline: float,
        extend_s: float = 0.0,
        progress: Callable[[], object] = lambda: None,
    ) -> TransferStats:
        """Send and receive this rank's part; returns when every member has all of its own, whole.

        What the rank holds in both layouts is not touched.

        Args:
            plan: the same on every member.
            views: this rank's tensors.
            generation: names the exchange in errors.
            deadline: on `time.monotonic()`'s clock.
            extend_s: a finished round moves the deadline to so long after it: a slow transfer is no broken one.
            progress: called after every round.

        Raises:
            DeadlineExceeded: a member died, or did not do its part in time; names it.
            IntegrityError: bytes were damaged on the way to some member; raised on all of them.
        """
        started = time.monotonic()
        subject = f"exchange {generation} on {self._names[self._own]}"
        lane = _Lane(self, views, {n: DTYPES[spec.dtype] for n, spec in plan.target.tensors.items()})
        damaged = -1
        waited: list[_Pending] = []
        try:
            for posted in self._pipelined(lane, rounds_of(plan, self._own, self._bucket_bytes), waited):
                lane.finish(posted, deadline)
                deadline = max(deadline, time.monotonic() + extend_s)
                progress()
                if damaged < 0:
                    damaged = lane.damaged
            self._agree(damaged, subject, deadline, waited)
        except RuntimeError as error:
            if isinstance(error, RlmqError):
                raise
            raise self._lost(error, subject, waited, lane) from error
        except BaseException:
            lane.close()
            raise
        lane.close(again=True)
        return TransferStats(lane.sent_bytes, time.monotonic() - started)

    def _pipelined(self, lane: _Lane, rounds: Sequence[Round], waited: list[_Pending]) -> Iterator[_Posted]:
        """Rounds to finish, each with the next one posted before, unless that passes on what this one brings."""
        for index, step in enumerate(rounds):
            if not waited:
                waited += lane.post(step, index)
            now = waited[:]
            following = rounds[index + 1] if index + 1 < len(rounds) else None
            ahead: list[_Pending] = []
            if following is not None and following.after < step.number:
                ahead = lane.post(following, index + 1)
                waited += ahead
            yield _Posted(step, index, now)
            waited[:] = ahead

    def _agree(self, damaged: int, subject: str, deadline: float, waited: list[_Pending]) -> None:
        """Every member learns what each found."""
        found = torch.zeros(len(self._at), dtype=torch.int64, device=self._device)
        found[self._at[self._own]] = damaged + 1
        if len(self._at) > 1:
            work = self._group.allreduce([found], dist.AllreduceOptions())
            waited[:] = [_Pending(work, member, "to confirm") for member in self._at if member != self._own]
            work.wait(_left(deadline))
        bad = {name: int(found[self._at[m]]) - 1 for m, name in self._names.items() if int(found[self._at[m]])}
        if bad:
            got = ", ".join(f"damaged bytes in round {number} at {name}" for name, number in bad.items())
            raise IntegrityError(subject, got=got, expected="the senders' checksums")

    def _is_mapped(self) -> bool:
        return any(sender == self._own for sender, _ in self._shared)

    def _lost(self, error: RuntimeError, subject: str, waited: Sequence[_Pending], lane: _Lane) -> DeadlineExceeded:
        """Who is at fault: of those waited for, the ones that do not tell that they wait for others.

        Who is gone before a message can be posted is at fault himself.
        """
        open_ = [one for one in waited if one is lane.awaited or not _done(one.work)] or list(waited)
        culprits = {one.peer for one in open_} if lane.posting is None else {lane.posting}
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # it may have been at the member that died
                culprits = self._follow(self._store, culprits)
        told = ", ".join(self._names[member] for member in sorted(culprits)) or "the group"
        what = next((one.what for one in open_), "to join")
        with contextlib.suppress(RuntimeError):
            self._group.abort()
        return DeadlineExceeded(subject, got=reason(error), expected=f"{told} {what}", remedy=f"Look at {told}")

    def _follow(self, store: dist.Store, culprits: set[int]) -> set[int]:
        """From those waited for to those whom they wait for, and so on."""
        store.set(f"waits/{self._own}", ",".join(str(member) for member in sorted(culprits)))
        seen: set[int] = {self._own}
        until = time.monotonic() + _TELL_S
        while True:
            telling = {m for m in culprits - seen if store.check([f"waits/{m}"])}
            for member in telling:
                others = {int(m) for m in store.get(f"waits/{member}").decode().split(",") if m} - seen
                culprits = (culprits - {member}) | others if others else culprits
            seen |= telling
            if not telling and time.monotonic() > until:
                return culprits
            time.sleep(0.0 if telling else 0.05)


@dataclass(slots=True)
class _Pending:
    work: Work
    peer: int
    what: str
    late: bool = False  # waited for when all that came is taken: two ranks may wait for each other's word
    held: torch.Tensor | None = None


@dataclass(slots=True)
class _Posted:
    round: Round
    index: int
    works: list[_Pending]


def _left(deadline: float) -> timedelta:
    """At least 1 ms: torch takes zero for its own default of minutes."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _done(work: Work) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False


class _Lane:
    """The buffers of one run, and what is posted from them."""

    def __init__(self, exchange: Exchange, views: Views, dtypes: Mapping[str, torch.dtype]) -> None:
        self._exchange = exchange
        self._views = views
        self._dtypes = dtypes
        size = buffer_bytes(exchange._bucket_bytes) // 8
        self._own_shared = [SharedBuffer.of(size * 8) for _ in range(2)] if exchange._is_mapped() else []
        self._out = [one.words for one in self._own_shared] or [
            torch.empty(size, dtype=torch.int64, device=exchange._device) for _ in range(2)
        ]
        self._told: dict[tuple[int, int], torch.Tensor] = {}  # where a parcel is, by peer and round
        self._maps: dict[tuple[int, int], torch.Tensor] = {}
        self._in = [torch.empty(size, dtype=torch.int64, device=exchange._device) for _ in range(2)]
        self.sent_bytes = 0
        self.damaged = -1
        self.awaited: _Pending | None = None
        self.posting: int | None = None  # a message to or from this peer

    def post(self, step: Round, index: int) -> list[_Pending]:
        """Start a round: receives first, so that whoever is ahead finds them."""
        group, device, at = self._exchange._group, self._exchange._device, self._exchange._at
        works: list[_Pending] = []
        if self._exchange._grouped:
            group._start_coalescing(device)
        for parcel, message, spare in _messages(step.receives, self._in[index % 2]):
            self.posting = parcel.peer
            arriving = [message, *self._rooms(parcel, spare)]
            if self._pid(parcel.peer) is not None:
                self._told[parcel.peer, step.number] = torch.empty(2, dtype=torch.int64)
                arriving = [self._told[parcel.peer, step.number]]
            for tag, part in enumerate(arriving, start=step.number * _TAGS):
                work = group.recv([part], at[parcel.peer], tag)
                works.append(_Pending(work, parcel.peer, f"to send in round {step.number}"))
        for parcel, message, spare in _messages(step.sends, self._out[index % 2]):
            self.posting = parcel.peer
            if (self._exchange._own, parcel.peer) in self._exchange._shared:
                works += self._lay_out(parcel, message, spare, step.number, index)
                continue
            large = self._lying(parcel, spare)
            for tag, part in enumerate(large, start=step.number * _TAGS + 1):
                work = group.send([part], at[parcel.peer], tag)
                works.append(_Pending(work, parcel.peer, f"to receive in round {step.number}"))
            self._pack(parcel, message, large, step.number)
            work = group.send([message], at[parcel.peer], step.number * _TAGS)
            works.append(_Pending(work, parcel.peer, f"to receive in round {step.number}"))
        if self._exchange._grouped:
            every = group._end_coalescing(device)
            works = [_Pending(every, one.peer, one.what) for one in works]
        self.posting = None
        return works

    def finish(self, posted: _Posted, deadline: float) -> None:
        """Wait for a round, check what came and hand it over."""
        number = posted.round.number
        self._wait([one for one in posted.works if not one.late], deadline)
        for parcel, message, spare in _messages(posted.round.receives, self._in[posted.index % 2]):
            pid = self._pid(parcel.peer)
            if pid is None:
                self._hand_over(parcel, message, self._rooms(parcel, spare), number)
                continue
            message, spare = self._laid_out(parcel, pid, number)  # noqa: PLW2901
            large = self._rooms(parcel, spare)
            for room, part in zip(large, self._spares(parcel, spare), strict=True):
                copy_values(room, part)
            self._hand_over(parcel, message, large, number)
            posted.works.append(self._taken(parcel.peer, number))
        self._wait([one for one in posted.works if one.late], deadline)

    def _hand_over(self, parcel: Parcel, message: torch.Tensor, large: Sequence[torch.Tensor], number: int) -> None:
        if not self._is_whole(parcel, message, large, number):
            if self.damaged < 0:
                self.damaged = number
            return
        for (name, box, *_), offset, size in parcel.chunks:
            content = message.view(torch.uint8)[offset : offset + size].view(self._dtypes[name])
            self._views.write(name, box, content.view(box.shape))
        for ((name, box, *_), _), part in zip(parcel.large, large, strict=True):
            self._views.write(name, box, part.view(box.shape))

    def _wait(self, works: Sequence[_Pending], deadline: float) -> None:
        for one in works:
            self.awaited = one
            one.work.wait(_left(deadline))

    def close(self, *, again: bool = False) -> None:
        """Nobody maps this rank's buffers any more; the next run may have them if nobody reads what is in them."""
        for one in self._own_shared:
            one.close(again=again)

    def _pid(self, sender: int) -> int | None:
        """The process whose buffers this rank maps, if it does."""
        return self._exchange._shared.get((sender, self._exchange._own))

    def _lay_out(
        self, parcel: Parcel, message: torch.Tensor, spare: torch.Tensor, number: int, index: int
    ) -> list[_Pending]:
        """Everything into this rank's shared buffer, and a word to who maps it; it is used again when taken."""
        parts = list(self._spares(parcel, spare))
        for (move, size), part in zip(parcel.large, parts, strict=True):
            copy_values(part.view(move.box.shape), self._view(move))
            self.sent_bytes += size
        self._pack(parcel, message, parts, number)
        buffer = self._own_shared[index % 2]
        place = torch.tensor([buffer.fd, message.storage_offset()])
        group, peer = self._exchange._group, self._exchange._at[parcel.peer]
        told = group.send([place], peer, number * _TAGS)
        taken = torch.empty(1, dtype=torch.int64)
        back = group.recv([taken], peer, number * _TAGS + _TAKEN)
        return [
            _Pending(told, parcel.peer, f"to receive in round {number}", held=place),
            _Pending(back, parcel.peer, f"to take round {number}", late=True, held=taken),
        ]

    def _laid_out(self, parcel: Parcel, pid: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A parcel in the sender's buffer."""
        fd, start = self._told.pop((parcel.peer, number)).tolist()
        if (parcel.peer, fd) not in self._maps:
            try:
                self._maps[parcel.peer, fd] = mapped(pid, fd)
            except OSError as error:
                raise RuntimeError(f"memory of process {pid}: {error}") from error
        middle, stop = start + parcel.bytes // 8, start + parcel.memory_bytes // 8
        return self._maps[parcel.peer, fd][start:middle], self._maps[parcel.peer, fd][middle:stop]

    def _taken(self, peer: int, number: int) -> _Pending:
        word = torch.zeros(1, dtype=torch.int64)
        work = self._exchange._group.send([word], self._exchange._at[peer], number * _TAGS + _TAKEN)
        return _Pending(work, peer, f"to go on after round {number}", late=True, held=word)

    def _rooms(self, parcel: Parcel, spare: torch.Tensor) -> list[torch.Tensor]:
        """Where large chunks come to: into their place, if that is one piece of memory, or into the buffer."""
        found = []
        for (move, _), part in zip(parcel.large, self._spares(parcel, spare), strict=True):
            room = self._views.room(move.name, move.box)
            straight = room is not None and room.is_contiguous() and room.device == part.device
            found.append(room.reshape(-1) if room is not None and straight else part)
        return found

    def _lying(self, parcel: Parcel, spare: torch.Tensor) -> list[torch.Tensor]:
        """Large chunks where they lie, or copied into the buffer."""
        found = []
        for (move, size), part in zip(parcel.large, self._spares(parcel, spare), strict=True):
            view = self._view(move)
            if view.is_contiguous() and view.device == part.device:
                found.append(view.reshape(-1))
            else:
                copy_values(part.view(move.box.shape), view)
                found.append(part)
            self.sent_bytes += size
        return found

    def _spares(self, parcel: Parcel, spare: torch.Tensor) -> Iterator[torch.Tensor]:
        start = 0
        for move, size in parcel.large:
            yield spare.view(torch.uint8)[start : start + size].view(self._dtypes[move.name])
            start += size

    def _view(self, move: Move) -> torch.Tensor:
        return (self._views.arrived if move.hop else self._views.held)(move.name, move.box)

    def _pack(self, parcel: Parcel, message: torch.Tensor, large: Sequence[torch.Tensor], number: int) -> None:
        content = message.view(torch.uint8)
        for move, offset, size in parcel.chunks:
            room = content[offset : offset + size].view(self._dtypes[move.name]).view(move.box.shape)
            copy_values(room, self._view(move))
            if size % 8:  # what lies behind it is part of the checksum
                content[offset + size : offset + size + 8 - size % 8] = 0
            self.sent_bytes += size
        words = _words(message)
        sums = [word for part in large for word in checksum(_words(part))]
        words[parcel.payload_bytes // 8 :][: len(sums)] = sums
        seal(words, number)
        if self._exchange._grouped:
            message.copy_(torch.from_numpy(words))

    def _is_whole(self, parcel: Parcel, message: torch.Tensor, large: Sequence[torch.Tensor], number: int) -> bool:
        words = _words(message)
        sums = [word for part in large for word in checksum(_words(part))]
        return is_whole(words, number) and list(words[parcel.payload_bytes // 8 :][: len(sums)]) == sums


def _words(message: torch.Tensor) -> Words:
    words: Words = message.detach().view(torch.uint8).cpu().numpy().view(np.int64)
    return words


def _messages(
    parcels: Mapping[int, Parcel], buffer: torch.Tensor
) -> Iterator[tuple[Parcel, torch.Tensor, torch.Tensor]]:
    """Each parcel with the place of its first message in the buffer, and one for its large chunks."""
    start = 0
    for peer in sorted(parcels):
        parcel = parcels[peer]
        middle, stop = start + parcel.bytes // 8, start + parcel.memory_bytes // 8
        yield parcel, buffer[start:middle], buffer[middle:stop]
        start = stop
