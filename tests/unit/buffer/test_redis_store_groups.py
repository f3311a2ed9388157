"""Group deadlines: train with enough members, or end the group."""

from __future__ import annotations

import time

import pytest

from rlmq.common.errors import UsageError

pytestmark = pytest.mark.timeout(60)
_LONG_S = 60.0


def _table(bench, *, least=1, deadline_s=0.1, **options):
    return bench.with_stage(bench.table(b="group", **options), "b", group_deadline_s=deadline_s, group_min=least)


def _ended(store, rows, timeout_s=20.0):
    """The end states, when so many rows have one."""
    end = time.monotonic() + timeout_s
    while sum(store.counts("train").ended.values()) < rows:
        assert time.monotonic() < end, f"{rows} rows did not end: {store.counts('train')}"
        store.expire()
    return store.counts("train").ended


def test_at_its_deadline_a_group_with_enough_members_goes_on_without_the_missing(bench):
    store = bench.store(_table(bench, least=2))
    bench.put(store, 4, group_size=4)
    bench.through_a(store, 2)
    claim = store.claim("train", "b", max_rows=4, timeout_s=_LONG_S)
    assert bench.xs(claim) == [0, 1]
    counts = store.counts("train")
    assert (counts.ended, counts.live) == ({"dead(group deadline)": 2}, 2)
    assert counts.ready["a"] == 0


def test_at_its_deadline_a_group_with_too_few_members_ends(bench):
    store = bench.store(_table(bench, least=3))
    bench.put(store, 4, group_size=4)
    bench.through_a(store, 2)
    assert _ended(store, 4) == {"dead(group deadline)": 4}
    assert store.claim("train", "b", max_rows=4) is None
    assert store.counts("train").live == 0


def test_the_deadline_is_of_one_group_and_not_of_its_chunk(bench):
    store = bench.store(_table(bench))
    bench.put(store, 6, group_size=2)
    bench.through_a(store, 3)
    assert bench.xs(store.claim("train", "b", max_rows=2)) == [0, 1]
    assert _ended(store, 1) == {"dead(group deadline)": 1}
    assert bench.xs(bench.take(store, "b", 1)) == [2]
    assert store.counts("train").ready["a"] == 2, "no member of the third group is complete: it has no deadline yet"


def test_a_group_that_became_complete_in_time_has_no_deadline_any_more(bench):
    store = bench.store(_table(bench, least=2, deadline_s=0.05))
    bench.put(store, 2, group_size=2)
    for _ in range(2):
        bench.through_a(store, 1)
    _wait_beyond(store, 0.1)
    assert store.counts("train").ended == {}
    assert bench.xs(bench.take(store, "b", 2)) == [0, 1]


def test_a_group_that_is_worked_on_has_no_deadline_any_more(bench):
    store = bench.store(_table(bench, least=2, deadline_s=0.05))
    bench.put(store, 4, group_size=2)
    for _ in range(3):
        bench.through_a(store, 1)
    claim = bench.take(store, "b", 2)
    assert _ended(store, 2) == {"dead(group deadline)": 2}
    store.write(claim, bench.z([0.0, 1.0]), ack=True)
    assert bench.xs(bench.take(store, "end", 2)) == [0, 1]


def test_a_filtered_member_starts_no_deadline_and_is_not_missing(bench):
    store = bench.store(_table(bench, least=2, deadline_s=0.05))
    bench.put(store, 3, group_size=3)
    store.finish(bench.take(store, "a", 1), "filtered", "easy")
    _wait_beyond(store, 0.1)
    assert store.counts("train").ended == {"filtered(easy)": 1}
    bench.through_a(store, 2)
    assert bench.xs(bench.take(store, "b", 2)) == [1, 2]


def test_a_write_that_comes_after_the_deadline_changes_no_count(bench):
    store, slow = bench.store(_table(bench), worker="w1"), bench.store(_table(bench), worker="slow")
    bench.put(store, 4, group_size=4)
    bench.through_a(store, 2)
    late = bench.take(slow, "a", 2)
    claim = store.claim("train", "b", max_rows=4, timeout_s=_LONG_S)
    before = store.counts("train")
    slow.write(late, bench.y([2, 3]), ack=True)
    after = store.counts("train")
    assert (after.ended, after.live, after.ready, after.leased) == (
        {"dead(group deadline)": 2},
        2,
        before.ready,
        before.leased,
    )
    store.write(claim, bench.z([0.0, 1.0]), ack=True)
    assert store.counts("train").ready["end"] == 2


def test_the_missing_members_are_dead_letters_that_say_why(bench):
    store = bench.store(_table(bench))
    bench.put(store, 3, group_size=3)
    bench.through_a(store, 1)
    _ended(store, 2)
    (letter,) = store.dead_letters("train")
    assert (letter.range.chunk, letter.range.first, letter.range.count) == ("p.0", 1, 2)
    assert letter.reason == "group deadline"


def test_a_member_that_is_retried_after_the_deadline_goes_through_alone(bench):
    store = bench.store(_table(bench))
    bench.put(store, 2, group_size=2)
    bench.through_a(store, 1)
    assert bench.xs(store.claim("train", "b", max_rows=2, timeout_s=_LONG_S)) == [0]
    (letter,) = store.dead_letters("train")
    assert store.retry(letter) == 1
    bench.through_a(store, 1)
    assert bench.xs(store.claim("train", "b", max_rows=2)) == [1]
    assert store.counts("train").ended.get("dead(group deadline)", 0) == 0


def test_a_deadline_in_row_scope_is_refused(bench):
    with pytest.raises(UsageError, match=r"group_deadline_s in scope row.*scope group or chunk"):
        bench.store(bench.one_stage(group_deadline_s=1.0))


def _wait_beyond(store, seconds):
    """Let so much time pass, and the store take notice of it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store.expire()
