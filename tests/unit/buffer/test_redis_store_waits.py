"""Waiting for rows and for room. Wakes are seen by order of events, never by how long they took."""

from __future__ import annotations

import os
import threading
import time

import pytest

from rlmq.buffer.store import Interest
from rlmq.common.errors import DeadlineExceeded, UsageError

_LONG_S = 60.0


class Waiting:
    """One wait in a thread of its own."""

    def __init__(self, bench, store, interests, **options):
        self.bench, self.result = bench, None
        self._thread = threading.Thread(target=self._run, args=(store, interests, options), daemon=True)
        self._thread.start()

    def _run(self, store, interests, options):
        self.result = store.wait(interests, timeout_s=_LONG_S, **options)

    def registered(self):
        """Return when the server knows of the wait."""
        end = time.monotonic() + 20
        while not self.bench.key_names("waiters"):
            assert time.monotonic() < end, "the wait did not register"
            time.sleep(0.002)
        return self

    def woken(self):
        """What the wait returned, well before its time-out."""
        self._thread.join(20)
        assert not self._thread.is_alive(), "the wait slept on"
        return self.result


def test_a_wait_that_is_met_returns_at_once(bench):
    store = bench.store()
    bench.put(store, 2)
    assert store.wait([Interest("train", "a", rows=2)], timeout_s=_LONG_S)
    assert bench.key_names("waiters") == []


def test_a_wait_that_is_not_met_ends_with_its_time(bench):
    store = bench.store()
    bench.put(store, 2)
    assert not store.wait([Interest("train", "a", rows=3)], timeout_s=0.05)
    assert not store.wait([Interest("train", "a", rows=3)], timeout_s=0)
    assert bench.key_names("waiters") == []


def test_a_put_wakes_the_waiter(bench):
    store, other = bench.store(worker="w1"), bench.store(worker="w2")
    waiting = Waiting(bench, store, [Interest("train", "a")]).registered()
    bench.put(other, 1)
    assert waiting.woken() is True


def test_a_waiter_for_many_rows_is_not_woken_by_few(bench):
    store, other = bench.store(worker="w1"), bench.store(worker="w2")
    waiting = Waiting(bench, store, [Interest("train", "a", rows=3)]).registered()
    bench.put(other, 2)
    assert bench.key_names("waiters"), "still registered: nobody woke it"
    bench.put(other, 1)
    assert waiting.woken() is True


def test_a_write_wakes_the_next_stage(bench):
    store, other = bench.store(worker="w1"), bench.store(worker="w2")
    bench.put(other, 1)
    waiting = Waiting(bench, store, [Interest("train", "b"), Interest("train", "end")]).registered()
    bench.through_a(other, 1)
    assert waiting.woken() is True


def test_every_waiter_whose_rows_are_there_is_woken(bench):
    stores = [bench.store(worker=f"w{k}") for k in range(3)]
    waits = [Waiting(bench, store, [Interest("train", "a")]) for store in stores]
    end = time.monotonic() + 20
    while len(stores[0].waiting()) < 3 and time.monotonic() < end:
        time.sleep(0.002)
    bench.put(stores[0], 3)
    assert [wait.woken() for wait in waits] == [True] * 3


def test_two_tables_are_waited_for_at_once(bench):
    train = bench.table()
    other = type(train)("eval", train.columns, train.stages)
    store, writer = bench.store(train, worker="w1"), bench.store(train, worker="w2")
    store.open([other])
    writer.open([other])
    waiting = Waiting(bench, store, [Interest("train", "a"), Interest("eval", "a")]).registered()
    writer.put("eval", bench.rows(0, 1), producer="p", sequence=0, group_size=1)
    assert waiting.woken() is True
    assert bench.key_names("waiters") == []
    assert bench.key_names("wake:") == []


def test_a_readable_descriptor_ends_the_wait(bench):
    store = bench.store()
    reader, writer = os.pipe()
    waiting = Waiting(bench, store, [Interest("train", "a")], wake_fd=reader).registered()
    os.write(writer, b"!")
    assert waiting.woken() is False
    assert store.waiting() == []
    os.read(reader, 1)
    bench.put(store, 1)
    assert store.wait([Interest("train", "a")], timeout_s=_LONG_S, wake_fd=reader)
    os.close(reader)
    os.close(writer)


