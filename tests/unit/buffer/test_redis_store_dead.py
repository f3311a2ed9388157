"""Dead letters: listing, retrying, dropping, and how many are held."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from rlmq.buffer.store import RowRange
from rlmq.common.errors import IntegrityError, UsageError

pytestmark = pytest.mark.timeout(60)
_TRACEBACK = "ValueError: no verdict\nTraceback (most recent call last):\n  line 1"


def _die(bench, store, rows, reason=_TRACEBACK, stage="a"):
    """`rows` rows of a stage with one delivery fail."""
    store.nack(bench.take(store, stage, rows), reason)


def _once(bench, **options):
    return bench.table(max_deliveries=1, recorder=False, **options)


def test_a_dead_letter_tells_stage_reason_and_time(bench):
    store = bench.store(_once(bench))
    bench.put(store, 4)
    before = time.time()
    _die(bench, store, 2)
    (letter,) = store.dead_letters("train")
    assert (letter.table, letter.stage, letter.reason) == ("train", "a", _TRACEBACK)
    assert letter.range == RowRange("p.0", 0, 2)
    assert abs(letter.at - before) < 20
    assert store.counts("train").dead_letters == 2
    assert store.read("train", [letter.range], ["x"])["x"].to_pylist() == [0, 1]


def test_dead_letters_come_oldest_first(bench):
    store = bench.store(_once(bench))
    for _ in range(3):
        bench.put(store, 1)
    for k in range(3):
        _die(bench, store, 1, f"reason {k}")
        time.sleep(0.003)  # letters of one millisecond have no order
    assert [letter.reason for letter in store.dead_letters("train")] == ["reason 0", "reason 1", "reason 2"]


def test_rows_of_one_chunk_that_died_differently_are_letters_of_their_own(bench):
    store = bench.store(_once(bench))
    bench.put(store, 2)
    _die(bench, store, 1, "first")
    bench.through_a(store, 1)
    _die(bench, store, 1, "second", stage="b")
    found = {(one.range.first, one.stage, one.reason) for one in store.dead_letters("train")}
    assert found == {(0, "a", "first"), (1, "b", "second")}


def test_a_row_finished_as_dead_is_a_dead_letter(bench):
    store = bench.store(_once(bench))
    bench.put(store, 2)
    store.finish(bench.take(store, "a", 2), "dead", "unreadable", rows=[1])
    (letter,) = store.dead_letters("train")
    assert (letter.range, letter.stage, letter.reason) == (RowRange("p.0", 1, 1), "a", "unreadable")
    assert store.counts("train").ended == {"dead(unreadable)": 1}


def test_a_retried_row_is_ready_again_with_all_deliveries(bench):
    store = bench.store(bench.table(max_deliveries=2))
    bench.put(store, 3)
    for _ in range(2):
        _die(bench, store, 2)
    (letter,) = store.dead_letters("train")
    assert store.retry(letter) == 2
    counts = store.counts("train")
    assert (counts.live, counts.ready["a"], counts.ready["recorder"], counts.dead_letters) == (3, 3, 0, 0)
    assert counts.ended == {}
    assert store.dead_letters("train") == []
    for delivery in (1, 2):
        claim = bench.take(store, "a", 3)
        assert claim.ranges[0].delivery == delivery
        store.nack(claim, "again")
    assert store.counts("train").ended == {"dead(again)": 3}


def test_a_retried_row_goes_all_the_way(bench):
    store = bench.store(bench.table(max_deliveries=1))
    bench.put(store, 2)
    bench.through_a(store, 2)
    _die(bench, store, 1, stage="b")
    (letter,) = store.dead_letters("train")
    assert store.retry(letter) == 1
    counts = store.counts("train")
    assert (counts.ready["a"], counts.acked["a"], counts.ready["b"]) == (0, 2, 2), (
        "what it was done with stays done"
    )
    bench.through_b(store, 2)
    store.finish(bench.take(store, "end", 2), "trained", step=1)
    recorded = bench.take(store, "recorder", 2, columns=["x", "end_state", "end_reason"]).rows.to_pylist()
    assert recorded == [{"x": x, "end_state": "trained", "end_reason": ""} for x in (0, 1)]


def test_a_retry_that_was_done_already_does_nothing(bench):
    store = bench.store(_once(bench))
    bench.put(store, 2)
    _die(bench, store, 2)
    (letter,) = store.dead_letters("train")
    assert [store.retry(letter), store.retry(letter), store.drop(letter)] == [2, 0, 0]
    assert store.counts("train").live == 2


def test_a_row_that_was_recorded_as_dead_is_recorded_again_when_it_ends_again(bench):
    store = bench.store(bench.table(max_deliveries=1))
    bench.put(store, 1)
    _die(bench, store, 1)
    store.ack(bench.take(store, "recorder", 1))
    store.retry(store.dead_letters("train")[0])
    assert store.claim("train", "recorder", max_rows=1) is None
    store.finish(bench.take(store, "a", 1), "done")
    rows = bench.take(store, "recorder", 1, columns=["end_state"]).rows
    assert rows["end_state"].to_pylist() == ["done"]


def test_a_row_that_is_being_recorded_cannot_be_retried(bench):
    store = bench.store(bench.table(max_deliveries=1), worker="recorder-0")
    bench.put(store, 1)
    _die(bench, store, 1)
    claim = bench.take(store, "recorder", 1)
    (letter,) = store.dead_letters("train")
    with pytest.raises(UsageError, match="a lease of worker 'recorder-0' that names them"):
        store.retry(letter)
    store.ack(claim)
    assert store.retry(letter) == 1


def test_a_full_table_takes_no_row_back(bench):
    store = bench.store(replace(_once(bench), capacity_rows=2))
    bench.put(store, 2)
    _die(bench, store, 1)
    bench.put(store, 1)
    (letter,) = store.dead_letters("train")
    with pytest.raises(UsageError, match="2 of 2 rows live"):
        store.retry(letter)
    store.finish(bench.take(store, "a", 1), "done")
    assert store.retry(letter) == 1


def test_a_dropped_row_stays_counted_and_its_payload_goes(bench):
    store = bench.store(_once(bench))
    bench.put(store, 2)
    _die(bench, store, 2)
    (letter,) = store.dead_letters("train")
    assert [store.drop(letter), store.drop(letter), store.retry(letter)] == [2, 0, 0]
    counts = store.counts("train")
    assert (counts.ended, counts.dead_letters, counts.live) == ({"dead(ValueError: no verdict)": 2}, 0, 0)
    assert bench.key_names("payload:") == []
    with pytest.raises(IntegrityError):
        store.read("train", [letter.range], ["x"])


def test_a_dropped_row_is_still_recorded(bench):
    store = bench.store(bench.table(max_deliveries=1))
    bench.put(store, 1)
    _die(bench, store, 1)
    store.drop(store.dead_letters("train")[0])
    claim = bench.take(store, "recorder", 1, columns=["x", "end_state"])
    assert claim.rows.to_pylist() == [{"x": 0, "end_state": "dead"}]
    store.ack(claim)
    assert bench.key_names("payload:") == []


def test_beyond_max_dead_rows_the_oldest_letter_loses_its_payload(bench):
    store = bench.store(replace(_once(bench), max_dead_rows=3))
    for _ in range(4):
        bench.put(store, 1)
    for k in range(4):
        _die(bench, store, 1, f"reason {k}")
        time.sleep(0.003)  # letters of one millisecond have no order
    letters = store.dead_letters("train")
    assert [letter.reason for letter in letters] == ["reason 1", "reason 2", "reason 3"]
    assert len(bench.key_names("chunk:")) == 3
    assert bench.key_names("payload:p.0/") == []
    counts = store.counts("train")
    assert (counts.dead_letters, sum(counts.ended.values())) == (3, 4)


def test_without_dead_letters_a_dead_row_frees_its_payload_at_once(bench):
    store = bench.store(replace(_once(bench), max_dead_rows=0))
    bench.put(store, 2)
    _die(bench, store, 2)
    assert store.dead_letters("train") == []
    assert bench.key_names("payload:") == []
    assert store.counts("train").ended == {"dead(ValueError: no verdict)": 2}


def test_dead_rows_do_not_count_against_the_capacity(bench):
    store = bench.store(replace(_once(bench), capacity_rows=2), put_timeout_s=0.05)
    bench.put(store, 2)
    _die(bench, store, 2)
    bench.put(store, 2)
    assert store.counts("train").live == 2
    assert store.counts("train").dead_letters == 2
