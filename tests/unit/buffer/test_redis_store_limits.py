"""Limiters: batches, warm-up, samples per insert, capacity; what a time-out says, and how a blocked call wakes."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest

from rlmq.buffer import waiting
from rlmq.buffer.store import VersionWindow
from rlmq.common.errors import DeadlineExceeded, UsageError

pytestmark = pytest.mark.timeout(60)
_LONG_S = 60.0


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch, request):
    """A sleeper looks again now and then (its wake-up may have gone to a process that died): here it does not."""
    if "second_look" not in request.fixturenames:
        monkeypatch.setattr(waiting, "_LOOK_S", 1000.0)


@pytest.fixture
def second_look():
    """For tests in which sleepers look again as they do in a run."""


def _put_in_time(bench, store, count, **options):
    """Whether a put of so many rows has room."""
    try:
        bench.put(store, count, **options)
    except DeadlineExceeded:
        return False
    return True


# -- min_batch and min_size ---------------------------------------------------------------------------------


def test_a_closed_upstream_flushes_what_is_left_of_a_batch(bench):
    store = bench.store(bench.one_stage(min_batch=32))
    for chunk in range(5):
        assert store.claim("train", "end", max_rows=32) is None
        bench.put(store, 8, closes=chunk == 4)
        if chunk == 3:
            assert store.claim("train", "end", max_rows=32).count == 32
    assert store.claim("train", "end", max_rows=32).count == 8


def test_forty_rows_are_claimed_as_32_and_8(bench):
    store = bench.store(bench.one_stage(min_batch=32))
    for chunk in range(5):
        bench.put(store, 8, closes=chunk == 4)
    assert [store.claim("train", "end", max_rows=32).count for _ in range(2)] == [32, 8]
    assert store.claim("train", "end", max_rows=32) is None


def test_flush_closes_what_was_put_so_far(bench):
    store = bench.store(bench.one_stage(min_batch=32))
    bench.put(store, 8)
    assert store.claim("train", "end", max_rows=32) is None
    store.flush("train")
    assert store.claim("train", "end", max_rows=32).count == 8


def test_a_flush_does_not_cover_rows_that_are_put_after_it(bench):
    store = bench.store(bench.one_stage(min_batch=32))
    store.flush("train")
    bench.put(store, 8)
    assert store.claim("train", "end", max_rows=32) is None


def test_a_flush_waits_for_rows_that_can_still_become_ready(bench):
    store = bench.store(bench.with_stage(bench.table(), "b", min_batch=32))
    bench.put(store, 4, closes=True)
    bench.through_a(store, 2)
    assert store.claim("train", "b", max_rows=32) is None
    last = bench.take(store, "a", 2)
    assert store.claim("train", "b", max_rows=32) is None, "leased upstream: they are still to come"
    store.finish(last, "filtered", "slow", rows=[0])
    store.write(last, bench.y([2, 3]), ack=True)
    assert bench.xs(store.claim("train", "b", max_rows=32)) == [0, 1, 3]


def test_rows_of_a_closed_chunk_that_come_back_are_flushed_beside_newer_ones(bench):
    store = bench.store(bench.one_stage(min_batch=4))
    bench.put(store, 2, closes=True)
    claim = bench.take(store, "end", 2)
    bench.put(store, 1)
    assert store.claim("train", "end", max_rows=4) is None
    store.nack(claim, "again")
    assert store.claim("train", "end", max_rows=4) is not None


def test_a_min_batch_is_kept_when_it_is_made_of_many_chunks(bench):
    store = bench.store(bench.one_stage(min_batch=300))
    for _ in range(300):
        bench.put(store, 1)
    assert store.claim("train", "end", max_rows=300, columns=[]).count == 300


def test_the_oldest_row_flushes_its_stage_after_max_wait(bench):
    store = bench.store(bench.one_stage(min_batch=32, max_wait_s=0.15))
    bench.put(store, 8)
    start = time.monotonic()
    assert store.claim("train", "end", max_rows=32) is None
    assert store.claim("train", "end", max_rows=32, timeout_s=_LONG_S).count == 8
    assert 0.1 < time.monotonic() - start < _LONG_S / 4


def test_a_claim_that_sleeps_when_the_first_row_comes_wakes_when_it_has_waited_long_enough(bench, blocked):
    table = bench.one_stage(min_batch=32, max_wait_s=0.15)
    store, producer = bench.store(table, worker="w1"), bench.store(table, worker="p")
    claim = blocked(lambda: store.claim("train", "end", max_rows=32, timeout_s=_LONG_S)).registered(producer)
    bench.put(producer, 8)
    assert claim.result().count == 8


def test_a_flush_wakes_a_blocked_claim(bench, blocked):
    table = bench.one_stage(min_batch=32)
    store, producer = bench.store(table, worker="w1"), bench.store(table, worker="p")
    bench.put(producer, 8)
    claim = blocked(lambda: store.claim("train", "end", max_rows=32, timeout_s=_LONG_S)).registered(producer)
    producer.flush("train")
    assert claim.result().count == 8


def test_nothing_is_claimed_below_min_size_and_no_flush_helps(bench):
    store = bench.store(bench.one_stage(min_size=6))
    bench.put(store, 5, closes=True)
    store.flush("train")
    assert store.claim("train", "end", max_rows=1) is None
    bench.put(store, 1)
    assert store.claim("train", "end", max_rows=1).count == 1
    assert store.claim("train", "end", max_rows=1) is None


# -- samples per insert -------------------------------------------------------------------------------------


_RATES = [(1.0, 0, 4.0), (2.0, 3, 5.0), (0.5, 8, 2.0)]


@pytest.mark.parametrize(("ratio", "min_size", "buffer"), _RATES)
def test_samples_per_insert_holds_both_sides_of_its_equation(bench, ratio, min_size, buffer):
    """The test's own arithmetic says which of 50 single-row puts and claims have to succeed."""
    limits = {"samples_per_insert": ratio, "min_size": min_size, "error_buffer": buffer}
    store = bench.store(bench.one_stage(max_uses=3, **limits), put_timeout_s=0.002)
    admitted = consumed = ready = refused = 0
    for turn in range(50):
        if turn % 10 < 6:
            allowed = (admitted + 1) * ratio - consumed <= min_size * ratio + buffer
            assert _put_in_time(bench, store, 1) == allowed, f"put in turn {turn}"
            admitted, ready = admitted + allowed, ready + allowed
        else:
            rate_allows = admitted * ratio - (consumed + 1) >= min_size * ratio - buffer
            allowed = rate_allows and ready >= max(1, min_size)
            claim = store.claim("train", "end", max_rows=1)
            assert (claim is not None) == allowed, f"claim in turn {turn}"
            if claim is not None:
                consumed += 1
                store.finish(claim, "trained", step=turn)
                ready = store.counts("train").ready["end"]
        refused += not allowed
    assert 0 < refused < 50


