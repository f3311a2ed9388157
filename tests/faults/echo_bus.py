"""A proxy between the controller's sockets and those of chosen workers, which loses, repeats and reorders messages.

Each worker gets a pair of sockets of its own (`echo_patches.py` makes it connect there), so that one link can be
silent while the others work. The messages themselves are not looked at.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

_POLL_MS = 20


class Link:
    """One worker's way to the controller and back. Its fields may be changed at any time.

    `lost` is the share of messages that get lost, `copies` how often one arrives, `late` the share that
    arrives after the message that follows it; `deaf` loses all doorbells, `silent` lets nothing through either way.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sockets: Path, name: str, rng: random.Random
    ) -> None:
        self.lost, self.copies, self.late = 0.0, 1, 0.0
        self.silent = self.deaf = False
        self.dropped = 0
        self._context, self._sockets, self._rng = context, sockets, rng
        self._held: dict[int, tuple[zmq.Socket[bytes], list[bytes]]] = {}
        self._down = context.socket(zmq.SUB)
        self._down.setsockopt(zmq.SUBSCRIBE, b"")
        self._down.connect(f"ipc://{sockets}/doorbell")
        self._bell = context.socket(zmq.PUB)
        self._bell.bind(f"ipc://{sockets}/{name}-doorbell")
        self._up = context.socket(zmq.ROUTER)
        self._up.bind(f"ipc://{sockets}/{name}-reports")
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}

    def turn(self) -> None:
        """Carry what has arrived."""
        with suppress(zmq.Again):
            while True:
                self._carry(self._bell, self._down.recv_multipart(zmq.NOBLOCK))
        with suppress(zmq.Again):
            while True:
                identity, *rest = self._up.recv_multipart(zmq.NOBLOCK)
                self._carry(self._dealer(identity), rest)

    def _dealer(self, identity: bytes) -> zmq.Socket[bytes]:
        if identity not in self._dealers:
            dealer = self._dealers[identity] = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, identity)
            dealer.connect(f"ipc://{self._sockets}/reports")
        return self._dealers[identity]

    def _carry(self, to: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if self.silent or (self.deaf and to is self._bell) or self._rng.random() < self.lost:
            self.dropped += 1
            return
        if id(to) not in self._held and self._rng.random() < self.late:
            self._held[id(to)] = (to, frames)
            return
        earlier = self._held.pop(id(to), None)
        for socket, message in [(to, frames), *([earlier] if earlier else [])]:
            for _ in range(self.copies):
                with suppress(zmq.Again):
                    socket.send_multipart(message, zmq.NOBLOCK)


class BusProxy:
    """The links of these workers, on a thread of its own."""

    def __init__(self, sockets: Path, names: Sequence[str], rng: random.Random) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self.links = {name: Link(self._context, sockets, name, rng) for name in names}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="bus proxy", daemon=True)
        self._thread.start()

    def set(self, *, lost: float = 0.0, copies: int = 1, late: float = 0.0, deaf: bool = False) -> None:
        """The same for every link."""
        for link in self.links.values():
            link.lost, link.copies, link.late, link.deaf = lost, copies, late, deaf

    @property
    def dropped(self) -> int:
        """Messages that got lost."""
        return sum(link.dropped for link in self.links.values())

    def _serve(self) -> None:
        while not self._closing.wait(_POLL_MS / 1000):
            for link in self.links.values():
                link.turn()

    def close(self) -> None:
        """End the thread, close everything."""
        self._closing.set()
        self._thread.join(10)
        self._context.destroy(linger=0)
