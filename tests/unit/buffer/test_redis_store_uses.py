"""Rows that are trained on more than once."""

from __future__ import annotations

import pytest

from rlmq.buffer.store import RowRange
from rlmq.common.errors import Fenced

pytestmark = pytest.mark.timeout(60)


def test_a_row_is_claimed_max_uses_times_and_ends_as_trained_so_often(bench):
    store = bench.store(bench.one_stage(max_uses=3))
    bench.put(store, 2)
    for step in range(3):
        claim = bench.take(store, "end", 2)
        assert {one.use for one in claim.ranges} == {step}
        store.finish(claim, "trained", step=step)
        assert store.counts("train").uses == 2 * (step + 1)
    assert store.claim("train", "end", max_rows=2) is None
    counts = store.counts("train")
    assert (counts.ended, counts.live) == ({"trained(3)": 2}, 0)


def test_payload_of_a_row_is_held_until_its_last_use_is_durable(bench):
    store = bench.store(bench.one_stage(max_uses=3))
    bench.put(store, 1)
    for step in (4, 5, 6):
        store.advance(step - 1)
        store.finish(bench.take(store, "end", 1), "trained", step=step)
        assert store.read("train", [RowRange("p.0", 0, 1)], ["x"])["x"].to_pylist() == [0]
    store.advance(5)
    assert bench.key_names("payload:") != []
    store.advance(6)
    assert bench.key_names("payload:") == []


def test_every_use_has_all_deliveries(bench):
    store = bench.store(bench.one_stage(max_uses=2, max_deliveries=2))
    bench.put(store, 1)
    for step in range(2):
        store.nack(bench.take(store, "end", 1), "no")
        claim = bench.take(store, "end", 1)
        assert (claim.ranges[0].delivery, claim.ranges[0].use) == (2, step)
        store.finish(claim, "trained", step=step)
    assert store.counts("train").live == 0


def test_a_row_that_fails_after_a_use_ends_as_trained_once(bench):
    store = bench.store(bench.one_stage(max_uses=2, max_deliveries=1))
    bench.put(store, 1)
    store.finish(bench.take(store, "end", 1), "trained", step=3)
    store.nack(bench.take(store, "end", 1), "broken")
    assert store.counts("train").ended == {"trained(1)": 1}
    assert store.dead_letters("train") == []
    store.advance(3)
    assert bench.key_names("payload:") == []


def test_a_row_that_grows_stale_after_a_use_ends_as_trained_once(bench):
    store = bench.store(bench.one_stage(max_uses=3, max_staleness=1))
    bench.put(store, 1, version=0)
    store.finish(store.claim("train", "end", max_rows=1, version=1), "trained", step=1)
    assert store.claim("train", "end", max_rows=1, version=2) is None
    assert store.counts("train").ended == {"trained(1)": 1}
    assert bench.key_names("payload:") != [], "its use is not durable yet"
    store.advance(1)
    assert bench.key_names("payload:") == []


def test_rows_of_one_claim_may_be_of_different_use(bench):
    store = bench.store(bench.one_stage(max_uses=2))
    bench.put(store, 3)
    store.finish(bench.take(store, "end", 1), "trained", step=0)
    claim = bench.take(store, "end", 3)
    assert [(one.first, one.count, one.use) for one in claim.ranges] == [(0, 1, 1), (1, 2, 0)]
    store.finish(claim, "trained", step=1)
    counts = store.counts("train")
    assert (counts.uses, counts.live, counts.ready["end"], counts.ended) == (4, 2, 2, {"trained(2)": 1})


def test_a_part_of_a_claim_that_is_finished_is_ready_while_the_rest_is_leased(bench):
    store, other = bench.store(bench.one_stage(max_uses=2)), bench.store(bench.one_stage(max_uses=2), worker="w1")
    bench.put(store, 2)
    claim = bench.take(store, "end", 2)
    store.finish(claim, "trained", rows=[0], step=0)
    second = bench.take(other, "end", 1)
    assert (bench.xs(second), second.ranges[0].use) == ([0], 1)
    store.nack(claim, "the rest failed")
    assert other.counts("train").leased["end"] == 1, "the other worker's row is still its own"
    other.finish(second, "trained", step=1)
    assert [(one.first, one.delivery, one.use) for one in bench.take(other, "end", 1).ranges] == [(1, 2, 0)]


def test_redo_of_a_logged_use_counts_once(bench):
    store = bench.store(bench.one_stage(max_uses=3))
    bench.put(store, 2)
    for _ in range(3):
        store.finish_logged("train", "end", [RowRange("p.0", 0, 2, use=0)], step=5)
    assert store.counts("train").uses == 2
    store.finish_logged("train", "end", [RowRange("p.0", 0, 2, use=1)], step=6)
    store.finish_logged("train", "end", [RowRange("p.0", 0, 2, use=0)], step=5)
    assert store.counts("train").uses == 4
    assert {one.use for one in bench.take(store, "end", 2).ranges} == {2}


def test_redo_of_the_last_use_ends_the_row_once(bench):
    store = bench.store(bench.one_stage(max_uses=2))
    bench.put(store, 1)
    for use, step in ((0, 1), (1, 2), (1, 2), (0, 1)):
        store.finish_logged("train", "end", [RowRange("p.0", 0, 1, use=use)], step=step)
    counts = store.counts("train")
    assert (counts.ended, counts.uses) == ({"trained(2)": 1}, 2)


def test_redo_of_what_was_finished_does_nothing_to_its_next_use(bench):
    store = bench.store(bench.one_stage(max_uses=2))
    bench.put(store, 1)
    first = bench.take(store, "end", 1)
    store.finish(first, "trained", step=1)
    second = bench.take(store, "end", 1)
    store.finish_logged("train", "end", first.ranges, step=1)
    store.extend(second)
    store.finish(second, "trained", step=2)
    assert store.counts("train").ended == {"trained(2)": 1}


def test_redo_takes_the_row_from_a_worker_that_died_before_it_could_finish(bench):
    dead, alive = bench.store(bench.one_stage(max_uses=2)), bench.store(bench.one_stage(max_uses=2), worker="w1")
    bench.put(dead, 1)
    lost = bench.take(dead, "end", 1)
    alive.finish_logged("train", "end", lost.ranges, step=1)
    claim = bench.take(alive, "end", 1)
    assert claim.ranges[0].use == 1
    with pytest.raises(Fenced):
        dead.finish(lost, "trained", step=1)
    alive.finish(claim, "trained", step=2)
    assert alive.counts("train").ended == {"trained(2)": 1}


def test_a_row_that_every_stage_acked_after_a_use_ends_as_trained(bench):
    store = bench.store(bench.one_stage(max_uses=2))
    bench.put(store, 1)
    store.finish(bench.take(store, "end", 1), "trained", step=1)
    store.ack(bench.take(store, "end", 1))
    assert store.counts("train").ended == {"trained(1)": 1}
    assert bench.key_names("payload:") != []
    store.advance(1)
    assert bench.key_names("payload:") == []