def test_a_claim_takes_what_samples_per_insert_allows(bench):
    store = bench.store(bench.one_stage(samples_per_insert=0.5, error_buffer=0.0, min_size=2))
    bench.put(store, 2)  # diff 1, at least 1
    assert store.claim("train", "end", max_rows=8) is None


def test_rows_given_back_are_not_consumed(bench):
    store = bench.store(bench.one_stage(samples_per_insert=1.0, error_buffer=2.0), put_timeout_s=0.01)
    bench.put(store, 2)
    for give_back in (store.release, lambda claim: store.nack(claim, "no")):
        assert not _put_in_time(bench, store, 1)
        claim = bench.take(store, "end", 2)
        give_back(claim)
    assert not _put_in_time(bench, store, 1)
    bench.take(store, "end", 1)
    assert _put_in_time(bench, store, 1)


def test_a_claim_makes_room_for_a_put_that_samples_per_insert_holds_back(bench, blocked):
    table = bench.one_stage(samples_per_insert=1.0, error_buffer=4.0)
    store, producer = bench.store(table, worker="w1"), bench.store(table, worker="p")
    bench.put(store, 4)
    put = blocked(lambda: bench.put(producer, 2)).registered(store)
    store.claim("train", "end", max_rows=2)
    put.result()
    assert store.counts("train").admitted == 6


def test_a_put_wakes_a_claim_that_samples_per_insert_holds_back(bench, blocked):
    table = bench.one_stage(max_uses=9, samples_per_insert=1.0, error_buffer=1.0)
    store, producer = bench.store(table, worker="w1"), bench.store(table, worker="p")
    bench.put(producer, 1)
    for step in range(2):
        store.finish(bench.take(store, "end", 1), "trained", step=step)
    claim = blocked(lambda: store.claim("train", "end", max_rows=1, timeout_s=_LONG_S)).registered(producer)
    bench.put(producer, 1)
    assert claim.result().count == 1


