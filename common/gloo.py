"""Weights between two processes over gloo: one disposable two-member group per generation and receiver.

The stream of all tensors' bytes, in manifest order, is cut into buckets of equal size. Each bucket ends
with its number and a checksum. Two buffers on each side: one is on the wire while the other is packed or
unpacked. A receiver that dies or stops ends its own lane only.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from rlmq.common.errors import DeadlineExceeded, IntegrityError, RlmqError, UsageError
from rlmq.common.weights import Rendezvous, TensorSpec, TransferStats, WeightManifest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

Tensors = Sequence[tuple[str, torch.Tensor]]
Sink = Callable[[str, torch.Tensor], None]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_HOST = "127.0.0.1"
_SENDER, _RECEIVER = 0, 1
_WORD_BYTES = 8
_TRAILER_WORDS = 3  # bucket number, two sums
_ACK_TAG = 1 << 20


class GlooTransport:
    """`WeightTransport` over gloo on the loopback interface; tensors on a GPU are staged through the host.

    Nothing is read from `MASTER_ADDR` or `MASTER_PORT`: every generation listens on a free port of its own.
    """

    def __init__(self, *, timeout_s: float = 120.0, bucket_bytes: int = 64 << 20) -> None:
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
        self, meeting: Rendezvous, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> TransferStats:
        """Send every tensor to every member, each in a lane of its own; returns when all have confirmed.

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
        store.set("manifest", _digest(manifest).hex())  # type: ignore[arg-type]  # bytes are fine; torch's stub says str
        lanes = [
            _Lane(meeting, member, store, own, self._bucket_bytes, started + meeting.timeout_s)
            for member in meeting.members
        ]
        threads = [threading.Thread(target=lane.run, name=f"weights-{lane.member}") for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del self._stores[meeting.generation]
        _raise_failures(meeting, lanes)
        return TransferStats(manifest.total_bytes * len(lanes), time.monotonic() - started)

    def receive(self, meeting: Rendezvous, member: str, manifest: WeightManifest, sink: Sink) -> TransferStats:
        """Receive every tensor and hand it to `sink`, whole and checked.

        Raises:
            IntegrityError: a bucket's checksum differs, or the sender sends another manifest.
            DeadlineExceeded: the sender stopped; names the bucket and the generation.
        """
        started = time.monotonic()
        clock = _Clock(started + meeting.timeout_s, f"weight transfer {meeting.generation} to {member}")
        with clock.names("the meeting place"):
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=clock.left())
            offered = bytes(store.get("manifest"))
        if offered.decode() != _digest(manifest).hex():
            raise IntegrityError(
                clock.subject,
                got="another manifest than the sender's",
                expected="the same tensor names, shapes and dtypes on both sides",
                remedy="Check that trainer and generation engine load the same model and train.dtype",
            )
        with clock.names("the sender to join"):
            group = _group(store, member, _RECEIVER, clock.left())
        _Intake(group, clock, manifest, self._bucket_bytes, sink).run()
        return TransferStats(manifest.total_bytes, time.monotonic() - started)


def _checked(manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    own = [(name, tensor.detach()) for name, tensor in tensors]
    names = {dtype: name for name, dtype in _DTYPES.items()}
    for spec, (name, tensor) in zip(manifest.tensors, own, strict=False):
        found = TensorSpec(name, tuple(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)))
        if found != spec:
            raise IntegrityError("weights to send", got=found, expected=f"{spec} as in the manifest")
    if len(own) != len(manifest.tensors):
        raise IntegrityError(
            "weights to send", got=f"{len(own)} tensors", expected=f"the manifest's {len(manifest.tensors)}"
        )
    return own


def _digest(manifest: WeightManifest) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(manifest)).digest()


