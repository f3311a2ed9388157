"""The command bus: doorbells from the controller, reports from the workers, over ZeroMQ.

::

    controller  XPUB  --doorbell: call, desired state-->  SUB     worker
                ROUTER <--report: heartbeat, done, goodbye-- DEALER

Each side runs its sockets on one thread of its own, never the one that computes. The two sides of that
thread are a queue out and a queue in, each with a pipe that wakes the sleeper. With keys (`common/curve.py`) the
controller takes reports of a role from peers with that role's key only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import zmq

from rlmq.common.curve import OPERATOR, Door
from rlmq.common.endpoints import Endpoints
from rlmq.common.errors import DecodeError, DependencyError
from rlmq.common.handshakes import Arrivals, Attempts, Refusals
from rlmq.common.messages import (
    EVERYONE,
    MAX_MESSAGE_BYTES,
    Beat,
    DesiredBell,
    Done,
    Doorbell,
    Goodbye,
    Heartbeat,
    Ordered,
    Report,
    decode_doorbell,
    decode_report,
    encode,
)
from rlmq.common.metrics import DOORBELLS_DROPPED
from rlmq.common.recipe.schema import ControlBlock
from rlmq.common.run_folder import RunFolder

_LINGER_MS = 500
_SEND_QUEUE = 1000
_BACKLOG = 4096
_BEAT_S = 1.0
_JOIN_S = 5.0
_FILES = 65_536
_LINK_OPTIONS = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 15_000,  # a peer whose window stays shut that long, in milliseconds, is dropped
}
_PING_OPTIONS = {zmq.HEARTBEAT_IVL: 3_000, zmq.HEARTBEAT_TIMEOUT: 9_000, zmq.HEARTBEAT_TTL: 9_000}
"""A worker asks every three seconds whether the link is whole; after nine without a word each side lets go."""


class Wake:
    """A pipe that makes a sleeping thread look at its queue: level-triggered, so no wake-up is lost."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def set(self) -> None:
        """Wake the sleeper; callable from any thread and from signal handlers."""
        with contextlib.suppress(BlockingIOError):  # a full pipe is awake already
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Forget wake-ups up to now; look at the queue after this, not before."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Close both ends."""
        os.close(self.fd)
        os.close(self._write_fd)


