"""A table that is opened again with another `min_batch`, while rows are live."""

from __future__ import annotations

from dataclasses import replace

import pytest


def with_min_batch(bench, rows):
    table = bench.table()
    a, b, *others = table.stages
    return replace(table, stages=(a, replace(b, min_batch=rows), *others))


def test_a_stage_that_takes_up_min_batch_flushes_rows_that_were_ready_before(bench):
    store = bench.store(with_min_batch(bench, 1))
    bench.put(store, 8)
    bench.through_a(store, 8)
    store = bench.store(with_min_batch(bench, 32))
    assert store.claim("train", "b", max_rows=32) is None
    store.flush("train")
    assert store.claim("train", "b", max_rows=32).count == 8


def test_a_stage_that_takes_up_min_batch_waits_for_rows_that_were_waiting_before(bench):
    store = bench.store(with_min_batch(bench, 1))
    bench.put(store, 8)
    bench.put(store, 8)
    store.flush("train")
    bench.through_a(store, 8)
    store = bench.store(with_min_batch(bench, 32))
    assert store.claim("train", "b", max_rows=32) is None
    bench.through_a(store, 8)
    assert store.claim("train", "b", max_rows=32).count == 16


@pytest.mark.parametrize("before", ["waiting", "ready"])
def test_a_stage_that_gave_up_min_batch_and_takes_it_up_again_remembers_nothing(bench, before):
    store = bench.store(with_min_batch(bench, 32))
    bench.put(store, 8)
    if before == "ready":
        bench.through_a(store, 8)
    store = bench.store(with_min_batch(bench, 1))
    if before == "waiting":
        bench.through_a(store, 8)
    bench.through_b(store, 8)
    store.finish(bench.take(store, "end", 8), "done")
    store = bench.store(with_min_batch(bench, 32))
    bench.put(store, 8)
    store.flush("train")
    bench.through_a(store, 8)
    assert store.claim("train", "b", max_rows=32).count == 8
    assert bench.key_names(":open:") == []
