"""Faults 8 to 13: workers that die, stop, crash, hang, or bring nonsense."""

from __future__ import annotations

import signal

import pytest
from faults.scene import until
from faults.workers import PHASES

pytestmark = pytest.mark.timeout(120)


def _deliveries(worker, stage):
    """Sample id to the deliveries in which this worker claimed it."""
    seen = {}
    for fact in worker.did("claimed"):
        if fact["stage"] == stage:
            for sample, delivery, _ in fact["rows"]:
                seen.setdefault(sample, []).append(delivery)
    return seen


def test_a_rollout_killed_before_it_writes_is_redelivered(scene):
    """Fault 8."""
    scene.open(stages={"rollout": {"lease_s": 0.5}})
    dying = scene.start("rollout", "rollout1", fail_at=[{"phase": "after_claim"}])
    scene.start("produce", chunks=2)
    assert dying.wait() == -signal.SIGKILL
    scene.start_all(rollout2={}, reward={}, actor={}, recorder={})
    scene.until_ended(32)
    (lost,) = dying.did("claimed")
    again = _deliveries(scene.worker("rollout2"), "rollout")
    assert {sample: again[sample] for sample, _, _ in lost["rows"]} == {s: [2] for s, _, _ in lost["rows"]}
    assert (scene.counts.redelivered, scene.ended("trained")) == (16, 32)
    scene.check()


def test_a_rollout_killed_between_write_and_ack_leaves_one_copy(scene):
    """Fault 9."""
    store = scene.open(stages={"rollout": {"lease_s": 0.5}})
    dying = scene.start("rollout", "rollout1", write_then_ack=True, fail_at=[{"phase": "after_write"}])
    scene.start("produce", chunks=2)
    assert dying.wait() == -signal.SIGKILL
    scene.start_all(rollout2={"write_then_ack": True})
    until(lambda: scene.counts.acked["rollout"] == 32, "all rows acknowledged by the new owner")
    scene.start_all(reward={}, actor={"checkpoint_every": 1}, recorder={})
    scene.until_ended(32)
    scene.check()
    assert [fact["stage"] for fact in scene.worker("rollout2").did("acked")] == ["rollout"] * 2
    store.advance(1000)
    assert (scene.counts.payload_bytes, scene.payload_keys()) == (0, [])


@pytest.mark.parametrize("write_then_ack", [False, True])
def test_a_worker_stopped_past_its_lease_is_refused_when_it_wakes(scene, write_then_ack):
    """Fault 10."""
    scene.open(stages={"reward": {"lease_s": 0.5}})
    config = {"write_then_ack": write_then_ack, "fail_at": [{"phase": "after_claim", "signal": "STOP"}]}
    scene.start_all(rollout={}, actor={}, recorder={})
    stopped = scene.start("reward", "reward1", **config)
    scene.start("produce", chunks=1)
    until(lambda: stopped.stopped, "the first worker is stopped")
    other = scene.start("reward", "reward2")
    scene.until_ended(16)
    stopped.signal(signal.SIGCONT)
    until(lambda: stopped.did("fenced"), "the late write is refused")
    (late,) = stopped.did("claimed")
    assert all(set(_deliveries(other, "reward")[sample]) == {2} for sample, _, _ in late["rows"])
    assert scene.counts.fenced == 1
    scene.check()


def test_a_trainer_stopped_past_its_lease_trains_its_batch_once(scene):
    """Fault 10, where the batch is in the log before the rows are ended."""
    scene.open(stages={"actor": {"lease_s": 0.5}})
    trainer = scene.start("actor", fail_at=[{"phase": "after_log", "signal": "STOP"}])
    scene.start_all(produce={"chunks": 1}, rollout={}, reward={}, recorder={})
    until(lambda: trainer.stopped, "the trainer is stopped")
    until(lambda: scene.store.expire() > 0, "its lease is over")
    trainer.signal(signal.SIGCONT)
    scene.until_ended(16)
    assert trainer.did("fenced")
    scene.check()