class _Bus(ABC):
    """One thread that owns the sockets; subclasses say which, and what to do with what arrives."""

    def __init__(self, endpoints: Endpoints, *, tick_s: float) -> None:
        self._endpoints = endpoints
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._out_wake = Wake()
        self.wake = Wake()
        self.refusals = Refusals()
        self._tick_s = tick_s
        self._closing = threading.Event()
        self._context = zmq.Context(io_threads=1)
        self._context.setsockopt(zmq.LINGER, _LINGER_MS)
        self._context.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._context.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        if endpoints.remote:
            self._context.setsockopt(zmq.IPV6, int("[" in endpoints.doorbell))
            for option, value in _LINK_OPTIONS.items():
                self._context.setsockopt(option, value)
        self._thread = threading.Thread(target=self._serve, name="bus", daemon=True)

    def _send(self, item: Any) -> None:
        self._outbox.put(item)
        self._out_wake.set()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._out_wake.fd, zmq.POLLIN)
        for socket in self._sockets():
            poller.register(socket, zmq.POLLIN)
        next_tick = time.monotonic()
        while not self._closing.is_set():
            timeout_s = max(0.0, next_tick - time.monotonic())
            events = dict(poller.poll(int(timeout_s * 1000) + 1))
            if self._out_wake.fd in events:
                self._out_wake.clear()
            self._flush_outbox()
            for socket in self._sockets():
                if socket in events:
                    self._receive_all(socket)
            if time.monotonic() >= next_tick:
                self._tick()
                next_tick = time.monotonic() + self._tick_s
        self._flush_outbox()
        for socket in self._sockets():
            socket.close()

    def _flush_outbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._transmit(self._outbox.get_nowait())

    def _receive_all(self, socket: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                try:
                    self._receive(socket)
                except DecodeError:
                    self.refusals.add("undecodable")

    @abstractmethod
    def _sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to read from."""

    @abstractmethod
    def _transmit(self, item: Any) -> None:
        """Send one item of the outbox."""

    @abstractmethod
    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        """Take in one message. Raises DecodeError, and zmq.Again when there is none."""

    @abstractmethod
    def _tick(self) -> None:
        """Called every `tick_s` on the bus thread."""

    def close(self) -> None:
        """Send what is queued, end the thread, close everything."""
        self._closing.set()
        self._out_wake.set()
        self._thread.join(timeout=_JOIN_S)
        self._context.term()
        self._out_wake.close()
        self.wake.close()


class ControllerBus(_Bus):
    """Rings doorbells and collects reports; tells everyone once a second that the epoch's controller lives.

    A subscriber that does not read misses doorbells (counted) and holds nobody up. A report that is `quiet` (asked
    on the bus's thread) is there at the next look, and wakes nobody.
    """

    def __init__(
        self,
        run: RunFolder,
        control: ControlBlock | None = None,
        *,
        epoch: int,
        tick: Callable[[], None],
        tick_s: float,
        quiet: Callable[[Report], bool] = lambda _: False,
    ) -> None:
        super().__init__(Endpoints.of(run, control), tick_s=_BEAT_S)
        self.quiet = quiet
        self._beat = (EVERYONE.encode(), encode(Beat(epoch)))
        self._ticker = threading.Thread(target=self._keep_ticking, args=(tick, tick_s), name="tick", daemon=True)
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        _allow_many_files()
        try:
            self._open(run)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread.start()
        self._ticker.start()

    def _open(self, run: RunFolder) -> None:
        keys = self._endpoints.keys
        self._door = Door(keys, self._context.socket(zmq.REP)) if keys is not None else None
        self._doorbell = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._arrivals = [Arrivals(socket, self.refusals) for socket in (self._doorbell, self._router)]
        self._bound: dict[Path, int] = {}
        if not self._endpoints.remote:
            run.sockets.mkdir(mode=0o700, exist_ok=True)
        addresses = (self._endpoints.doorbell, self._endpoints.reports)
        for socket, address in zip((self._doorbell, self._router), addresses, strict=True):
            socket.setsockopt(zmq.BACKLOG, _BACKLOG)
            if keys is not None:
                keys.serve(socket)
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise DependencyError(
                    f"control socket {address}", got=str(error), remedy="End the process that holds it"
                ) from error
            if not self._endpoints.remote:
                path = Path(address.removeprefix("ipc://"))
                self._bound[path] = path.stat().st_ino
        if self._endpoints.remote and keys is None:
            structlog.get_logger().warning(
                "no keys: every user of this machine can steer this run", address=self._endpoints.doorbell
            )

    def close(self) -> None:
        """Close, and remove the socket files unless a later controller has put its own there."""
        super().close()
        self._ticker.join(timeout=_JOIN_S)
        for path, inode in self._bound.items():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()
            with contextlib.suppress(OSError):  # somebody else's sockets are in it too
                path.parent.rmdir()

    def ring(self, role: str, bell: Doorbell) -> None:
        """Send a doorbell to every worker of a role."""
        self._send((role.encode(), encode(bell)))

    def reports(self) -> list[Report]:
        """Reports since the last call; clears the wake-up first, so that none is missed."""
        self.wake.clear()
        found: list[Report] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._reports.get_nowait())
        return found

    def _sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        doors = (self._door.socket,) if self._door is not None else ()
        return (*doors, self._doorbell, self._router, *(arrival.socket for arrival in self._arrivals))

    def _transmit(self, item: Any) -> None:
        """Send to every subscriber; one that is full misses it, and will find the record."""
        self._doorbell.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            self._doorbell.send_multipart(item, zmq.NOBLOCK)
        except zmq.Again:
            DOORBELLS_DROPPED.inc()
            self._doorbell.setsockopt(zmq.XPUB_NODROP, 0)
            self._doorbell.send_multipart(item, zmq.NOBLOCK)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        if socket is self._router:
            self._take_report()
        elif socket is self._doorbell:
            socket.recv(zmq.NOBLOCK)  # a subscription
        elif self._door is not None and socket is self._door.socket:
            if (refused := self._door.answer()) is not None:
                self.refusals.add("key", address=refused[0], key=refused[1])
        else:
            next(arrival for arrival in self._arrivals if arrival.socket is socket).take()

    def _take_report(self) -> None:
        frame = self._router.recv_multipart(zmq.NOBLOCK, copy=False, track=False)[-1]
        try:
            report = decode_report(frame.bytes)
        except DecodeError:
            self.refusals.add("undecodable", address=_told(frame, "Peer-Address"), key_of=_told(frame, "User-Id"))
            return
        if self._door is not None and not may_say(speaker := _told(frame, "User-Id"), report):
            self.refusals.add("role", address=_told(frame, "Peer-Address"), key_of=speaker)
            return
        self._reports.put(report)
        if not self.quiet(report):
            self.wake.set()

    def _tick(self) -> None:
        self._transmit(self._beat)

    def _keep_ticking(self, tick: Callable[[], None], tick_s: float) -> None:
        """On a thread of its own: while the server is away, workers still hear the beat."""
        while not self._closing.wait(tick_s):
            tick()


class WorkerBus(_Bus):
    """Hears doorbells, sends reports and a heartbeat."""

    def __init__(
        self,
        run: RunFolder,
        control: ControlBlock | None = None,
        *,
        role: str,
        heard: Callable[[Doorbell], None],
        heartbeat: Callable[[], Report],
        heartbeat_s: float = 1.0,
    ) -> None:
        super().__init__(Endpoints.of(run, control), tick_s=heartbeat_s)
        self._heard = heard
        self._heartbeat = heartbeat
        self._topics = (role.encode(), EVERYONE.encode())
        self._sub = self._context.socket(zmq.SUB)
        self._dealer = self._context.socket(zmq.DEALER)
        self._attempts = Attempts(self._dealer, self._endpoints.reports, self._endpoints.keys, role)
        for topic in self._topics:
            self._sub.setsockopt(zmq.SUBSCRIBE, topic)
        connect(self._sub, self._endpoints, self._endpoints.doorbell, role)
        connect(self._dealer, self._endpoints, self._endpoints.reports, role)
        self._thread.start()

    def check(self) -> None:
        """Raise what made the controller refuse this worker for good.

        Raises:
            DependencyError: it is about the key; the file is named.
        """
        if self._attempts.failure is not None:
            raise self._attempts.failure

    def report(self, report: Report) -> None:
        """Send a report; it may be lost."""
        self._send(report)

    def beat(self) -> None:
        """Send a heartbeat now: the activity changed."""
        self._send(self._heartbeat())

    def leave(self, goodbye: Goodbye) -> None:
        """Say goodbye and close."""
        self._send(goodbye)
        self.close()

    def _sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        return (self._sub, self._dealer, self._attempts.socket)

    def _transmit(self, item: Any) -> None:
        with contextlib.suppress(zmq.Again):  # no controller for a long time: it reads the records later
            self._dealer.send(encode(item), zmq.NOBLOCK)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        if socket is self._sub:
            self._take_bell(*socket.recv_multipart(zmq.NOBLOCK))
        elif socket is self._dealer:
            socket.recv_multipart(zmq.NOBLOCK)  # the controller says nothing here
        else:
            self._attempts.take()
            if self._attempts.failure is not None:
                self.wake.set()

    def _take_bell(self, topic: bytes, *frames: bytes) -> None:
        if topic not in self._topics or not frames:  # topics match by prefix
            return
        bell = decode_doorbell(frames[-1])
        self._heard(bell)
        if isinstance(bell, DesiredBell):
            self._transmit(self._heartbeat())  # the acknowledgement
        if not isinstance(bell, Beat):
            self.wake.set()

    def _tick(self) -> None:
        self._transmit(self._heartbeat())


def connect(socket: zmq.Socket[bytes], endpoints: Endpoints, address: str, name: str) -> None:
    """Connect a socket of a role (or of an operator) to one of the controller's.

    Raises:
        DependencyError: its key is missing. UsageError: others can read it.
    """
    if endpoints.remote:
        for option, value in _PING_OPTIONS.items():
            socket.setsockopt(option, value)
    if endpoints.keys is not None:
        endpoints.keys.knock(socket, name)
    socket.connect(address)


def _told(frame: zmq.Frame, name: str) -> str:
    """What ZeroMQ itself tells of a message's sender; nothing where it knows nothing."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


def may_say(speaker: str, report: Report) -> bool:
    """Whether the owner of this name's key may send the report: a role speaks for itself, an operator orders."""
    match report:
        case Ordered():
            return speaker == OPERATOR
        case Heartbeat() | Goodbye():
            return report.role == speaker
        case Done(result):
            return result.call_id.rpartition("/")[2].partition(".")[0] == speaker


def ring_controller(run: RunFolder, control: ControlBlock | None = None) -> None:
    """Tell the controller that an order was stored; when this is lost, it looks a second later.

    Raises:
        DependencyError: the operator's key is missing. UsageError: others can read it.
    """
    endpoints = Endpoints.of(run, control)
    with zmq.Context(io_threads=1) as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, _LINGER_MS)
        connect(dealer, endpoints, endpoints.reports, OPERATOR)
        dealer.send(encode(Ordered()))


def _allow_many_files() -> None:
    """Every worker is two connections: use what the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
