"""Leases: expiry, redelivery, fencing, dead rows."""

from __future__ import annotations

import time

import pytest

from rlmq.common.errors import DecodeError, Fenced


def _until_claimed(store, stage, count, timeout_s=20.0):
    """Claim `count` rows as soon as they are there again."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        claim = store.claim("train", stage, max_rows=count, min_rows=count)
        if claim is not None:
            return claim
        store.wait([], timeout_s=0.005)
    pytest.fail(f"{count} rows did not come back to stage {stage}")


def test_rows_of_an_expired_lease_go_to_another_worker_as_delivery_2(bench):
    table = bench.table(lease_s=0.05)
    dead, alive = bench.store(table, worker="w1"), bench.store(table, worker="w2")
    bench.put(dead, 3)
    bench.take(dead, "a", 3)
    claim = _until_claimed(alive, "a", 3)
    assert {r.delivery for r in claim.ranges} == {2}
    assert alive.counts("train").redelivered == 3


def test_every_write_under_a_lost_lease_is_fenced(bench):
    table = bench.table(lease_s=0.05, max_deliveries=40)
    slow, other = bench.store(table, worker="w1"), bench.store(table, worker="w2")
    bench.put(slow, 2)
    lost = bench.take(slow, "a", 2)
    _until_claimed(other, "a", 2)
    with pytest.raises(Fenced, match="got a lease that ended or expired"):
        slow.write(lost, bench.y([1, 2]), ack=True)
    for late in (slow.ack, slow.extend, slow.release):
        with pytest.raises(Fenced):
            late(lost)
    with pytest.raises(Fenced):
        slow.nack(lost, "late")
    with pytest.raises(Fenced):
        slow.finish(lost, "filtered", "late")


def test_an_extended_lease_outlives_its_first_deadline(bench):
    store = bench.store(bench.table(lease_s=0.5))
    bench.put(store, 1)
    claim = bench.take(store, "a", 1)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        store.extend(claim)
        assert store.expire() == 0
    store.ack(claim)
    assert store.counts("train").redelivered == 0


def test_a_nacked_row_comes_back_and_dies_with_its_reason_after_its_deliveries(bench):
    store = bench.store(bench.table(max_deliveries=3))
    bench.put(store, 2)
    for delivery in (1, 2, 3):
        claim = bench.take(store, "a", 2)
        assert {r.delivery for r in claim.ranges} == {delivery}
        store.nack(claim, "ValueError: no\nTraceback: line 1")
    counts = store.counts("train")
    assert counts.ended == {"dead(ValueError: no)": 2}
    assert (counts.live, counts.redelivered) == (0, 4)
    dead = bench.take(store, "recorder", 2, columns=["x", "end_state", "end_reason"])
    assert dead.rows.to_pylist()[1] == {
        "x": 1,
        "end_state": "dead",
        "end_reason": "ValueError: no\nTraceback: line 1",
    }


def test_a_row_that_always_kills_its_worker_dies_too(bench):
    store = bench.store(bench.table(lease_s=0.02, max_deliveries=2), worker="w9")
    bench.put(store, 1)
    for _ in range(2):
        _until_claimed(store, "a", 1)
    end = time.monotonic() + 20
    while store.counts("train").live and time.monotonic() < end:
        store.expire()
    assert store.counts("train").ended == {"dead(lease expired)": 1}
    dead = bench.take(store, "recorder", 1, columns=["end_reason"])
    assert "w9" in dead.rows["end_reason"][0].as_py()


def test_release_is_not_counted_as_a_delivery(bench):
    store = bench.store(bench.table(max_deliveries=2))
    bench.put(store, 1)
    for _ in range(5):
        claim = bench.take(store, "a", 1)
        assert claim.ranges[0].delivery == 1
        store.release(claim)
    assert store.counts("train").redelivered == 0


def test_only_the_rows_that_failed_too_often_die(bench):
    store = bench.store(bench.table(max_deliveries=2))
    bench.put(store, 2)
    store.nack(bench.take(store, "a", 1), "first row")
    both = bench.take(store, "a", 2)
    assert [r.delivery for r in both.ranges] == [2, 1]
    store.nack(both, "again")
    counts = store.counts("train")
    assert counts.ended == {"dead(again)": 1}
    assert bench.xs(bench.take(store, "a", 1)) == [1]


def test_one_lease_counts_and_ends_independently_of_other_stages(bench):
    store = bench.store()
    bench.put(store, 2)
    a = bench.take(store, "a", 2)
    store.write(a, bench.y([0, 1]))
    b = bench.take(store, "b", 2)
    store.ack(a)
    store.write(b, bench.z([0.0, 1.0]), ack=True)
    counts = store.counts("train")
    assert counts.acked == {"a": 2, "b": 2, "end": 0, "recorder": 0}
    assert counts.leased == {"a": 0, "b": 0, "end": 0, "recorder": 0}


def test_an_operation_repeated_after_its_reply_was_lost_is_applied_once(bench):
    store = bench.store()
    bench.put(store, 2)
    claim = bench.take(store, "a", 2)
    sent = []
    exchange = store._link.exchange

    def twice(commands):
        sent.append(commands)
        exchange(commands)
        return exchange(commands)

    store._link.exchange = twice
    store.write(claim, bench.y([1, 2]), ack=True)
    again = bench.take(store, "b", 2)
    store.nack(again, "once")
    third = bench.take(store, "b", 2)
    assert {r.delivery for r in third.ranges} == {2}
    store.finish(third, "filtered", "no")
    store._link.exchange = exchange
    counts = store.counts("train")
    assert (counts.ended, counts.redelivered, counts.leased["b"]) == ({"filtered(no)": 2}, 2, 0)
    assert len(sent) > 4
    store.ack(bench.take(store, "recorder", 2))
    assert bench.key_names("payload:") == []


def test_a_restarted_worker_takes_back_what_its_dead_process_held(bench):
    dead, other = bench.store(worker="actor-0"), bench.store(worker="actor-1")
    bench.put(dead, 4)
    lost = bench.take(dead, "a", 2)
    kept = bench.take(other, "a", 1)
    restarted = bench.store(worker="actor-0")
    own = bench.take(restarted, "a", 1)
    assert restarted.recover() == 1
    assert {r.delivery for r in bench.take(restarted, "a", 2).ranges} == {2}
    with pytest.raises(Fenced):
        dead.ack(lost)
    other.ack(kept)
    restarted.ack(own)


def test_a_row_with_damaged_payload_is_refused_and_ends_as_dead(bench):
    store = bench.store(bench.table(max_deliveries=2))
    bench.put(store, 1)
    (name, x) = bench.key_names("payload:")
    bench.intact = False
    for delivery in (1, 2):
        bench.client.set(x, bench.client.get(name) if delivery == 1 else b"\x80\x04\x95garbage")
        with pytest.raises(DecodeError, match="column chunk"):
            store.claim("train", "a", max_rows=1, columns=["x"])
    counts = store.counts("train")
    assert counts.leased["a"] == 0
    assert [label.split("(")[0] for label in counts.ended] == ["dead"]


def test_a_closed_store_leaves_no_record_of_itself(bench):
    store, other = bench.store(), bench.store()
    bench.put(store, 1)
    store.ack(bench.take(store, "a", 1))
    assert bench.key_names("leases")
    store.close()
    assert bench.key_names("leases") == []
    assert other.counts("train").acked["a"] == 1