@pytest.mark.parametrize("phase", ["after_log", "after_finish", "after_checkpoint"])
def test_a_trainer_killed_between_log_and_end_applies_its_batch_once(scene, phase):
    """Faults 8 and 9 for the trainer: recovery is the log, for the first use of a row and the second."""
    scene.open(max_uses=2)
    dying = scene.start("actor", fail_at=[{"phase": phase, "seq": 3}], checkpoint_every=1)
    scene.start_all(produce={"chunks": 2}, rollout={}, reward={}, recorder={})
    assert dying.wait() == -signal.SIGKILL
    scene.start("actor", checkpoint_every=1)
    scene.until_ended(32)
    assert scene.ended("trained") == 32
    scene.check()


def test_a_recorder_killed_before_its_ack_records_again(scene):
    """Fault 9 for the recorder: at least once, and a chunk is freed after its ack only."""
    store = scene.open(stages={"recorder": {"lease_s": 0.5}})
    dying = scene.start("recorder", "recorder1", fail_at=[{"phase": "after_record", "seq": 2}])
    scene.start_all(produce={"chunks": 2}, rollout={}, reward={}, actor={})
    assert dying.wait() == -signal.SIGKILL
    store.advance(1000)
    scene.start("recorder", "recorder2")
    scene.until_ended(32)
    scene.check()


def test_a_sample_that_always_raises_ends_as_dead_with_its_traceback(scene):
    """Fault 11."""
    store = scene.open()
    poison = {"produce-0000-05": "raise"}
    scene.start_all(produce={"chunks": 2}, rollout={}, reward1={"poison": poison}, reward2={"poison": poison})
    scene.start_all(actor={}, recorder={})
    scene.until_ended(32)
    assert (scene.ended("trained"), scene.ended("dead")) == (31, 1)
    (letter,) = store.dead_letters("train")
    assert letter.stage == "reward"
    assert "Traceback" in letter.reason and "cannot work on produce-0000-05" in letter.reason
    assert (letter.range.first, letter.range.count) == (5, 1)
    scene.check()


def test_a_sample_that_always_kills_its_worker_ends_as_dead_alone(scene):
    """Fault 11, where nobody is left to write a traceback."""
    store = scene.open(stages={"reward": {"lease_s": 0.5}})
    scene.start_all(produce={"chunks": 1}, rollout={}, actor={}, recorder={})
    killed = 0
    while scene.ended() < 16:
        worker = scene.start("reward", poison={"produce-0000-05": "kill"})
        until(lambda w=worker: w.code is not None or scene.ended() == 16, "the worker dies, or all rows ended")
        killed += worker.code == -signal.SIGKILL
    scene.until_ended(16)
    assert (scene.ended("trained"), scene.ended("dead"), killed) == (15, 1, 3)
    (letter,) = store.dead_letters("train")
    assert "lease expired" in letter.reason and "last worker reward" in letter.reason
    scene.check()


def test_a_sample_without_a_verdict_is_filtered(scene):
    """Fault 12: NaN and infinity are no verdict, and no verdict never enters a batch."""
    scene.open()
    poison = {"produce-0000-03": "null", "produce-0001-15": "null"}
    scene.start_all(produce={"chunks": 2}, rollout={}, reward={"poison": poison}, actor={}, recorder={})
    scene.until_ended(32)
    assert scene.counts.ended == {"trained": 30, "filtered(no verdict)": 2}
    assert not poison.keys() & {
        i for fact in scene.facts("finished") if fact["stage"] == "actor" for i in fact["rows"]
    }
    scene.check()


@pytest.mark.parametrize("how", ["shape", "type"])
def test_columns_of_the_wrong_shape_are_refused(scene, how):
    """Fault 12."""
    scene.open()
    poison = {"produce-0000-03": how}
    scene.start_all(produce={"chunks": 1}, rollout={}, reward={"poison": poison}, actor={}, recorder={})
    scene.until_ended(16)
    assert (scene.ended("trained"), scene.ended("dead")) == (15, 1)
    (letter,) = scene.store.dead_letters("train")
    assert "SchemaMismatch" in letter.reason
    scene.check()


