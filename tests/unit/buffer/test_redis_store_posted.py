"""Posted calls: the worker goes on at once, and neither the call nor its refusal is lost."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rlmq.common.errors import DependencyError, Fenced

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store(bench):
    return bench.store(worker="w1")


def _lost(bench, store):
    """A claim of stage `a` whose row was given back since: another process of the worker's name came."""
    bench.put(store, 1)
    claim = bench.take(store, "a", 1)
    assert bench.store(worker="w1").recover() == 1
    return claim


def test_posted_calls_reach_the_server_without_another_call(bench, store):
    other = bench.store(worker="w2")
    bench.put(store, 2)
    store.write(bench.take(store, "a", 2), bench.y([1, 2]), ack=True, wait=False)
    taken = other.claim("train", "b", max_rows=2, min_rows=2, timeout_s=20)
    assert taken.rows["y"].to_pylist() == [[1, 1], [2, 2]]
    other.write(taken, bench.z([1, 2]))
    other.ack(taken, wait=False)
    assert store.claim("train", "end", max_rows=2, min_rows=2, timeout_s=20) is not None
    assert other.counts("train").acked["b"] == 2


def test_claim_after_claim_ends_without_waiting(bench, store):
    for k in range(5):
        bench.put(store, 1)
        store.write(bench.take(store, "a", 1), bench.y([k]), ack=True, wait=False)
    for _ in range(5):
        store.ack(bench.take(store, "b", 1), wait=False)
    counts = store.counts("train")
    assert (counts.acked["a"], counts.acked["b"], counts.leased["a"]) == (5, 5, 0)


def test_a_posted_call_whose_answer_is_lost_is_made_again_and_applied_once(bench, store):
    bench.put(store, 1)
    store.write(bench.take(store, "a", 1), bench.y([7]), ack=True, wait=False)
    store._link._wire.disconnect()
    assert bench.take(store, "b", 1).rows["y"].to_pylist() == [[7, 7]]
    counts = store.counts("train")
    assert (counts.acked["a"], counts.fenced, counts.redelivered) == (1, 0, 0)


def test_a_posted_call_to_a_server_that_went_is_made_when_it_is_back(own_server, own_bench):
    bench, store = own_bench, own_bench.store(retry_s=0.2)
    bench.put(store, 1)
    claim = bench.take(store, "a", 1)
    own_server.kill()

    def write_twice():  # the first one may not notice
        store.write(claim, bench.y([7]), ack=True, wait=False)
        store.write(claim, bench.y([7]), ack=True, wait=False)

    with pytest.raises(DependencyError, match="Look at its log"):
        write_twice()
    own_server.start()
    assert bench.take(store, "b", 1).rows["y"].to_pylist() == [[7, 7]]


@pytest.mark.parametrize("verb", ["write", "ack"])
def test_a_refusal_is_raised_by_a_later_call_and_only_once(bench, store, verb):
    claim = _lost(bench, store)
    if verb == "write":
        store.write(claim, bench.y([1]), ack=True, wait=False)
    else:
        store.ack(claim, wait=False)
    store.counts("train")
    with pytest.raises(Fenced, match=claim.lease):
        store.counts("train")
    assert store.counts("train").fenced == 1
    assert bench.take(store, "a", 1).ranges[0].delivery == 2


def test_a_claim_is_not_lost_by_a_refusal_that_it_brings(bench, store):
    store.ack(_lost(bench, store), wait=False)
    claim = store.claim("train", "a", max_rows=1, timeout_s=20)
    with pytest.raises(Fenced):
        store.ack(claim)
    store.ack(claim)
    assert store.counts("train").acked["a"] == 1


def test_the_last_refusal_is_raised_when_the_store_closes(bench, store):
    store.ack(_lost(bench, store), wait=False)
    with pytest.raises(Fenced):
        store.close()


def test_what_does_not_end_its_claim_or_is_large_waits_for_its_answer(bench, store):
    with pytest.raises(Fenced):
        store.write(_lost(bench, store), bench.y([0]), wait=False)
    large = pa.record_batch({"y": pa.array([range(20_000)], bench.y([0]).schema.field("y").type)})
    claim = bench.take(store, "a", 1)
    assert bench.store(worker="w1").recover() == 1
    with pytest.raises(Fenced):
        store.write(claim, large, ack=True, wait=False)


def test_a_posted_write_that_found_no_memory_is_made_again(bench, store):
    bench.put(store, 1)
    claim = bench.take(store, "a", 1)
    bench.client.config_set("maxmemory", 1)
    try:
        store.write(claim, bench.y([7]), ack=True, wait=False)
        store._link.settle()
    finally:
        bench.client.config_set("maxmemory", 0)
    assert bench.take(store, "b", 1).rows["y"].to_pylist() == [[7, 7]]
    assert bench.broken() == []