def test_a_put_held_back_by_samples_per_insert_says_so(bench):
    store = bench.store(bench.one_stage(samples_per_insert=2.0, error_buffer=4.0), put_timeout_s=0.05)
    bench.put(store, 2)
    with pytest.raises(DeadlineExceeded, match=r"6 samples waiting to be drawn, of at most 4.*Stage 'end'"):
        bench.put(store, 1)


# -- capacity -----------------------------------------------------------------------------------------------


def test_capacity_in_rows_admits_up_to_its_limit(bench):
    store = bench.store(bench.one_stage(limits={"capacity_rows": 6}), put_timeout_s=0.01)
    assert [_put_in_time(bench, store, count) for count in (4, 3, 2, 1)] == [True, False, True, False]
    store.finish(bench.take(store, "end", 1), "filtered", "x")
    assert _put_in_time(bench, store, 1)


def test_capacity_in_bytes_holds_puts_back_until_payload_is_freed(bench, blocked):
    table = bench.one_stage()
    store = bench.store(table)
    bench.put(store, 4)
    nbytes = store.counts("train").payload_bytes
    most = int(2.5 * nbytes)
    limited = bench.one_stage(limits={"capacity_bytes": most})
    store, producer = bench.store(limited, worker="w1"), bench.store(limited, worker="p")
    bench.put(producer, 4)
    put = blocked(lambda: bench.put(producer, 4)).registered(store)
    assert store.counts("train").payload_bytes <= most
    store.finish(bench.take(store, "end", 4), "done")
    put.result()
    assert store.counts("train").payload_bytes <= most


def test_a_put_that_finds_no_bytes_names_them(bench):
    store = bench.store(bench.one_stage(limits={"capacity_bytes": 1}), put_timeout_s=0.05)
    bench.put(store, 2)  # the first one always fits
    held = store.counts("train").payload_bytes
    with pytest.raises(DeadlineExceeded, match=rf"{held} of 1 payload bytes held.*room for 1 rows of \d+ bytes"):
        bench.put(store, 1)


def test_the_version_window_bounds_what_is_admitted(bench):
    store = bench.store(bench.one_stage(limits={"window": VersionWindow(4, 1)}), put_timeout_s=0.01)
    admitted = 0
    for version in range(4):
        store.set_version("train", version)
        while _put_in_time(bench, store, 1):
            admitted += 1
        assert admitted == 4 * (version + 1 + 1)


def test_a_window_of_no_versions_alternates_generation_and_training(bench):
    store = bench.store(bench.one_stage(limits={"window": VersionWindow(2, 0)}), put_timeout_s=0.01)
    for version in range(3):
        assert [_put_in_time(bench, store, 1) for _ in range(3)] == [True, True, False]
        store.finish(bench.take(store, "end", 2), "trained", step=version)
        assert not _put_in_time(bench, store, 1), "trained rows stay in the window"
        store.set_version("train", version + 1)


def test_dropped_rows_leave_the_version_window(bench):
    store = bench.store(bench.one_stage(limits={"window": VersionWindow(3, 0)}), put_timeout_s=0.01)
    bench.put(store, 3)
    store.finish(bench.take(store, "end", 2), "filtered", "easy")
    assert [_put_in_time(bench, store, 1) for _ in range(3)] == [True, True, False]


def test_a_new_version_wakes_a_blocked_put(bench, blocked):
    table = bench.one_stage(limits={"window": VersionWindow(4, 0)})
    store, producer = bench.store(table, worker="w1"), bench.store(table, worker="p")
    bench.put(producer, 4)
    put = blocked(lambda: bench.put(producer, 4)).registered(store)
    store.set_version("train", 1)
    put.result()
    assert store.counts("train").admitted == 8


def test_the_version_only_grows(bench):
    store = bench.store()
    for version in (3, 1):
        store.set_version("train", version)
    assert store.counts("train").version == 3


def test_a_put_that_the_window_holds_back_says_so(bench):
    store = bench.store(bench.one_stage(limits={"window": VersionWindow(4, 0)}), put_timeout_s=0.05)
    bench.put(store, 3)
    with pytest.raises(
        DeadlineExceeded, match=r"3 of 4 rows admitted for the versions in flight.*must drain \(3 rows"
    ):
        bench.put(store, 2)
    assert bench.key_names("payload:p.1") == []


# -- blocking claims ----------------------------------------------------------------------------------------


