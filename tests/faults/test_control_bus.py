"""Faults 2, 3, 19, 20: messages between controller and workers that are lost, repeated, late, or never read."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import zmq
from faults.echo import Echo
from faults.echo_bus import BusProxy
from faults.scene import until

from rlmq.common.bus import ControllerBus, WorkerBus
from rlmq.common.calls import Call
from rlmq.common.messages import Beat, CallBell, Heartbeat
from rlmq.common.run_folder import RunFolder

pytestmark = pytest.mark.timeout(240)
WORKERS = ("prompts-0", "rollout-0", "rollout-1", "reward-0", "reward-1", "actor-0", "recorder-0")


@pytest.fixture
def proxied(echo, rng) -> Iterator[Callable]:
    """Starts a run all of whose messages go through a proxy; returns both."""
    proxies: list[BusProxy] = []

    def start(*overrides, steps, **link):
        run = echo(*overrides, steps=steps, echo=Echo(proxy=True))
        run.until(lambda: run.path is not None, "the run has a folder")
        sockets = RunFolder(run.run).sockets
        run.until(sockets.is_dir, "there is a folder for sockets")
        proxy = BusProxy(sockets, WORKERS, rng)
        proxy.set(**link)
        proxies.append(proxy)
        return run, proxy

    yield start
    for proxy in proxies:
        proxy.close()


def executed(run):
    """How often each call was carried out, by call and worker."""
    done = [(name, call) for name in WORKERS for call in re.findall(r"call done call_id=(\S+)", run.text(name))]
    return Counter(done)


def test_a_third_of_all_messages_lost(proxied):
    """Fault 2: the same final state; who missed a doorbell reads the records within a poll."""
    run, proxy = proxied(steps=6, lost=0.3)
    run.check()
    assert proxy.dropped > 10
    assert set(executed(run).values()) == {1}


def test_all_doorbells_lost(proxied):
    """Slower, and the same final state: no call, no desired state and no beat ever arrives."""
    run, proxy = proxied(steps=4, deaf=True)
    run.check()
    assert proxy.dropped > 30
    assert set(executed(run).values()) == {1}


@pytest.mark.faults_long
def test_all_doorbells_and_nearly_all_reports_lost(proxied):
    """A worker that is never heard would be a lost one: some heartbeats come through."""
    run, proxy = proxied(steps=4, deaf=True)
    run.until_step(1)
    proxy.set(deaf=True, lost=0.8)
    run.check(200)
    assert set(executed(run).values()) == {1}


def test_messages_three_times_and_late_are_obeyed_once(proxied):
    """Fault 3: seq n after n+1, and each of them three times."""
    run, _ = proxied(steps=6, copies=3, late=0.3)
    run.check()
    assert set(executed(run).values()) == {1}


@pytest.mark.faults_long
def test_a_worker_whose_link_is_half_open_joins_anew(proxied):
    """Fault 19: connections stay, nothing comes through; the worker notices by itself."""
    run, proxy = proxied("deadlines.silence_s=28", steps=60)  # it misses the beat for half of that
    run.until_step(1)
    link = proxy.links["rollout-0"]
    link.silent = True
    run.until(lambda: "joined anew" in run.text("rollout-0"), "rollout-0 joins anew", 60)
    link.silent = False
    run.check()
    assert run.starts("rollout-0") == 1


@pytest.mark.faults_long
def test_a_subscriber_that_never_reads_holds_up_nobody(echo):
    """Fault 20: its queue is full long before the run ends."""
    run = echo(steps=8, echo=Echo())
    run.until(lambda: run.path is not None, "the run has a folder")
    doorbell = RunFolder(run.run).doorbell_address
    with zmq.Context() as context, context.socket(zmq.SUB) as stuck:
        stuck.setsockopt(zmq.LINGER, 0)
        stuck.setsockopt(zmq.RCVHWM, 1)
        stuck.setsockopt(zmq.RCVBUF, 1)
        stuck.setsockopt(zmq.SUBSCRIBE, b"")
        stuck.connect(doorbell)
        run.check()


def test_the_controllers_bell_rings_for_others_when_one_never_reads(tmp_path):
    """Fault 20, with more messages than its queue holds: the others hear the last of them."""
    heard = []
    run = RunFolder(tmp_path)
    calls = [Call(id=f"1/{k}/rollout.work", role="rollout", method="work", ranks=(0,), args={"text": "x" * 500})
             for k in range(30_000)]  # fmt: skip
    controller = ControllerBus(run, epoch=1, tick=lambda: None, tick_s=1.0)
    with zmq.Context() as context, context.socket(zmq.SUB) as stuck:
        stuck.setsockopt(zmq.LINGER, 0)
        stuck.setsockopt(zmq.RCVHWM, 1)
        stuck.setsockopt(zmq.SUBSCRIBE, b"")
        stuck.connect(run.doorbell_address)
        worker = WorkerBus(run, role="rollout", heard=heard.append, heartbeat=_beat)
        until(lambda: any(isinstance(bell, Beat) for bell in heard), "the worker hears the beat")
        for call in calls:
            controller.ring("rollout", CallBell(call))
            if len(heard) < 100 or call is calls[-1]:
                time.sleep(0.001)
        last = CallBell(calls[-1])
        until(lambda: _rung_again(controller, last, heard), "the worker hears the last call")
        worker.close()
    controller.close()


def _beat():
    return Heartbeat(
        role="rollout", rank=0, incarnation=1, activity="idle", ready=True, serving=-1, progress=0, activity_s={}
    )


def _rung_again(controller, bell, heard):
    """Ring it once more, unless it was heard."""
    if bell in heard[-5:]:
        return True
    controller.ring("rollout", bell)
    time.sleep(0.1)
    return False
