"""The command bus over real sockets."""

from __future__ import annotations

import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from rlmq.common.bus import ControllerBus, WorkerBus
from rlmq.common.calls import Call, Desired
from rlmq.common.errors import DependencyError
from rlmq.common.messages import Beat, CallBell, DesiredBell, Doorbell, Goodbye, Heartbeat, Report
from rlmq.common.metrics import DOORBELLS_DROPPED
from rlmq.common.recipe.schema import ControlBlock
from rlmq.common.run_folder import RunFolder


@pytest.fixture
def run() -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory(prefix="rlmq-bus-") as folder:
        yield RunFolder(Path(folder))


def beat(rank: int = 0, incarnation: int = 1) -> Heartbeat:
    return Heartbeat(
        role="reward",
        rank=rank,
        incarnation=incarnation,
        activity="idle",
        ready=True,
        serving=-1,
        progress=0,
        activity_s={},
    )


def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)


@contextmanager
def controller(run: RunFolder) -> Iterator[ControllerBus]:
    bus = ControllerBus(run, epoch=1, tick=lambda: None, tick_s=0.2)
    try:
        yield bus
    finally:
        bus.close()


@contextmanager
def worker(run: RunFolder, heard: list[Doorbell], role: str = "reward") -> Iterator[WorkerBus]:
    bus = WorkerBus(run, role=role, heard=heard.append, heartbeat=beat, heartbeat_s=0.1)
    try:
        yield bus
    finally:
        bus.close()


def reports_of(bus: ControllerBus, found: list[Report]) -> list[Report]:
    found.extend(bus.reports())
    return found


def test_a_worker_that_started_before_the_controller_is_heard(run: RunFolder) -> None:
    # given a worker whose controller is not there yet
    with worker(run, []), controller(run) as bus:
        # when the controller has bound its sockets, then the heartbeat arrives
        found: list[Report] = []
        wait_until(lambda: any(isinstance(r, Heartbeat) for r in reports_of(bus, found)))


def test_a_doorbell_carries_the_call_to_its_role_only(run: RunFolder) -> None:
    heard: list[Doorbell] = []
    others: list[Doorbell] = []
    call = Call(id="1/1/reward.score", role="reward", method="score", ranks=(0,), args={"step": 1})
    with controller(run) as bus, worker(run, heard), worker(run, others, role="rewards"):

        def rang() -> bool:  # a new subscriber misses what was sent before: ring until it hears
            bus.ring("reward", CallBell(call))
            return any(not isinstance(bell, Beat) for bell in heard)

        wait_until(rang)
    assert next(bell for bell in heard if not isinstance(bell, Beat)) == CallBell(call)
    assert all(isinstance(bell, Beat) for bell in others)


def test_a_report_wakes_the_controllers_sleep(run: RunFolder) -> None:
    with controller(run) as bus, worker(run, []) as reporter:
        wait_until(lambda: bool(bus.reports()))
        bye = Goodbye(role="reward", rank=0, incarnation=1, exit_code=0)
        reporter.report(bye)
        found: list[Report] = []
        while bye not in found:
            assert select.select([bus.wake.fd], [], [], 10.0)[0], "no wake-up"
            reports_of(bus, found)


def test_bytes_that_are_no_message_are_counted_and_dropped(run: RunFolder) -> None:
    with controller(run) as bus:
        context = zmq.Context()
        try:
            hostile = context.socket(zmq.DEALER)
            hostile.setsockopt(zmq.LINGER, 0)
            hostile.connect(run.reports_address)
            for data in (b"", b"\x80\x04\x95", b"\xff" * 1000, b"\x93" * 100_000):
                hostile.send(data)
            wait_until(lambda: bus.refusals.counts.get("undecodable") == 4)
            # then the bus still works
            with worker(run, []):
                wait_until(lambda: bool(bus.reports()))
        finally:
            hostile.close()
            context.term()


def test_a_desired_state_survives_the_wire_unchanged(run: RunFolder) -> None:
    heard: list[Doorbell] = []
    desired = Desired(role="reward", version=7, phase="drain", policy_version=3, epoch=2)
    with controller(run) as bus, worker(run, heard):

        def rang() -> bool:
            bus.ring("reward", DesiredBell(desired))
            return any(not isinstance(bell, Beat) for bell in heard)

        wait_until(rang)
    assert next(bell for bell in heard if not isinstance(bell, Beat)) == DesiredBell(desired)


def test_every_role_hears_that_the_controller_lives(run: RunFolder) -> None:
    heard: list[Doorbell] = []
    others: list[Doorbell] = []
    with controller(run), worker(run, heard), worker(run, others, role="actor"):
        wait_until(lambda: Beat(1) in heard and Beat(1) in others)


