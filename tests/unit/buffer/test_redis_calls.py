"""Calls, desired states, incarnations and epochs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.calls import Call, CallResult, Desired
from rlmq.common.errors import (
    ControlLoopDiverged,
    Fenced,
    SchemaMismatch,
    SecondController,
    UsageError,
)


@pytest.fixture
def calls(redis_url):
    calls = RedisCalls(redis_url, run_id="run-1")
    yield calls
    calls.close()


def _call(number=0, *, epoch=1, ranks=(0, 1), **args):
    return Call(id=f"1/{number}/actor.train", role="actor", method="train", ranks=ranks, args=args, epoch=epoch)


def _result(call, rank, **value):
    return CallResult(call_id=call.id, rank=rank, value=value)


def test_each_rank_gets_a_call_until_it_completed_it(calls):
    calls.begin_epoch(fingerprint="f", lease_s=60)
    call = _call(step=3, names=["a"], rate=0.5)
    calls.submit(call)
    assert calls.next("actor", 0) == call
    assert calls.next("actor", 0) == call
    assert calls.complete(_result(call, 0, loss=0.25), incarnation=1)
    assert calls.next("actor", 0) is None
    assert calls.next("actor", 1) == call
    assert calls.results(call.id) == [_result(call, 0, loss=0.25)]
    calls.complete(_result(call, 1), incarnation=1)
    assert [r.rank for r in calls.results(call.id)] == [0, 1]


def test_calls_come_in_the_order_of_their_submission(calls):
    calls.begin_epoch(fingerprint="f", lease_s=60)
    for number in (2, 0, 1):
        calls.submit(_call(number))
    seen = []
    while (call := calls.next("actor", 0)) is not None:
        seen.append(call.id)
        calls.complete(_result(call, 0), incarnation=1)
    assert seen == ["1/2/actor.train", "1/0/actor.train", "1/1/actor.train"]


def test_a_known_call_is_not_queued_again_and_keeps_its_results(calls):
    calls.begin_epoch(fingerprint="f", lease_s=60)
    calls.submit(_call(a=1, b=2))
    calls.complete(_result(_call(), 0), incarnation=1)
    calls.submit(_call(b=2, a=1))
    assert calls.next("actor", 0) is None
    assert len(calls.results(_call().id)) == 1


def test_a_restarted_controller_finds_its_calls_under_a_new_epoch(calls):
    epoch = calls.begin_epoch(fingerprint="f", lease_s=60)
    calls.submit(_call(epoch=epoch))
    calls.end_epoch(epoch)
    second = calls.begin_epoch(fingerprint="f", lease_s=60)
    assert second == epoch + 1
    calls.submit(_call(epoch=second))


@pytest.mark.parametrize(
    "other",
    [_call(step=2), Call(id=_call().id, role="actor", method="offer", ranks=(0, 1), epoch=1), _call(ranks=(0,))],
    ids=["arguments", "method", "ranks"],
)
def test_another_call_under_a_known_id_diverged(calls, other):
    calls.begin_epoch(fingerprint="f", lease_s=60)
    calls.submit(_call())
    with pytest.raises(ControlLoopDiverged, match=r"call '1/0/actor\.train'"):
        calls.submit(other)


def test_a_call_of_an_older_epoch_is_fenced(calls):
    calls.end_epoch(calls.begin_epoch(fingerprint="f", lease_s=60))
    calls.begin_epoch(fingerprint="f", lease_s=60)
    with pytest.raises(Fenced, match=r"epoch 1, expected the newest, 2"):
        calls.submit(_call(epoch=1))
    with pytest.raises(Fenced):
        calls.want(Desired(role="actor", version=1, phase="run", epoch=1))


def test_a_result_is_stored_once(calls):
    calls.begin_epoch(fingerprint="f", lease_s=60)
    calls.submit(_call())
    assert calls.complete(_result(_call(), 0, a=1), incarnation=1)
    assert not calls.complete(_result(_call(), 0, a=2), incarnation=1)
    assert calls.results(_call().id)[0].value == {"a": 1}


def test_a_result_of_an_older_incarnation_is_fenced(calls):
    calls.begin_epoch(fingerprint="f", lease_s=60)
    calls.submit(_call())
    old = calls.join("actor", 0, fingerprint="f")
    new = calls.join("actor", 0, fingerprint="f")
    assert new > old
    with pytest.raises(Fenced, match=f"incarnation {old}, expected the newest, {new}"):
        calls.complete(_result(_call(), 0), incarnation=old)
    assert calls.complete(_result(_call(), 0), incarnation=new)


def test_incarnations_are_counted_per_rank(calls):
    assert [calls.join("reward", rank, fingerprint="f") for rank in (0, 1, 0)] == [1, 1, 2]


def test_a_result_that_nobody_asked_for_is_dropped(calls):
    calls.begin_epoch(fingerprint="f", lease_s=60)
    assert not calls.complete(_result(_call(), 0), incarnation=1)  # its record was lost: it is asked again
    calls.submit(_call())
    assert not calls.complete(_result(_call(), 7), incarnation=1)
    assert calls.results(_call().id) == []
    assert calls.complete(_result(_call(), 0), incarnation=1)


def test_a_second_controller_is_refused_while_the_first_holds_its_lease(calls, redis_url):
    calls.begin_epoch(fingerprint="f", lease_s=60)
    other = RedisCalls(redis_url, run_id="run-1")
    with pytest.raises(SecondController, match=r"lease ends in \d+\.\d s"):
        other.begin_epoch(fingerprint="f", lease_s=60)
    other.close()


def test_after_the_lease_another_controller_takes_over_and_the_first_is_fenced(calls):
    first = calls.begin_epoch(fingerprint="f", lease_s=0.02)
    second, end = None, time.monotonic() + 20
    while second is None and time.monotonic() < end:
        try:
            second = calls.begin_epoch(fingerprint="f", lease_s=60)
        except SecondController:
            time.sleep(0.005)
    assert second == first + 1
    with pytest.raises(Fenced):
        calls.renew_epoch(first, 60)
    calls.end_epoch(first)
    calls.renew_epoch(second, 60)
    with pytest.raises(SecondController):
        calls.begin_epoch(fingerprint="f", lease_s=60)


HOLDS = """
import sys, time
from rlmq.buffer.redis_calls import RedisCalls
print(RedisCalls(sys.argv[1], run_id="run-1").begin_epoch(fingerprint="f", lease_s=600), flush=True)
time.sleep(60)
"""


def test_the_lease_of_a_controller_that_was_killed_here_is_void(calls, redis_url):
    # given a controller in another process, with a long lease
    other = subprocess.Popen([sys.executable, "-c", HOLDS, redis_url], stdout=subprocess.PIPE, text=True)
    try:
        first = int(other.stdout.readline())
        with pytest.raises(SecondController):
            calls.begin_epoch(fingerprint="f", lease_s=60)
        assert calls.controller() == (first, True)
    finally:
        other.kill()
        other.communicate()
    # when it was killed, then another takes over at once
    assert calls.begin_epoch(fingerprint="f", lease_s=60) == first + 1


def test_whether_a_controller_leads(calls):
    assert calls.controller() == (0, False)
    epoch = calls.begin_epoch(fingerprint="f", lease_s=60)
    assert calls.controller() == (epoch, True)
    calls.end_epoch(epoch)
    assert calls.controller() == (epoch, False)


def test_a_renewed_lease_keeps_others_out(calls):
    epoch = calls.begin_epoch(fingerprint="f", lease_s=0.3)
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        calls.renew_epoch(epoch, 0.3)
        with pytest.raises(SecondController):
            calls.begin_epoch(fingerprint="f", lease_s=60)


def test_another_schema_fingerprint_is_refused_with_both_named(calls):
    epoch = calls.begin_epoch(fingerprint="aaaa", lease_s=60)
    calls.end_epoch(epoch)
    with pytest.raises(SchemaMismatch, match="fingerprint bbbb, expected the run's aaaa"):
        calls.join("reward", 0, fingerprint="bbbb")
    with pytest.raises(SchemaMismatch, match="bbbb"):
        calls.begin_epoch(fingerprint="bbbb", lease_s=60)


def test_a_worker_of_another_version_is_refused_while_a_controller_lives(calls):
    # given a run whose controller has one version
    epoch = calls.begin_epoch(fingerprint="columns a, rlmq 1", lease_s=60)
    # when a worker of another one joins, then it is refused, as long as that controller lives
    with pytest.raises(SchemaMismatch, match=r"rlmq 2, expected the run's columns a, rlmq 1"):
        calls.join("reward", 0, fingerprint="columns a, rlmq 2")
    calls.end_epoch(epoch)
    assert calls.join("reward", 0, fingerprint="columns a, rlmq 2") == 1
    # and a controller of another version takes the run over
    calls.begin_epoch(fingerprint="columns a, rlmq 2", lease_s=60)
    with pytest.raises(SchemaMismatch, match="rlmq 1"):
        calls.join("reward", 0, fingerprint="columns a, rlmq 1")


def test_a_desired_state_only_grows_in_version(calls):
    assert calls.wanted("rollout") is None
    state = Desired(role="rollout", version=4, phase="run", policy_version=9)
    calls.want(state)
    calls.want(state)
    with pytest.raises(Fenced, match=r"version 3, expected at least 4"):
        calls.want(Desired(role="rollout", version=3, phase="stop"))
    assert calls.wanted("rollout") == state


def test_notes_are_read_by_name(calls, redis_url):
    calls.note("rendezvous", {"port": 1234, "host": "a"})
    other = RedisCalls(redis_url, run_id="run-1")
    assert other.noted("rendezvous") == {"port": 1234, "host": "a"}
    assert other.noted("nothing") is None
    other.close()


def test_a_repeated_request_does_not_join_twice(calls):
    exchange = calls._link.exchange
    calls._link.exchange = lambda commands: (exchange(commands), exchange(commands))[1]
    assert calls.join("actor", 0, fingerprint="f") == 1
    assert calls.begin_epoch(fingerprint="f", lease_s=60) == 1


def test_one_object_serves_several_threads(calls):
    calls.begin_epoch(fingerprint="f", lease_s=60)
    wrong = []

    def work(number):
        for _ in range(50):
            calls.note(f"n{number}", {"v": number})
            if calls.noted(f"n{number}") != {"v": number}:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_names_that_would_break_a_key_are_refused(redis_url):
    with pytest.raises(UsageError, match="run name"):
        RedisCalls(redis_url, run_id="a}:b")


def test_everyone_is_who_was_there_when_the_call_was_first_submitted(calls):
    epoch = calls.begin_epoch(fingerprint="f", lease_s=60)
    first = Call(id="1/1/reward.x", role="reward", method="x", ranks=(0, 4), epoch=epoch, everyone=True)
    assert calls.submit(first).call == first
    calls.complete(_result(first, 4, n=1), incarnation=1)
    again = calls.submit(Call(id="1/1/reward.x", role="reward", method="x", ranks=(1,), epoch=epoch, everyone=True))
    assert (again.call, again.results) == (first, (_result(first, 4, n=1),))
    assert calls.next("reward", 1) is None
    assert calls.look("1/1/reward.x") == again
    assert calls.look("1/2/reward.x") is None


def test_a_released_rank_has_a_result_and_nothing_to_do(calls):
    epoch = calls.begin_epoch(fingerprint="f", lease_s=60)
    call = _call()
    calls.submit(call)
    calls.complete(_result(call, 0, a=1), incarnation=1)
    for rank in (0, 1):
        calls.release(CallResult(call_id=call.id, rank=rank, released="lost"), epoch=epoch)
    assert calls.next("actor", 1) is None
    assert [(r.rank, r.value, r.released) for r in calls.results(call.id)] == [(0, {"a": 1}, ""), (1, {}, "lost")]
    assert not calls.complete(_result(call, 1, a=2), incarnation=1)


def test_an_old_controller_releases_and_notes_nothing(calls):
    old = calls.begin_epoch(fingerprint="f", lease_s=60)
    calls.submit(_call(epoch=old))
    calls.end_epoch(old)
    new = calls.begin_epoch(fingerprint="f", lease_s=60)
    calls.note("open_step", {"step": 2}, epoch=new)
    with pytest.raises(Fenced):
        calls.note("open_step", {"step": 1}, epoch=old)
    with pytest.raises(Fenced):
        calls.release(CallResult(call_id=_call().id, rank=0, released="lost"), epoch=old)
    assert calls.noted("open_step") == {"step": 2}
    assert calls.results(_call().id) == []
