"""Faults 1, 4, 5: processes that die while a run goes on, the controller above all."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
from faults.echo import Echo, FailAt

pytestmark = pytest.mark.timeout(240)
WORKERS = ("prompts-0", "rollout-0", "rollout-1", "reward-0", "reward-1", "actor-0", "recorder-0")


def at(line: str) -> float:
    """The time of a line of a log."""
    return datetime.fromisoformat(line.split(" ", 1)[0]).timestamp()


def test_a_worker_that_starts_after_the_command_acts_on_it(echo):
    """Fault 1: the call was queued before the process began."""
    run = echo(echo=Echo(fail_at=[FailAt("prompts-0", "before_admit", 2)]), steps=4)
    run.check()
    assert run.starts("prompts-0") == 2
    lines = run.text("prompts-0").splitlines()
    ready = next(k for k in range(len(lines) - 1, 0, -1) if "[info] ready " in lines[k])
    done = next(line for line in lines[ready:] if "prompts.admit" in line and "call done" in line)
    assert at(done) - at(lines[ready]) < 5.0


def _kill_controllers(run, rng, times):
    """At random moments of random steps; the workers stay up."""
    for due in sorted(rng.uniform(1, run.steps - 1) for _ in range(times)):
        run.until_step(int(due))
        epochs = run.epochs
        run.until(lambda: "controller-0" in run.processes(), "there is a controller")
        run.moment(rng)
        run.kill("controller-0")
        run.until(lambda n=epochs: run.epochs > n, "the next epoch begins")
    run.check()
    assert run.epochs == times + 1
    assert {name: run.starts(name) for name in WORKERS} == dict.fromkeys(WORKERS, 1)


def test_a_killed_controller_is_the_next_epoch_and_nothing_is_done_twice(echo, rng):
    """Fault 4."""
    run = echo(echo=Echo(work_s={"rollout": 0.2, "actor": 0.2}), steps=6)
    _kill_controllers(run, rng, 2)


@pytest.mark.faults_long
@pytest.mark.parametrize("slow", ["prompts", "rollout", "reward", "actor", "recorder"])
def test_the_controller_is_killed_in_each_phase(echo, rng, slow):
    """Fault 4, most of the time in the phase of one role."""
    run = echo(echo=Echo(work_s={slow: 0.5}), steps=10)
    _kill_controllers(run, rng, 4)


@pytest.mark.faults_long
def test_the_loop_goes_on_after_a_kill_between_any_two_calls(echo, rng):
    """Fault 4: before and after calls that are drawn."""
    calls = rng.sample(range(2, 20), 4)
    fails = [FailAt("controller-0", rng.choice(["before_submit", "after_submit"]), seq) for seq in calls]
    run = echo(echo=Echo(fail_at=fails), steps=8)
    run.check()
    assert run.epochs == sum(run.fired(k) for k in range(4)) + 1 > 2


def test_workers_in_a_long_step_obey_the_next_controller_right_after(echo, rng):
    """Fault 5: their honest work is not lost."""
    run = echo(echo=Echo(work_s={"rollout": 4.0}), steps=2)
    busy = lambda: {run.seen().activity(name) for name in ("rollout-0", "rollout-1")} == {"generating"}  # noqa: E731
    run.until(busy, "both rollout workers generate")
    run.kill("controller-0")
    run.check()
    assert run.epochs == 2
    assert {name: run.starts(name) for name in WORKERS} == dict.fromkeys(WORKERS, 1)
    redone = re.findall(r"lease lost|lease_lost", run.text("rollout-0") + run.text("rollout-1"))
    assert redone == []


@pytest.mark.parametrize(
    ("who", "phase"),
    [
        ("prompts-0", "after_put"),
        ("rollout-0", "after_claim"),
        ("rollout-1", "after_write"),
        ("reward-0", "after_claim"),
        ("actor-0", "after_claim"),
        ("actor-0", "after_write"),
        ("actor-0", "after_log"),
        ("actor-0", "after_finish"),
        ("actor-0", "in_checkpoint"),
    ],
)
@pytest.mark.faults_long
def test_a_worker_that_dies_at_a_named_point(echo, rng, who, phase):
    """Between any two of its writes."""
    run = echo(echo=Echo(fail_at=[FailAt(who, phase, rng.randint(1, 3))]), steps=12)
    run.check()
    assert run.fired()


def test_everybody_dies_somewhere(echo, rng):
    """One run in which every role is killed at a point of its own."""
    fails = [
        FailAt("prompts-0", "after_put", rng.randint(1, 4)),
        FailAt("rollout-0", rng.choice(["after_claim", "after_write"]), rng.randint(1, 2)),
        FailAt("reward-0", rng.choice(["after_claim", "after_write"]), rng.randint(1, 2)),
        FailAt(
            "actor-0", rng.choice(["after_claim", "after_write", "after_log", "after_finish"]), rng.randint(1, 4)
        ),
    ]
    run = echo(echo=Echo(fail_at=fails), steps=8)
    run.check()
    assert sum(run.fired(k) for k in range(len(fails))) >= 3