def test_a_tick_that_hangs_does_not_silence_the_beat(run: RunFolder) -> None:
    # given a lease renewal that waits for its server
    heard: list[Doorbell] = []
    hanging, go_on = threading.Event(), threading.Event()

    def tick() -> None:
        hanging.set()
        go_on.wait(60.0)

    bus = ControllerBus(run, epoch=4, tick=tick, tick_s=0.01)
    try:
        assert hanging.wait(10.0)
        # when a worker comes, then it hears the beat
        with worker(run, heard):
            wait_until(lambda: Beat(4) in heard)
    finally:
        go_on.set()
        bus.close()


def test_a_socket_path_that_is_taken_is_named(run: RunFolder) -> None:
    run.sockets.mkdir(mode=0o700, exist_ok=True)
    (run.sockets / "doorbell").mkdir()
    try:
        with pytest.raises(DependencyError, match="doorbell"):
            ControllerBus(run, epoch=1, tick=lambda: None, tick_s=1.0)
    finally:
        (run.sockets / "doorbell").rmdir()
        run.sockets.rmdir()


def test_closing_ends_the_thread(run: RunFolder) -> None:
    before = threading.active_count()
    with controller(run), worker(run, []):
        assert threading.active_count() > before
    wait_until(lambda: threading.active_count() == before)


def test_closing_leaves_no_socket_file(run: RunFolder) -> None:
    with controller(run), worker(run, []):
        assert run.sockets.is_dir()
    assert not run.sockets.exists()


def test_a_controller_that_was_replaced_leaves_the_new_ones_sockets(run: RunFolder) -> None:
    # given a second controller that has bound the same addresses after the first
    old = ControllerBus(run, epoch=1, tick=lambda: None, tick_s=1.0)
    with controller(run) as new:
        # when the first one closes
        old.close()
        # then the second is still reached
        with worker(run, []):
            wait_until(lambda: bool(new.reports()))


@pytest.mark.timeout(90)
def test_a_subscriber_that_never_reads_costs_nobody_a_doorbell(run: RunFolder) -> None:
    # given a subscriber that reads nothing, and one that does
    heard: list[Doorbell] = []
    context = zmq.Context()
    deaf = context.socket(zmq.SUB)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.SUBSCRIBE, b"reward")
    dropped = DOORBELLS_DROPPED._value.get()
    try:
        with controller(run) as bus, worker(run, heard):
            deaf.connect(run.doorbell_address)
            wait_until(lambda: bool(heard))  # a beat: it has subscribed to its role before

            def reach(first: int) -> None:
                """Ring a hundred times; the one that reads hears the last of them."""
                for number in range(first, first + 100):
                    bus.ring("reward", bell(number))
                wait_until(lambda: bell(first + 99) in heard)
                heard.clear()

            # when more is rung than fits between here and the deaf one
            first = 0
            while DOORBELLS_DROPPED._value.get() == dropped:
                reach(first)
                first += 100
                assert first < 20_000, "nothing was too much"
            # then the other one still hears
            reach(first)
    finally:
        deaf.close(linger=0)
        context.term()


def bell(number: int) -> CallBell:
    """A doorbell of 2 kB."""
    args = {"text": "x" * 2_000}
    return CallBell(Call(id=f"{number}/1/reward.score", role="reward", method="score", ranks=(0,), args=args))


@pytest.mark.timeout(120)
def test_a_link_that_is_silently_cut_is_made_anew(run: RunFolder) -> None:
    # given a worker whose link goes through a proxy
    with ProxyPair() as proxy:
        far = ControlBlock(address=f"tcp://127.0.0.1:{proxy.to}")
        near = ControlBlock(address=f"tcp://127.0.0.1:{proxy.port}")
        heard: list[Doorbell] = []
        bus = ControllerBus(run, far, epoch=1, tick=lambda: None, tick_s=1.0)
        reporter = WorkerBus(run, near, role="reward", heard=heard.append, heartbeat=beat, heartbeat_s=0.2)
        try:
            wait_until(lambda: bool(bus.reports()) and bool(heard))
            # when the proxy swallows what is sent over the connections that there are, and closes none
            proxy.swallow()
            heard.clear()
            bus.reports()
            # then both sides let go of them, and meet again
            wait_until(lambda: bool(bus.reports()) and bool(heard), 60.0)
        finally:
            reporter.close()
            bus.close()


class ProxyPair:
    """Two neighbouring ports that lead to two others, with connections that can be cut without a word."""

    def __init__(self) -> None:
        self.port, self.to = _two_ports(), _two_ports()
        self._swallowed: set[socket.socket] = set()
        self._open: list[socket.socket] = []
        self._listeners = [socket.create_server(("127.0.0.1", self.port + n)) for n in range(2)]
        for n, listener in enumerate(self._listeners):
            threading.Thread(target=self._accept, args=(listener, self.to + n), daemon=True).start()

    def _accept(self, listener: socket.socket, port: int) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if source not in self._swallowed:
                    sink.sendall(data)
            if source not in self._swallowed:
                sink.close()

    def swallow(self) -> None:
        self._swallowed |= set(self._open)

    def __enter__(self) -> ProxyPair:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self._listeners, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _two_ports() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            with suppress(OSError):
                two.bind(("127.0.0.1", port + 1))
                return port
