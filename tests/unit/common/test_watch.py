"""What can end a worker's work from outside: signals to a process that computes, and a beat that is missed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common import watch
from rlmq.common.watch import LinkWatch

pytestmark = pytest.mark.timeout(60)

COMPUTES = """
import hashlib, signal, sys
from rlmq.common.logs import configure
from rlmq.common.watch import SignalWatch
watch = SignalWatch(halt=lambda: print("halt", flush=True), drain_s=float(sys.argv[1]), log=configure("reward", 0))
watch.start()
signal.signal(signal.SIGUSR1, lambda *_: None)
print("computes", flush=True)
hashlib.pbkdf2_hmac("sha256", b"p", b"s", 200_000_000)  # minutes in one call, without the interpreter's lock
"""


def computes(drain_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", COMPUTES, str(drain_s)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "computes\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_that_computes_ends_in_time(number: int, code: int) -> None:
    # given a process that is inside a long call
    process = computes(drain_s=0.3)
    # when it is told to end, then it is told at once and ends when its time is over
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert "halt" in out


def test_a_signal_that_a_library_handles_is_no_order_to_end() -> None:
    # given a process in which somebody handles SIGUSR1
    process = computes(drain_s=0.1)
    process.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=1.5)
    # then it works on, and ends when it is told to
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_a_second_signal_ends_it_at_once() -> None:
    process = computes(drain_s=600.0)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert any("halt" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


class Link:
    """A watched link with a window of 0.5 s, whose breaks are noted."""

    def __init__(self, calls: RedisCalls) -> None:
        self.broken: list[int] = []
        self.looks = 0
        self.calls = calls
        self.watch = LinkWatch(controller=self.look, broken=self.broken.append, window_s=0.5)
        self.watch.start()

    def look(self) -> tuple[int, bool]:
        found = self.calls.controller()
        self.looks += 1
        return found


@pytest.fixture
def calls(redis_url: str) -> Iterator[RedisCalls]:
    made = RedisCalls(redis_url, run_id="watch")
    yield made
    made.close()


@pytest.fixture
def link(calls: RedisCalls, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(watch, "_TICK_S", 0.05)
    made = Link(calls)
    yield made
    made.watch.close()


def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)


def test_silence_of_a_controller_whose_lease_is_live_is_a_broken_link(calls: RedisCalls, link: Link) -> None:
    epoch = calls.begin_epoch(fingerprint="f", lease_s=60)
    wait_until(lambda: bool(link.broken))
    assert link.broken[0] == epoch


def test_without_a_live_controller_it_waits_on(calls: RedisCalls, link: Link) -> None:
    # given a controller that is gone
    calls.end_epoch(calls.begin_epoch(fingerprint="f", lease_s=60))
    # when the window has passed many times
    wait_until(lambda: link.looks > 40)
    assert not link.broken
    # and then a new one leads, without a beat
    epoch = calls.begin_epoch(fingerprint="f", lease_s=60)
    wait_until(lambda: bool(link.broken))
    assert link.broken == [epoch]


def test_a_beat_says_that_the_link_is_whole(calls: RedisCalls, link: Link) -> None:
    calls.begin_epoch(fingerprint="f", lease_s=60)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        link.watch.beat()
        time.sleep(0.005)
    assert not link.broken


def test_without_the_records_nobody_can_tell(own_server, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a controller whose lease is live, and a server that goes away with it
    monkeypatch.setattr(watch, "_TICK_S", 0.05)
    calls = RedisCalls(own_server.url, run_id="watch", retry_s=0.1)
    calls.begin_epoch(fingerprint="f", lease_s=600)
    own_server.kill()
    tries: list[int] = []
    broken: list[int] = []

    def look() -> tuple[int, bool]:
        tries.append(1)
        return calls.controller()

    link = LinkWatch(controller=look, broken=broken.append, window_s=0.5)
    link.start()
    # then no link is called broken, however long it takes
    wait_until(lambda: len(tries) > 8)
    assert not broken
    link.close()
    calls.close()
