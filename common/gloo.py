"""Weights between two processes over gloo: one disposable two-member group per generation and receiver.

All tensors travel in manifest order, packed in buckets that end with their number and a checksum. There are two
buffers on each side: one is on the wire while the other is packed or unpacked. A receiver that dies or stops
ends its own lane only.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from rlmq.common.dtypes import DTYPES, spec_of
from rlmq.common.errors import DeadlineExceeded, IntegrityError, RlmqError, UsageError
from rlmq.common.weight_buckets import Bucket, Bytes, Piece, bytes_of, cut
from rlmq.common.weights import Rendezvous, TransferStats, WeightManifest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

Tensors = Sequence[tuple[str, torch.Tensor]]
Sink = Callable[[str, torch.Tensor], None]

_HOST = "127.0.0.1"
_SENDER, _RECEIVER = 0, 1
_HEADER = "header"
_ASK, _OVER = timedelta(seconds=1), timedelta(milliseconds=1)
_VERDICT_TAG = 1 << 30
# A verdict is the number of a damaged bucket, or:
_ALL_WHOLE, _NO_VERDICT = -1, -2


class GlooTransport:
    """`WeightTransport` over gloo on the loopback interface; tensors on a GPU are staged through the host.

    Nothing is read from `MASTER_ADDR` or `MASTER_PORT`: every generation listens on a free port of its own.
    """

    def __init__(self, *, timeout_s: float = 120.0, bucket_bytes: int = 16 << 20) -> None:
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._stores: dict[str, dist.TCPStore] = {}

    def offer(self, generation: str, members: tuple[str, ...]) -> Rendezvous:
        """Open the meeting place for a generation (sender's side), on a free port.

        The meeting place of every older generation is closed.
        """
        self._stores.clear()
        # torch's own listener would be open on all interfaces.
        listener = socket.create_server((_HOST, 0))
        port = int(listener.getsockname()[1])
        self._stores[generation] = dist.TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
            master_listen_fd=listener.detach(),
        )
        return Rendezvous(_HOST, port, generation, members, self._timeout_s)

    def send(
        self,
        meeting: Rendezvous,
        manifest: WeightManifest,
        tensors: Iterable[tuple[str, torch.Tensor]],
        gone: Callable[[str], bool] = lambda _: False,
    ) -> TransferStats:
        """Send every tensor to every member, each in a lane of its own; returns when all have confirmed.

        Tensors that are the same memory (tied weights) travel once. Members that have not come yet and are `gone`
        (asked once a second, on the lane's thread) are not waited for.

        Raises:
            DeadlineExceeded: a member did not come or stopped; names it, the bucket and the generation.
            IntegrityError: a member received damaged bytes, or `tensors` are not those of the manifest.
            The other members have their weights in either case.
        """
        store = self._stores.get(meeting.generation)
        if store is None:
            raise UsageError(
                f"weight transfer {meeting.generation}", expected="a generation that this process offered"
            )
        started = time.monotonic()
        own = _checked(manifest, tensors)
        aliases = _aliases(own)
        header = _Header(_digest(manifest), self._bucket_bytes, aliases)
        store.set(_HEADER, msgspec.json.encode(header).decode())
        stream = [tensor for name, tensor in own if name not in aliases]
        lanes = [_Lane(meeting, member, stream, self._bucket_bytes, gone) for member in meeting.members]
        threads = [threading.Thread(target=lane.run, name=f"weights-{lane.member}") for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del self._stores[meeting.generation]
        _raise_failures(meeting, lanes)
        return TransferStats(sum(t.nbytes for t in stream) * len(lanes), time.monotonic() - started)

    def receive(self, meeting: Rendezvous, member: str, manifest: WeightManifest, sink: Sink) -> TransferStats:
        """Receive every tensor and hand it to `sink`, whole and checked; its memory is used again afterwards.

        An alias of tied weights comes right after the tensor that it is equal to.

        Raises:
            IntegrityError: a bucket's checksum differs, or the sender sends another manifest.
            DeadlineExceeded: the sender stopped; names the bucket and the generation.
        """
        started = time.monotonic()
        clock = _Clock(meeting.timeout_s, f"weight transfer {meeting.generation} to {member}")
        _check_open(meeting, clock.subject)
        with clock.names("the sender at the meeting place"):
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=clock.left())
            header = msgspec.json.decode(bytes(store.get(_HEADER)), type=_Header)
        if header.manifest != _digest(manifest):
            raise IntegrityError(
                clock.subject,
                got="another manifest than the sender's",
                expected="the same tensor names, shapes and dtypes on both sides",
                remedy="Check that trainer and generation engine load the same model and train.dtype",
            )
        with clock.names("the sender to join"):
            lane = secrets.token_hex(4)  # a process that died on the way may have left addresses of its own
            store.set(_here(member), lane)
            group = _group(store, lane, _RECEIVER, clock.left())
        moved = _Intake(group, clock, manifest, header, sink).run()
        return TransferStats(moved, time.monotonic() - started)


class _Header(msgspec.Struct, frozen=True):
    """What the sender tells before the first bucket: digest of its manifest, size of buckets, and which
    tensors are not sent because they are the same as another."""

    manifest: str
    bucket_bytes: int
    aliases: dict[str, str]


def _checked(manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    own = [(name, tensor.detach()) for name, tensor in tensors]
    for spec, (name, tensor) in zip(manifest.tensors, own, strict=False):
        found = spec_of(name, tensor)
        if found != spec:
            raise IntegrityError("weights to send", got=found, expected=f"{spec} as in the manifest")
    if len(own) != len(manifest.tensors):
        raise IntegrityError(
            "weights to send", got=f"{len(own)} tensors", expected=f"the manifest's {len(manifest.tensors)}"
        )
    return own


def _aliases(tensors: Tensors) -> dict[str, str]:
    """Names of tensors that are the memory of an earlier one, and whose."""
    owners: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors:
        memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        owner = owners.setdefault(memory, name) if tensor.numel() else name
        if owner != name:
            aliases[name] = owner
    return aliases


def _digest(manifest: WeightManifest) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(manifest)).hexdigest()


def _here(member: str) -> str:
    """Key under which a member that has come leaves the name of its lane."""
    return f"here/{member}"


def _check_open(meeting: Rendezvous, subject: str) -> None:
    """The meeting place was there before anybody was called to it: when it refuses, the sender has left.

    Raises:
        DeadlineExceeded: it refuses.
    """
    try:
        socket.create_connection((meeting.host, meeting.port), timeout=meeting.timeout_s).close()
    except OSError as error:
        raise DeadlineExceeded(subject, got=f"no meeting place ({error})", expected="the sender there") from error


def _group(store: dist.Store, lane: str, rank: int, timeout: timedelta) -> dist.ProcessGroup:
    """The two-member group of one receiver; raw, so that no default group and no environment is involved."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stub lacks most of its members
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_HOST)]
    options._timeout = timeout
    group: dist.ProcessGroup = gloo(dist.PrefixStore(lane, store), rank, 2, options)
    return group