def test_a_worker_that_hangs_loses_its_rows_by_lease(scene):
    """Fault 12: it is alive and makes no progress."""
    scene.open(stages={"reward": {"lease_s": 0.5}})
    hanging = scene.start("reward", "reward1", poison={"produce-0000-03": "hang"})
    scene.start_all(produce={"chunks": 1}, rollout={}, actor={}, recorder={})
    until(lambda: hanging.did("hanging"), "the worker hangs")
    scene.start("reward", "reward2")
    scene.until_ended(16)
    assert scene.ended("trained") == 16
    hanging.end()
    assert hanging.wait() == 0
    assert len(hanging.did("fenced")) == 1
    scene.check()


_GROUP = {"group_deadline_s": 1.0, "group_min": 3}


def _hang_on(scene, *samples, workers, **table):
    """Start reward workers that take one row at a time and hang for ever on these samples."""
    scene.open(stages={"actor": _GROUP | table.pop("actor", {})}, **table)
    poison = dict.fromkeys(samples, "hang")
    rewards = {f"reward{k}": {"rows": 1, "poison": poison} for k in range(workers)}
    return scene.start_all(**rewards, recorder={})


def test_a_group_whose_member_never_finishes_trains_without_it(scene):
    """Fault 13: a deadline after the group's first member; the member's slot is free again."""
    _hang_on(scene, "produce-0000-05", workers=2, capacity_rows=16)
    scene.start_all(produce={"chunks": 3}, rollout={}, actor={"checkpoint_every": 1})
    scene.until_ended(48)
    assert scene.counts.ended == {"trained": 47, "dead(group deadline)": 1}
    assert scene.counts.live == 0
    scene.check()


def test_a_group_with_too_few_members_ends_as_dead(scene):
    """Fault 13: fewer than `group_min` are no baseline."""
    _hang_on(scene, "produce-0000-04", "produce-0000-06", workers=3, capacity_rows=16)
    scene.start_all(produce={"chunks": 3}, rollout={}, actor={"checkpoint_every": 1})
    scene.until_ended(48)
    assert scene.counts.ended == {"trained": 44, "dead(group deadline)": 4}
    scene.check()


def test_a_member_that_never_finishes_does_not_make_others_too_old(scene):
    """Fault 13: the window of versions counts what is in flight; whatever is trained is within `max_staleness`."""
    window = {"rows_per_version": 16, "versions": 1}
    actor = {"min_batch": 16, "max_wait_s": 2.0, "max_staleness": 1}
    _hang_on(scene, "produce-0001-05", workers=2, window=window, actor=actor)
    scene.start_all(
        produce={"chunks": 8, "closes": True}, rollout={"versioned": True},
        actor={"rows": 16, "versioned": True, "checkpoint_every": 1},
    )  # fmt: skip
    scene.until_ended(128)
    assert scene.ended("trained") + scene.ended("stale") == 127
    assert scene.counts.version >= 7
    scene.check()


def _kill_at_random(scene, deaths):
    """Each role dies at points drawn at random, and is started again."""
    scene.open(stages={name: {"lease_s": 1.0, "max_deliveries": 40} for name in PHASES if name != "produce"})
    names = {"produce": "produce", "rollout1": "rollout", "rollout2": "rollout", "reward1": "reward"}
    names |= {"reward2": "reward", "actor": "actor", "recorder": "recorder"}
    left = dict.fromkeys(names, deaths)

    def begin(name):
        fail_at = []
        if left[name] > 0:
            left[name] -= 1
            fail_at = [{"phase": scene.rng.choice(PHASES[names[name]]), "seq": scene.rng.randint(1, 3)}]
        config = {"chunks": 20, "write_then_ack": scene.rng.random() < 0.5, "checkpoint_every": 2}
        scene.start(names[name], name, ready=False, fail_at=fail_at, **config)

    def over():
        for name in names:
            if scene.worker(name).code == -signal.SIGKILL:
                begin(name)
        return scene.ended() == 320 and scene.counts.acked["recorder"] == 320

    for name in names:
        begin(name)
    until(over, "all rows ended and recorded", timeout_s=150)
    assert scene.ended("trained") == 320
    scene.check()


def test_workers_killed_at_random_points_lose_and_double_nothing(scene):
    """Faults 8 and 9, for every role."""
    _kill_at_random(scene, 1)


@pytest.mark.faults_long
@pytest.mark.timeout(180)
def test_workers_killed_again_and_again_lose_and_double_nothing(scene):
    """Faults 8 and 9, for every role."""
    _kill_at_random(scene, 4)