def test_a_wait_without_interests_sleeps_on_the_descriptor_alone(bench):
    store = bench.store()
    reader, writer = os.pipe()
    os.write(writer, b"!")
    assert store.wait([], timeout_s=_LONG_S, wake_fd=reader) is False
    os.close(reader)
    os.close(writer)


def test_many_waits_in_turn_leave_no_token_behind(bench):
    store, other = bench.store(worker="w1"), bench.store(worker="w2")
    for _ in range(20):
        waiting = Waiting(bench, store, [Interest("train", "a")]).registered()
        bench.put(other, 1)
        assert waiting.woken() is True
        assert store.claim("train", "a", max_rows=1).count == 1
        assert not store.wait([Interest("train", "a")], timeout_s=0.001)
    assert bench.key_names("wake:") == []


def test_an_expiring_lease_wakes_the_waiter_without_anybody_elses_doing(bench):
    table = bench.table(lease_s=0.1)
    dead, alive = bench.store(table, worker="w1"), bench.store(table, worker="w2")
    bench.put(dead, 1)
    bench.take(dead, "a", 1)
    assert alive.wait([Interest("train", "a")], timeout_s=_LONG_S)
    assert bench.take(alive, "a", 1).ranges[0].delivery == 2


def test_a_settled_wait_ends_when_filters_thinned_the_batch_out(bench):
    store, other = bench.store(worker="w1"), bench.store(worker="w2")
    bench.put(other, 4)
    bench.through_a(other, 4)
    bench.through_b(other, 3)
    waiting = Waiting(bench, store, [Interest("train", "end", rows=4, or_settled=True)]).registered()
    other.finish(bench.take(other, "b", 1), "filtered", "no_verdict")
    assert waiting.woken() is True
    assert store.counts("train").ready["end"] == 3


def test_a_settled_wait_goes_on_while_a_row_may_still_come(bench):
    store = bench.store()
    bench.put(store, 2)
    bench.through_a(store, 2)
    bench.through_b(store, 1)
    bench.take(store, "b", 1)
    assert not store.wait([Interest("train", "end", rows=2, or_settled=True)], timeout_s=0.05)


def test_waiting_tells_who_waits_for_what(bench):
    store, other = bench.store(worker="actor-0"), bench.store(worker="w2")
    bench.put(other, 1)
    waiting = Waiting(bench, store, [Interest("train", "end", rows=8, or_settled=True)]).registered()
    (line,) = other.waiting()
    assert (line.worker, line.table, line.stage) == ("actor-0", "train", "end")
    assert line.for_what == "8 ready rows, or none left to come"
    assert 0 <= line.since_s < 20
    assert line.counts.ready["a"] == 1
    other.finish(bench.take(other, "a", 1), "done")
    assert waiting.woken() is True


def test_a_full_table_blocks_its_producer_until_rows_end(bench):
    table = bench.table(capacity_rows=4)
    store, producer = bench.store(table, worker="w1"), bench.store(table, worker="prompts-0")
    bench.put(store, 4)
    thread = threading.Thread(target=bench.put, args=(producer, 3), daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not store.waiting() and time.monotonic() < end:
        time.sleep(0.002)
    (line,) = store.waiting()
    assert (line.worker, line.stage) == ("prompts-0", "")
    assert line.for_what.startswith("room for 3 rows of ")
    store.finish(bench.take(store, "a", 2), "done")
    assert thread.is_alive()
    store.finish(bench.take(store, "a", 1), "done")
    thread.join(20)
    assert not thread.is_alive()
    assert store.counts("train").live == 4


def test_a_table_that_stays_full_names_the_stage_that_must_drain(bench):
    store = bench.store(bench.table(capacity_rows=4), put_timeout_s=0.1)
    bench.put(store, 4)
    bench.through_a(store, 3)
    payload = bench.key_names("payload:")
    with pytest.raises(DeadlineExceeded, match=r"4 of 4 rows live.*room for 1.*Stage 'b' must drain \(3 rows"):
        store.put("train", bench.rows(900, 1), producer="p", sequence=9, group_size=1)
    assert bench.key_names("payload:") == payload
    assert store.counts("train").admitted == 4


def test_a_chunk_beyond_the_capacity_is_refused_at_once(bench):
    store = bench.store(bench.table(capacity_rows=4))
    with pytest.raises(UsageError, match="at most the capacity of 4"):
        store.put("train", bench.rows(0, 5), producer="p", sequence=0, group_size=1)
