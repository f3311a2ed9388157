"""Faults 6, 7, 25, 26: two controllers, and every way of ending."""

from __future__ import annotations

import re
import signal
import time

import pytest
from faults.echo import Echo, FailAt
from faults.scene import until

from rlmq.buffer.redis_store import RedisStore
from rlmq.common.errors import ExitCode
from rlmq.common.run_folder import RunFolder

pytestmark = pytest.mark.timeout(240)
SLOW = Echo(work_s={"rollout": 0.3})


@pytest.mark.faults_long
def test_a_second_controller_is_refused_and_the_run_goes_on(echo):
    """Fault 6: it waits for the lease, which the first one keeps."""
    run = echo(echo=Echo(work_s={"rollout": 1.0}), steps=14)
    run.until_step(1)
    second = run.command_of("controller")
    try:
        assert second.wait(60) == ExitCode.SECOND_CONTROLLER
        assert not run.over
        run.check()
    finally:
        second.kill()
        second.wait()
    assert run.epochs == 1


@pytest.mark.faults_long
def test_a_controller_that_was_stopped_and_replaced_is_fenced(echo):
    """Faults 6 and 7: the second one takes over when the lease is over; the first one writes nothing any more."""
    run = echo(echo=SLOW, steps=60)
    run.until_step(2)
    run.send("controller-0", signal.SIGSTOP)
    second = run.command_of("controller")
    try:
        run.until(lambda: run.seen().epoch == 2, "the second controller steers", 60)
        step = run.seen().step
        run.until(lambda: run.seen().step >= step + 2, "the run goes on")
        run.send("controller-0", signal.SIGCONT)
        assert run.wait(60) == ExitCode.INTEGRITY
        assert "Another controller has taken over" in run.output
    finally:
        second.kill()
        second.wait()
    run.steps = run.trained + 4
    run.overrides = [f"train.steps={run.steps}"]
    run.start()
    run.check()


@pytest.mark.faults_long
def test_a_controller_that_stood_still_for_two_leases_goes_on_when_nobody_took_over(echo):
    """Fault 7."""
    run = echo(echo=SLOW, steps=8)
    run.until_step(2)
    run.pause("controller-0", 21.0)
    run.check()
    assert run.epochs == 1


def leases(url, run):
    """Rows under leases in the run's tables."""
    store = RedisStore(url, run_id=run.run.name, worker="observer")
    try:
        store.attach(("train", "eval"))
        return [lease for table in ("train", "eval") for lease in store.leases(table)]
    finally:
        store.close()


def test_sigterm_in_the_middle_of_a_batch_gives_everything_back(echo, rng, server):
    """Fault 25: exit 0 in time, no lease left, what was trained is saved; the same command goes on."""
    run = echo(f"redis.url={server.url}", echo=Echo(work_s={"rollout": 0.5, "reward": 0.5}), steps=6)
    run.until_step(2)
    run.moment(rng)
    run.up.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert run.wait(60) == 0, run.state()
    assert time.monotonic() - began < 12
    assert run.summary()["exit"] == ExitCode.TERMINATED
    assert leases(server.url, run) == []
    saved = max(int(path.name[5:]) for path in run.run.glob("checkpoints/step-*"))
    assert saved >= run.trained >= 2
    run.start()
    run.check()


def test_a_second_sigterm_ends_everything_at_once(echo):
    """Fault 25: even though a unit of work would take a minute."""
    run = echo(echo=Echo(work_s={"rollout": 60.0, "actor": 60.0}), steps=2)
    run.until(lambda: run.seen().activity("rollout-0") == "syncing", "rollout-0 takes weights")
    run.up.send_signal(signal.SIGTERM)
    run.until(lambda: "SIGTERM" in run.output, "the first one is heard")
    run.up.send_signal(signal.SIGTERM)
    until(lambda: run.processes() == {}, "all its processes are gone", 5.0)
    assert run.wait(30) == ExitCode.TERMINATED
    assert not RunFolder(run.run).sockets.exists()


@pytest.mark.faults_long
def test_a_worker_that_gets_sigterm_leaves_in_time_and_is_replaced_or_the_run_ends(echo, rng):
    """Fault 25, for one worker: nothing is lost."""
    run = echo(echo=SLOW, steps=8)
    run.until_step(2)
    run.moment(rng)
    run.send("rollout-0", signal.SIGTERM)
    run.check()


def test_a_role_that_cannot_be_set_up_ends_the_run_with_its_error(echo):
    """Fault 26: the others are ended and nothing is left."""
    run = echo(echo=Echo(fail_at=[FailAt("reward-1", "start", signal="USAGE")]), steps=2)
    assert run.wait(60) == ExitCode.USAGE, run.state()
    assert "reward-1 was told to fail at start" in run.output
    assert run.processes() == {}
    assert not RunFolder(run.run).sockets.exists()


def test_a_close_that_raises_does_not_keep_others_from_closing(echo):
    """Fault 26: the run had ended well, and says so."""
    fails = [FailAt("rollout-0", "close", signal="RAISE"), FailAt("prompts-0", "close", signal="RAISE")]
    run = echo(echo=Echo(fail_at=fails), steps=2)
    run.check()
    assert run.fired(0) and run.fired(1)
    for name in ("rollout-0", "prompts-0"):
        assert "was told to fail at close" in run.text(name)
    for name in ("rollout-1", "reward-0", "actor-0", "recorder-0"):
        assert "error" not in run.text(name)


def test_a_deadline_that_is_over_names_who_holds_the_rows(echo):
    """And after it the same command goes on."""
    limits = ("deadlines.step_s=3", "deadlines.drain_s=1")
    run = echo(*limits, echo=Echo(fail_at=[FailAt("rollout-1", "after_claim", 5, signal="STOP")]), steps=8)
    assert run.wait(60) == ExitCode.DEADLINE, run.state()
    assert re.search(r"rows of stage \w+ in table \w+ waits for rollout", run.output), run.output
    assert re.search(r"rollout-1 holds \d rows of stage rollout, no progress for", run.output), run.output
    run.start()
    run.check()