def test_a_claim_that_times_out_names_the_stage_what_it_lacks_and_the_counts(bench):
    store = bench.store()
    bench.put(store, 5)
    bench.through_a(store, 3)
    bench.take(store, "b", 1)
    with pytest.raises(DeadlineExceeded) as caught:
        store.claim("train", "end", max_rows=4, min_rows=2, timeout_s=0.05)
    message = str(caught.value)
    assert "claim of stage 'end' in table 'train'" in message
    assert "0 ready rows after 0.05 s; 5 more wait for ['z']" in message
    assert "a 2+0, b 2+1, end 0+0" in message
    assert "5 admitted" in message
    assert "expected 2 rows" in message
    assert store.waiting() == []


def test_a_claim_that_finds_rows_does_not_block(bench):
    store = bench.store()
    bench.put(store, 1)
    assert store.claim("train", "a", max_rows=1, timeout_s=_LONG_S).count == 1
    assert bench.key_names("wait") == []


def test_a_blocked_claim_wakes_at_once_without_polling(bench, blocked, second_look):
    store, producer = bench.store(worker="w1"), bench.store(worker="p")
    claim = blocked(lambda: store.claim("train", "a", max_rows=2, timeout_s=_LONG_S)).registered(producer)
    before, until = bench.calls(), time.monotonic() + 0.4
    while time.monotonic() < until:
        assert claim.asleep
        os.sched_yield()
    assert bench.calls() == before, "functions ran while it slept"
    bench.put(producer, 2)
    assert bench.xs(claim.result()) == [0, 1]
    assert bench.calls() == before + 2, "one put, one claim"


def test_a_claim_that_cannot_take_what_is_ready_sleeps(bench, blocked):
    """Two groups of four are ready, and five rows at least are wanted in at most five."""
    table = bench.one_stage(scope="group")
    store, other = bench.store(table, worker="w1"), bench.store(table, worker="w2")
    bench.put(other, 8, group_size=4)
    claim = blocked(lambda: store.claim("train", "end", max_rows=5, min_rows=5, timeout_s=0.5)).registered(other)
    before = bench.calls()
    with pytest.raises(DeadlineExceeded):
        claim.result()
    assert bench.calls() - before <= 3, "a last claim, the end of its registration, counts"


def test_of_two_blocked_claims_one_gets_the_row_and_the_other_sleeps_on(bench, blocked):
    producer = bench.store(worker="p")
    claims = []
    for k in range(2):
        store = bench.store(worker=f"w{k}")
        call = partial(store.claim, "train", "a", max_rows=1, timeout_s=_LONG_S)
        claims.append(blocked(call).registered(producer, k + 1))
    before = bench.calls()
    bench.put(producer, 1)
    assert claims[0].result().count == 1, "the oldest waiter is served first"
    assert claims[1].asleep
    bench.put(producer, 1)
    assert claims[1].result().count == 1
    assert bench.calls() - before == 4, "two puts, two claims"


def test_a_row_whose_waiter_died_goes_to_the_next_one(bench, blocked, second_look):
    store, producer = bench.store(worker="w1"), bench.store(worker="p")
    target = producer._open("train").target
    producer._link.call("wait", target, "dead.rows", 60_000, "dead", 0, 1, 1, 0)  # nobody reads its tokens
    claim = blocked(lambda: store.claim("train", "a", max_rows=1, timeout_s=_LONG_S)).registered(producer, 2)
    bench.put(producer, 1)
    assert claim.result(_LONG_S / 4).count == 1


def test_a_lease_that_expires_wakes_a_blocked_claim(bench):
    table = bench.table(lease_s=0.1)
    dead, alive = bench.store(table, worker="w1"), bench.store(table, worker="w2")
    bench.put(dead, 1)
    bench.take(dead, "a", 1)
    assert alive.claim("train", "a", max_rows=1, timeout_s=_LONG_S).ranges[0].delivery == 2


def test_a_stage_of_ended_rows_is_served_while_claims_of_others_sleep(bench, blocked):
    store, other = bench.store(worker="w1"), bench.store(worker="w2")
    claim = blocked(lambda: store.claim("train", "recorder", max_rows=1, timeout_s=_LONG_S)).registered(other)
    bench.put(other, 1)
    other.finish(bench.take(other, "a", 1), "done")
    assert bench.xs(claim.result()) == [0]


@pytest.mark.parametrize(
    "wrong",
    [{"min_batch": 0}, {"min_size": -1}, {"error_buffer": -1.0}, {"samples_per_insert": 0.0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_limits_that_make_no_sense_are_refused(bench, wrong):
    with pytest.raises(UsageError, match=r"stage 'end' of table 'train'"):
        bench.store(bench.one_stage(**wrong))
