"""What a stage wrote points at something that is gone: its rows are made again."""

from __future__ import annotations

import pytest

from rlmq.buffer.redis_store import RedisStore
from rlmq.common.errors import Fenced


def test_rows_whose_column_is_gone_are_not_ready_until_it_is_made_again(bench):
    store = bench.store(bench.table())
    bench.put(store, 4)
    bench.through_a(store, 4)
    # given a claim of `b` that finds two rows' `y` pointing at nothing
    claim = bench.take(store, "b", 4)
    store.lose(claim, [1, 3], "a", ["y"])
    # then these are ready for `a`, and not for `b`; the others stay with the claim
    counts = store.counts("train")
    assert (counts.ready["a"], counts.ready["b"], counts.leased["b"]) == (2, 0, 2)
    assert bench.broken() == []
    again = bench.take(store, "a", 2)
    assert bench.xs(again) == [1, 3]
    assert [r.delivery for r in again.ranges] == [1, 1]
    store.release(claim)
    assert store.counts("train").ready["b"] == 2
    # and what is made again is what is read; a loss is no delivery
    store.write(again, bench.y([71, 73]), ack=True)
    found = bench.take(store, "b", 4, ["x", "y"])
    assert found.rows.to_pylist() == [
        {"x": 0, "y": [0, 0]},
        {"x": 1, "y": [71, 71]},
        {"x": 2, "y": [2, 2]},
        {"x": 3, "y": [73, 73]},
    ]
    assert {r.delivery for r in found.ranges} == {1}
    store.write(found, bench.z([0, 1, 2, 3]), ack=True)
    assert store.counts("train").ready["end"] == 4
    assert bench.broken() == []


def test_a_loss_needs_a_lease_and_leaves_ended_rows_and_stages_that_are_done(bench):
    table = bench.with_stage(bench.table(), "end", needs=("y",))
    store: RedisStore = bench.store(table)
    bench.put(store, 3)
    bench.through_a(store, 3)
    bench.through_b(store, 1)  # row 0 is done for b
    end = bench.take(store, "end", 3)
    store.finish(end, "filtered", "no", rows=[2])
    store.lose(end, [0, 1, 2], "a", ["y"])
    counts = store.counts("train")
    assert (counts.ready["a"], counts.ready["b"], counts.leased["end"], counts.live) == (2, 0, 0, 2)
    assert bench.broken() == []
    bench.through_a(store, 2)
    assert store.counts("train").ready["b"] == 1
    assert store.counts("train").ready["end"] == 2
    store.release(end)
    with pytest.raises(Fenced):
        store.lose(end, [0], "a", ["y"])
    assert bench.broken() == []
