"""The command bus: doorbells from the controller, reports from the workers, over ZeroMQ.

::

    controller  XPUB  --doorbell: call, desired state-->  SUB     worker
                ROUTER <--report: heartbeat, done, goodbye-- DEALER

Each side runs its sockets on one thread of its own, never the one that computes. The two sides of that
thread are a queue out and a queue in, each with a pipe that wakes the sleeper.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import zmq

from rlmq.common.errors import DecodeError, DependencyError
from rlmq.common.messages import (
    EVERYONE,
    MAX_MESSAGE_BYTES,
    Beat,
    Doorbell,
    Goodbye,
    Report,
    decode_doorbell,
    decode_report,
    encode,
)
from rlmq.common.run_folder import RunFolder

_LINGER_MS = 500
_SEND_QUEUE = 10_000
_BEAT_S = 1.0
_JOIN_S = 5.0


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

    def __init__(self, *, tick_s: float, name: str) -> None:
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._out_wake = Wake()
        self.wake = Wake()
        self.undecodable = 0
        self._tick_s = tick_s
        self._closing = threading.Event()
        self._context = zmq.Context(io_threads=1)
        self._context.setsockopt(zmq.LINGER, _LINGER_MS)
        self._context.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._context.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

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
                frames = socket.recv_multipart(zmq.NOBLOCK)
                try:
                    self._received(socket, frames)
                except DecodeError:
                    self.undecodable += 1

    @abstractmethod
    def _sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """The sockets to read from."""

    @abstractmethod
    def _transmit(self, item: Any) -> None:
        """Send one item of the outbox."""

    @abstractmethod
    def _received(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Take in one message. Raises DecodeError."""

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

    A report that is `quiet` (asked on the bus's thread) is there at the next look, and wakes nobody.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        epoch: int,
        tick: Callable[[], None],
        tick_s: float,
        quiet: Callable[[Report], bool] = lambda _: False,
    ) -> None:
        super().__init__(tick_s=_BEAT_S, name="bus")
        self._quiet = quiet
        self._beat = (EVERYONE.encode(), encode(Beat(epoch)))
        self._ticker = threading.Thread(target=self._keep_ticking, args=(tick, tick_s), name="tick", daemon=True)
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._doorbell = self._context.socket(zmq.XPUB)
        self._doorbell.setsockopt(zmq.XPUB_NODROP, 1)  # a full peer raises instead of losing the message
        self._router = self._context.socket(zmq.ROUTER)
        run.sockets.mkdir(mode=0o700, exist_ok=True)
        for socket, address in ((self._doorbell, run.doorbell_address), (self._router, run.reports_address)):
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise DependencyError(
                    f"control socket {address}", got=str(error), remedy="End the process that holds it"
                ) from error
        self._bound = {path: path.stat().st_ino for path in (run.sockets / "doorbell", run.sockets / "reports")}
        self._thread.start()
        self._ticker.start()

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
        return (self._doorbell, self._router)

    def _transmit(self, item: Any) -> None:
        with contextlib.suppress(zmq.Again):  # a peer that never reads: it will find the record
            self._doorbell.send_multipart(item, zmq.NOBLOCK)

    def _received(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if socket is self._router:
            report = decode_report(frames[-1])
            self._reports.put(report)
            if not self._quiet(report):
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
        *,
        role: str,
        identity: str,
        heard: Callable[[Doorbell], None],
        heartbeat: Callable[[], Report],
        heartbeat_s: float = 1.0,
    ) -> None:
        super().__init__(tick_s=heartbeat_s, name="bus")
        self._heard = heard
        self._heartbeat = heartbeat
        self._sub = self._context.socket(zmq.SUB)
        self._topics = (role.encode(), EVERYONE.encode())
        for topic in self._topics:
            self._sub.setsockopt(zmq.SUBSCRIBE, topic)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, identity.encode())
        self._sub.connect(run.doorbell_address)
        self._dealer.connect(run.reports_address)
        self._thread.start()

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
        return (self._sub, self._dealer)

    def _transmit(self, item: Any) -> None:
        with contextlib.suppress(zmq.Again):  # no controller for a long time: it reads the records later
            self._dealer.send(encode(item), zmq.NOBLOCK)

    def _received(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if socket is self._sub and frames[0] in self._topics:  # topics match by prefix
            bell = decode_doorbell(frames[-1])
            self._heard(bell)
            if not isinstance(bell, Beat):
                self.wake.set()

    def _tick(self) -> None:
        self._transmit(self._heartbeat())