def _raise_failures(meeting: Rendezvous, lanes: Sequence[_Lane]) -> None:
    failures = {lane.member: lane.failure for lane in lanes if lane.failure is not None}
    for failure in failures.values():
        if not isinstance(failure, RlmqError):
            raise failure
    if not failures:
        return
    damaged = any(isinstance(f, IntegrityError) for f in failures.values())
    raise (IntegrityError if damaged else DeadlineExceeded)(
        f"weight transfer {meeting.generation}",
        got="; ".join(str(failure).rstrip(".") for failure in failures.values()),
        expected=f"{len(lanes)} members to take all buckets, each within {meeting.timeout_s:g} s",
        remedy=f"Look at the log of {', '.join(failures)}",
    )


class _Clock:
    """How long one lane may go without progress; turns what torch raises into who was waited for."""

    def __init__(self, limit_s: float, subject: str) -> None:
        self._limit_s = limit_s
        self.subject = subject
        self.moved()

    def moved(self) -> None:
        """A bucket went over: a slow transfer is no broken one."""
        self._deadline = time.monotonic() + self._limit_s

    def left(self) -> timedelta:
        """Time to the deadline, at least 1 ms: torch takes zero for its own default of minutes."""
        return timedelta(seconds=max(0.001, self._deadline - time.monotonic()))

    def names(self, what: str) -> _Naming:
        """Context in which an error of torch is raised as DeadlineExceeded, waiting for `what`."""
        return _Naming(self.subject, what)


