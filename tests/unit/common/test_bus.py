"""The command bus over real sockets."""

from __future__ import annotations

import select
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from rlmq.common.bus import ControllerBus, WorkerBus
from rlmq.common.calls import Call, Desired
from rlmq.common.errors import DependencyError
from rlmq.common.messages import Beat, CallBell, DesiredBell, Doorbell, Goodbye, Heartbeat, Report
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
