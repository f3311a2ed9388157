"""End states, the stage that receives ended rows, freeing, redo of the batch log."""

from __future__ import annotations

import pytest

from rlmq.buffer.store import RowRange
from rlmq.common.errors import Fenced, IntegrityError, UsageError


def test_a_finished_row_is_past_every_ordinary_stage(bench):
    store = bench.store()
    bench.put(store, 3)
    claim = bench.take(store, "a", 3)
    store.write(claim, bench.y([0, 1, 2]))
    store.finish(claim, "filtered", "too_long", rows=[1])
    counts = store.counts("train")
    assert counts.ended == {"filtered(too_long)": 1}
    assert (counts.live, counts.ready["b"], counts.ready["recorder"]) == (2, 2, 1)
    store.ack(claim)
    assert bench.xs(bench.take(store, "b", 2)) == [0, 2]


def test_rows_leased_by_another_stage_are_taken_from_it_when_they_end(bench):
    store = bench.store()
    bench.put(store, 2)
    a = bench.take(store, "a", 2)
    store.write(a, bench.y([0, 1]))
    b = bench.take(store, "b", 2)
    store.finish(a, "stale", "old", rows=[0])
    store.write(b, bench.z([0.0, 1.0]), ack=True)
    counts = store.counts("train")
    assert counts.ended == {"stale(old)": 1}
    assert (counts.acked["b"], counts.leased["b"]) == (2, 0)


def test_finishing_all_rows_ends_the_claim_and_a_later_ack_does_nothing(bench):
    store = bench.store()
    bench.put(store, 2)
    claim = bench.take(store, "a", 2)
    store.finish(claim, "filtered", "x", rows=[1])
    store.finish(claim, "done", rows=[0])
    store.ack(claim)
    assert store.counts("train").ended == {"filtered(x)": 1, "done": 1}
    with pytest.raises(Fenced):
        store.write(claim, bench.y([1, 2]))


def test_a_row_keeps_its_first_end_state(bench):
    store = bench.store()
    bench.put(store, 1)
    claim = bench.take(store, "a", 1)
    store.finish(claim, "done")
    store.finish(claim, "filtered", "late")
    assert store.counts("train").ended == {"done": 1}


def test_rows_that_every_stage_acked_end_as_done(bench):
    store = bench.store()
    bench.ready_for_end(store, 4)
    store.ack(bench.take(store, "end", 3))
    counts = store.counts("train")
    assert counts.ended == {"done": 3}
    assert (counts.live, counts.ready["recorder"]) == (1, 3)


def test_the_recorder_receives_each_ended_row_once_with_nulls_for_absent_columns(bench):
    store = bench.store()
    bench.put(store, 4)
    bench.through_a(store, 3)
    bench.through_b(store, 1)
    store.finish(bench.take(store, "end", 1), "trained", step=1)
    store.finish(bench.take(store, "b", 1), "filtered", "slow")
    store.finish(bench.take(store, "a", 1), "dead", "broken")
    claim = bench.take(store, "recorder", 3)
    assert [(r["x"], r["y"], r["z"]) for r in claim.rows.to_pylist()] == [
        (0, [0, 0], 0.0),
        (1, [1, 1], None),
        (3, None, None),
    ]
    store.ack(claim)
    assert store.claim("train", "recorder", max_rows=9) is None
    store.finish(bench.take(store, "b", 1), "done")
    assert bench.xs(bench.take(store, "recorder", 1)) == [2]


def test_end_columns_tell_how_a_row_ended(bench):
    store = bench.store()
    bench.ready_for_end(store, 2)
    claim = bench.take(store, "end", 2)
    store.finish(claim, "trained", rows=[0], step=12)
    store.finish(claim, "filtered", "no_verdict", rows=[1])
    rows = bench.take(store, "recorder", 2, columns=["end_state", "end_reason", "end_step", "x"]).rows.to_pylist()
    assert rows[0] == {"end_state": "trained", "end_reason": "", "end_step": 12, "x": 0}
    assert rows[1] == {"end_state": "filtered", "end_reason": "no_verdict", "end_step": -1, "x": 1}