def _reason(error: RuntimeError) -> str:
    """What gloo says, without its source line and its advice."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", first).split(". This is typically")[0]


@dataclass(slots=True)
class _Naming:
    subject: str
    what: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, RlmqError):
            raise DeadlineExceeded(self.subject, got=_reason(error), expected=self.what) from error


@dataclass(slots=True)
class _Lane:
    """One receiver's sender thread."""

    meeting: Rendezvous
    member: str
    stream: Sequence[torch.Tensor]
    bucket_bytes: int
    gone: Callable[[str], bool]
    failure: Exception | None = field(default=None)

    def run(self) -> None:
        """Send everything and wait for the confirmation; an error stays in `failure`."""
        verdict = torch.full((1,), _NO_VERDICT, dtype=torch.int64)
        clock = _Clock(self.meeting.timeout_s, f"member {self.member}")
        try:
            self._send(clock, verdict)
        except Exception as error:  # noqa: BLE001  (the thread's edge: `send` raises it)
            self.failure = error
        if int(verdict) >= 0:
            self.failure = IntegrityError(clock.subject, got=f"damaged bytes in bucket {int(verdict)}")

    def _send(self, clock: _Clock, verdict: torch.Tensor) -> None:
        with clock.names("to join the group"):
            # One client connection per lane: a wait on a shared one would block the other lanes.
            store = dist.TCPStore(self.meeting.host, self.meeting.port, is_master=False, timeout=clock.left())
            group = _group(store, self._arrival(store, clock), _SENDER, clock.left())
            # Awaited from the start: a receiver that finds damage does not take the buckets after it.
            answered = group.recv([verdict], _RECEIVER, _VERDICT_TAG)
        slots = [Bucket(self.bucket_bytes) for _ in range(2)]
        sent: list[Work | None] = [None, None]
        for number, (size, pieces) in enumerate(cut([t.nbytes for t in self.stream], self.bucket_bytes)):
            bucket = slots[number % 2]
            _finish(sent[number % 2], clock, f"to take bucket {number - 2}")
            for p in pieces:
                bucket.payload[p.offset : p.offset + p.size] = bytes_of(self.stream[p.index])[
                    p.start : p.start + p.size
                ]
            bucket.seal(size, number)
            with clock.names(f"to take bucket {number}"):
                sent[number % 2] = group.send([bucket.message(size)], _RECEIVER, number)
        for work in sent:
            _finish(work, clock, "to take the last buckets")
        _finish(answered, clock, "to confirm the last bucket")

    def _arrival(self, store: dist.TCPStore, clock: _Clock) -> str:
        """Name of the lane that the member has opened."""
        while True:
            try:
                store.wait([_here(self.member)], min(clock.left(), _ASK))
                return store.get(_here(self.member)).decode()
            except dist.DistStoreError:
                if self.gone(self.member):
                    raise DeadlineExceeded(clock.subject, got="left", expected="it at the meeting place") from None
                if clock.left() <= _OVER:
                    raise


def _finish(work: Work | None, clock: _Clock, what: str) -> None:
    if work is not None:
        with clock.names(what):
            work.wait(clock.left())
        clock.moved()


class _Intake:
    """The receiver's side of one lane."""

    def __init__(
        self, group: dist.ProcessGroup, clock: _Clock, manifest: WeightManifest, header: _Header, sink: Sink
    ) -> None:
        self._group = group
        self._clock = clock
        self._sink = sink
        self._twins: dict[str, list[str]] = {}
        for alias, owner in header.aliases.items():
            self._twins.setdefault(owner, []).append(alias)
        self._specs = [spec for spec in manifest.tensors if spec.name not in header.aliases]
        self._sizes = [WeightManifest((spec,)).total_bytes for spec in self._specs]
        self._slots = [Bucket(header.bucket_bytes) for _ in range(2)]
        self._buckets = list(cut(self._sizes, header.bucket_bytes))
        # Tensors that are longer than a bucket come together here, one after the other.
        self._long = np.empty(max((s for s in self._sizes if s > header.bucket_bytes), default=0), dtype=np.uint8)

    def run(self) -> int:
        """Take bucket after bucket, hand over each tensor when it is complete, confirm; returns bytes moved."""
        for spec in (s for s, size in zip(self._specs, self._sizes, strict=True) if size == 0):
            self._sink(spec.name, torch.empty(spec.shape, dtype=DTYPES[spec.dtype]))
        coming = self._post(0)
        for number, (size, pieces) in enumerate(self._buckets):
            arriving, coming = coming, self._post(number + 1)
            _finish(arriving, self._clock, f"bucket {number} of {len(self._buckets)} from the sender")
            bucket = self._slots[number % 2]
            if not bucket.is_whole(size, number):
                self._answer(number)
                raise IntegrityError(
                    self._clock.subject, got=f"damaged bytes in bucket {number}", expected="the sender's checksum"
                )
            for piece in pieces:
                self._take(piece, bucket.payload[piece.offset : piece.offset + piece.size])
        self._answer(_ALL_WHOLE)
        return sum(self._sizes)

    def _post(self, number: int) -> Work | None:
        if number >= len(self._buckets):
            return None
        message = self._slots[number % 2].message(self._buckets[number][0])
        with self._clock.names(f"bucket {number}"):
            return self._group.recv([message], _SENDER, number)

    def _take(self, piece: Piece, payload: Bytes) -> None:
        size = self._sizes[piece.index]
        if piece.size == size:
            self._deliver(piece.index, payload)
            return
        self._long[piece.start : piece.start + piece.size] = payload
        if piece.start + piece.size == size:
            self._deliver(piece.index, self._long[:size])

    def _deliver(self, index: int, content: Bytes) -> None:
        spec = self._specs[index]
        tensor = torch.from_numpy(content).view(DTYPES[spec.dtype]).reshape(spec.shape)
        for name in (spec.name, *self._twins.get(spec.name, ())):
            self._sink(name, tensor)

    def _answer(self, verdict: int) -> None:
        _finish(
            self._group.send([torch.tensor([verdict])], _SENDER, _VERDICT_TAG),
            self._clock,
            "the sender to take the verdict",
        )
