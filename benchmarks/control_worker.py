"""Workers for `rlmq bench control`: many in one process, with the sockets, keys and messages of real ones.

Each has a SUB and a DEALER of its own, joins by the records, sends a heartbeat a second, and answers a desired
state with a heartbeat at once, as `rlmq.common.bus.WorkerBus` does.

    python -m benchmarks.control_worker SETTINGS FIRST COUNT

A line on stdin lets them connect; the process ends when stdin is closed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import zmq

from benchmarks.control_settings import HOST, ROLE, Settings
from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.bus import connect
from rlmq.common.calls import Desired
from rlmq.common.endpoints import Endpoints
from rlmq.common.messages import EVERYONE, DesiredBell, Heartbeat, decode_doorbell, encode
from rlmq.common.run_folder import RunFolder

_MOST_SOCKETS = 8192


class EchoWorker:
    """One worker: two sockets, and what it tells of itself."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], rank: int) -> None:
        self.rank = rank
        self.sub = context.socket(zmq.SUB)
        self.dealer = context.socket(zmq.DEALER)
        self.topics = (ROLE.encode(), EVERYONE.encode())
        for topic in self.topics:
            self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.incarnation = 0
        self.ready = False
        self.desired = 0
        self.activity = "idle"
        self.began = time.monotonic()

    def join(self, endpoints: Endpoints, calls: RedisCalls) -> None:
        """Register in the records and connect."""
        self.incarnation = calls.join(ROLE, self.rank, fingerprint="bench")
        connect(self.sub, endpoints, endpoints.doorbell, ROLE)
        connect(self.dealer, endpoints, endpoints.reports, ROLE)
        loop = asyncio.get_running_loop()
        loop.add_reader(int(self.sub.getsockopt(zmq.FD)), self.listen)
        loop.call_soon(self.beat)

    def beat(self) -> None:
        """Tell, once a second."""
        self.tell()
        self.listen()  # ZeroMQ's descriptor is edge-triggered: look, lest one was missed
        asyncio.get_running_loop().call_later(1.0, self.beat)

    def tell(self) -> None:
        """One heartbeat."""
        heartbeat = Heartbeat(
            role=ROLE,
            rank=self.rank,
            incarnation=self.incarnation,
            activity=self.activity,
            ready=self.ready,
            serving=1,
            progress=0,
            activity_s={self.activity: time.monotonic() - self.began},
            desired=self.desired,
            pid=1,
            host=HOST,
        )
        self.dealer.send(encode(heartbeat), zmq.NOBLOCK)

    def listen(self) -> None:
        """Take in all doorbells; ready once anything was heard."""
        while int(self.sub.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            topic, frame = self.sub.recv_multipart(zmq.NOBLOCK)
            bell = decode_doorbell(frame)
            news = not self.ready
            self.ready = True
            if topic in self.topics and isinstance(bell, DesiredBell):
                news = self.learn(bell.desired) or news
            if news:
                self.tell()

    def learn(self, desired: Desired) -> bool:
        """Follow a desired state, unless it is old."""
        if desired.version <= self.desired:
            return False
        self.desired = desired.version
        self.activity = "generating" if desired.phase == "run" else "idle"
        return True


async def poll(workers: list[EchoWorker], calls: RedisCalls) -> None:
    """Read the records once a second, for all: a doorbell may be lost."""
    while True:
        await asyncio.sleep(1.0)
        desired = calls.wanted(ROLE)
        for worker in workers:
            if desired is not None and worker.learn(desired):
                worker.tell()


async def work(settings: Settings, first: int, count: int) -> None:
    """Arm the workers, wait for the word, join, and beat until stdin is closed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
    endpoints = Endpoints.of(RunFolder(settings.run), settings.control)
    workers = [EchoWorker(context, rank) for rank in range(first, first + count)]
    calls = RedisCalls(settings.redis_url, run_id=settings.run.name)
    print("armed", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for worker in workers:
        worker.join(endpoints, calls)
        await asyncio.sleep(0)
    print("joined", flush=True)
    polling = asyncio.create_task(poll(workers, calls))
    await asyncio.to_thread(sys.stdin.read)
    polling.cancel()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(work(Settings.from_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