def _group(store: dist.Store, member: str, rank: int, timeout: timedelta) -> dist.ProcessGroup:
    """The two-member group of one receiver; raw, so that no default group and no environment is involved."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stub lacks most of its members
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_HOST)]
    options._timeout = timeout
    group: dist.ProcessGroup = gloo(dist.PrefixStore(member, store), rank, 2, options)
    return group


def _raise_failures(meeting: Rendezvous, lanes: Sequence[_Lane]) -> None:
    failures = {lane.member: lane.failure for lane in lanes if lane.failure is not None}
    if not failures:
        return
    damaged = any(isinstance(f, IntegrityError) for f in failures.values())
    raise (IntegrityError if damaged else DeadlineExceeded)(
        f"weight transfer {meeting.generation}",
        got="; ".join(str(failure) for failure in failures.values()),
        expected=f"{len(lanes)} members to take all buckets within {meeting.timeout_s:g} s",
        remedy=f"Look at the log of {', '.join(failures)}",
    )


class _Clock:
    """The absolute deadline of one lane; turns what torch raises into who was waited for."""

    def __init__(self, deadline: float, subject: str) -> None:
        self._deadline = deadline
        self.subject = subject

    def left(self) -> timedelta:
        """Time to the deadline, at least 1 ms: torch takes zero for its own default of minutes."""
        return timedelta(seconds=max(0.001, self._deadline - time.monotonic()))

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
            reason = str(error).splitlines()[0]
            raise DeadlineExceeded(self.subject, got=reason, expected=self.what) from error


@dataclass(slots=True)
class _Bucket:
    """A message: payload bytes, padding to whole words, trailer. `words` is the same memory as int64."""

    words: torch.Tensor

    @classmethod
    def allocate(cls, bucket_bytes: int) -> _Bucket:
        payload = -(-bucket_bytes // _WORD_BYTES)
        return cls(torch.zeros(payload + _TRAILER_WORDS, dtype=torch.int64))

    def message(self, payload_bytes: int) -> torch.Tensor:
        """The words of a bucket with so much payload."""
        return self.words[: -(-payload_bytes // _WORD_BYTES) + _TRAILER_WORDS]

    def payload(self, payload_bytes: int) -> torch.Tensor:
        """The payload as uint8 [payload_bytes]."""
        return self.words.view(torch.uint8)[:payload_bytes]

    def seal(self, payload_bytes: int, number: int) -> None:
        """Write the trailer."""
        message = self.message(payload_bytes)
        message[-_TRAILER_WORDS] = number
        message[-_TRAILER_WORDS + 1 :] = _sums(message[:-_TRAILER_WORDS])

    def is_whole(self, payload_bytes: int, number: int) -> bool:
        """Whether number and sums are right."""
        message = self.message(payload_bytes)
        sums = _sums(message[:-_TRAILER_WORDS])
        return int(message[-_TRAILER_WORDS]) == number and bool((message[-_TRAILER_WORDS + 1 :] == sums).all())


def _sums(words: torch.Tensor) -> torch.Tensor:
    """Two sums modulo 2^64 [2]: of all words, and of lines of 512 words weighted by their number.

    The first changes with any flipped bit; the second also when lines change places (as in Fletcher's sum).
    """
    whole = words.numel() // 512
    lines = words[: whole * 512].view(whole, 512).sum(dim=1)
    rest = words[whole * 512 :].sum()
    weights = torch.arange(1, whole + 1)
    return torch.stack([lines.sum() + rest, (lines * weights).sum() - rest])


@dataclass(slots=True)
class _Piece:
    """`size` bytes of tensor `index` from its byte `start`, at byte `offset` of a bucket."""

    index: int
    start: int
    offset: int
    size: int


def _buckets(sizes: Sequence[int], bucket_bytes: int) -> Iterator[tuple[int, list[_Piece]]]:
    """Cut the stream of tensors of these byte sizes; yields (payload bytes, pieces) per bucket.

    Empty tensors are in no piece.
    """
    pieces: list[_Piece] = []
    filled = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            taken = min(size - start, bucket_bytes - filled)
            pieces.append(_Piece(index, start, filled, taken))
            start += taken
            filled += taken
            if filled == bucket_bytes:
                yield filled, pieces
                pieces, filled = [], 0
    if pieces:
        yield filled, pieces


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(slots=True)
class _Lane:
    """One receiver's sender thread."""

    meeting: Rendezvous
    member: str
    store: dist.Store
    tensors: Tensors
    bucket_bytes: int
    deadline: float
    failure: RlmqError | None = field(default=None)

    def run(self) -> None:
        """Send everything and wait for the confirmation; an error stays in `failure`."""
        try:
            self._send(_Clock(self.deadline, f"member {self.member}"))
        except RlmqError as error:
            self.failure = error

    def _send(self, clock: _Clock) -> None:
        with clock.names("to join the group"):
            # A prefix store shares the server's client connection; a lane that blocks must not block the others.
            store = dist.TCPStore(self.meeting.host, self.meeting.port, is_master=False, timeout=clock.left())
            group = _group(store, self.member, _SENDER, clock.left())
        slots = [_Bucket.allocate(self.bucket_bytes) for _ in range(2)]
        sent: list[Work | None] = [None, None]
        number = -1
        for number, (size, pieces) in enumerate(_buckets([t.nbytes for _, t in self.tensors], self.bucket_bytes)):
            slot = number % 2
            _finish(sent[slot], clock, f"to take bucket {number - 2}")
            payload = slots[slot].payload(size)
            for p in pieces:
                payload[p.offset : p.offset + p.size].copy_(
                    _bytes_of(self.tensors[p.index][1])[p.start : p.start + p.size]
                )
            slots[slot].seal(size, number)
            with clock.names(f"to take bucket {number}"):
                sent[slot] = group.send([slots[slot].message(size)], _RECEIVER, number)
        for ahead in (1, 0):
            _finish(sent[(number - ahead) % 2], clock, f"to take bucket {number - ahead}")
        self._confirm(group, clock)

    def _confirm(self, group: dist.ProcessGroup, clock: _Clock) -> None:
        verdict = torch.zeros(1, dtype=torch.int64)
        with clock.names("to confirm"):
            group.recv([verdict], _RECEIVER, _ACK_TAG).wait(clock.left())
        if int(verdict) >= 0:
            raise IntegrityError(clock.subject, got=f"damaged bytes in bucket {int(verdict)}")


def _finish(work: Work | None, clock: _Clock, what: str) -> None:
    if work is not None:
        with clock.names(what):
            work.wait(clock.left())


class _Intake:
    """The receiver's side of one lane."""

    def __init__(
        self, group: dist.ProcessGroup, clock: _Clock, manifest: WeightManifest, bucket_bytes: int, sink: Sink
    ) -> None:
        self._group = group
        self._clock = clock
        self._specs = manifest.tensors
        self._sink = sink
        self._slots = [_Bucket.allocate(bucket_bytes) for _ in range(2)]
        self._sizes = [WeightManifest((spec,)).total_bytes for spec in self._specs]
        self._buckets = list(_buckets(self._sizes, bucket_bytes))
        self._open: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        """Take bucket after bucket, hand over each tensor when it is complete, confirm at the end."""
        for index in (i for i, size in enumerate(self._sizes) if size == 0):
            self._sink(self._specs[index].name, self._empty(index))
        coming = self._post(0)
        for number, (size, pieces) in enumerate(self._buckets):
            arriving, coming = coming, self._post(number + 1)
            _finish(arriving, self._clock, f"bucket {number} of {len(self._buckets)} from the sender")
            bucket = self._slots[number % 2]
            if not bucket.is_whole(size, number):
                self._answer(number)
                raise IntegrityError(
                    self._clock.subject,
                    got=f"damaged bytes in bucket {number}",
                    expected="the sender's checksum",
                )
            self._unpack(bucket.payload(size), pieces)
        self._answer(-1)

    def _post(self, number: int) -> Work | None:
        if number >= len(self._buckets):
            return None
        message = self._slots[number % 2].message(self._buckets[number][0])
        with self._clock.names(f"bucket {number}"):
            return self._group.recv([message], _SENDER, number)

    def _unpack(self, payload: torch.Tensor, pieces: Sequence[_Piece]) -> None:
        for p in pieces:
            if p.index not in self._open:
                self._open[p.index] = self._empty(p.index)
            target = self._open[p.index].reshape(-1).view(torch.uint8)
            target[p.start : p.start + p.size].copy_(payload[p.offset : p.offset + p.size])
            if p.start + p.size == self._sizes[p.index]:
                self._sink(self._specs[p.index].name, self._open.pop(p.index))

    def _empty(self, index: int) -> torch.Tensor:
        spec = self._specs[index]
        return torch.empty(spec.shape, dtype=_DTYPES[spec.dtype])

    def _answer(self, verdict: int) -> None:
        _finish(
            self._group.send([torch.tensor([verdict])], _SENDER, _ACK_TAG), self._clock, "the sender's confirmation"
        )