def test_payload_is_held_until_the_recorder_acked(bench):
    store = bench.store()
    bench.put(store, 2)
    store.finish(bench.take(store, "a", 2), "done")
    claim = bench.take(store, "recorder", 2)
    assert store.read("train", claim.ranges, ["x"])["x"].to_pylist() == [0, 1]
    store.ack(claim)
    assert bench.key_names("payload:") == []
    assert bench.key_names("chunk:") == []
    assert store.counts("train").payload_bytes == 0


def test_trained_rows_are_held_until_a_checkpoint_covers_their_step(bench):
    store = bench.store()
    bench.ready_for_end(store, 2)
    bench.ready_for_end(store, 2)
    for step in (4, 5):
        store.finish(bench.take(store, "end", 2), "trained", step=step)
    store.ack(bench.take(store, "recorder", 4))
    assert len(bench.key_names("chunk:")) == 2
    assert store.counts("train").durable == -1
    store.advance(4)
    store.advance(4)
    assert store.counts("train").durable == 4
    assert len(bench.key_names("chunk:")) == 1
    assert store.read("train", [RowRange("p.1", 0, 2)], ["z"])["z"].to_pylist() == [100.0, 101.0]
    store.advance(9)
    assert bench.key_names("payload:") == []


def test_a_recorder_slower_than_the_checkpoint_still_gets_its_rows(bench):
    store = bench.store()
    bench.ready_for_end(store, 1)
    store.finish(bench.take(store, "end", 1), "trained", step=0)
    store.advance(0)
    claim = bench.take(store, "recorder", 1)
    assert bench.xs(claim) == [0]
    store.ack(claim)
    assert bench.key_names("chunk:") == []


def test_rows_trained_in_a_step_that_is_durable_already_are_not_held(bench):
    store = bench.store(bench.table(recorder=False))
    store.advance(7)
    bench.ready_for_end(store, 1)
    store.finish(bench.take(store, "end", 1), "trained", step=7)
    assert bench.key_names("chunk:") == []


def test_trained_without_a_step_is_refused(bench):
    store = bench.store()
    bench.put(store, 1)
    with pytest.raises(UsageError, match="with its step"):
        store.finish(bench.take(store, "a", 1), "trained")


def test_redo_marks_logged_rows_as_trained_whoever_holds_them(bench):
    store = bench.store()
    bench.ready_for_end(store, 4)
    lost = bench.take(store, "end", 2)
    for _ in range(2):
        store.finish_logged("train", "end", [RowRange("p.0", 0, 3)], step=2)
    counts = store.counts("train")
    assert counts.ended == {"trained": 3}
    assert (counts.live, counts.leased["end"], counts.ready["end"], counts.acked["end"]) == (1, 0, 1, 3)
    store.ack(lost)
    assert store.counts("train").ended == {"trained": 3}


def test_redo_of_freed_rows_does_nothing(bench):
    store = bench.store(bench.table(recorder=False))
    bench.ready_for_end(store, 2)
    store.finish(bench.take(store, "end", 2), "trained", step=2)
    store.advance(2)
    store.finish_logged("train", "end", [RowRange("p.0", 0, 2)], step=2)
    assert store.counts("train").ended == {"trained": 2}


def test_redo_of_rows_that_ended_otherwise_is_an_integrity_error(bench):
    store = bench.store()
    bench.put(store, 2)
    store.finish(bench.take(store, "a", 2), "filtered", "x")
    with pytest.raises(IntegrityError, match=r"chunk 'p\.0'.*logged step 3"):
        store.finish_logged("train", "end", [RowRange("p.0", 0, 1)], step=3)


def test_rows_logged_before_the_server_knew_them_are_trained_when_put_again(bench):
    store = bench.store()
    store.finish_logged("train", "end", [RowRange("p.0", 1, 2)], step=3)
    bench.put(store, 4)
    counts = store.counts("train")
    assert counts.ended == {"trained": 2}
    assert bench.xs(bench.take(store, "a", 2)) == [0, 3]


def test_a_table_comes_back_to_its_base_keys(bench):
    store = bench.store()
    bench.put(store, 1)
    base = None
    for step in range(3):
        bench.through_a(store, 1)
        bench.through_b(store, 1)
        store.finish(bench.take(store, "end", 1), "trained", step=step)
        store.ack(bench.take(store, "recorder", 1))
        store.advance(step)
        base = base or bench.key_names()
        assert bench.key_names() == base
        bench.put(store, 1)
