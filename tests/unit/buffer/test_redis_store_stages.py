"""Stages added while rows are live, tables that were lost, and processes that came back."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from rlmq.buffer.store import DeadLetter, Interest, RowRange, Stage
from rlmq.common.errors import Fenced, IntegrityError, RestartRequired, SchemaMismatch

pytestmark = pytest.mark.timeout(60)


def _with(table, *stages):
    return replace(table, stages=(*table.stages, *stages))


def _rows_in_every_state(bench, store):
    """Rows 0 and 1 ended, 2 leased, 3 waiting and 4 ready for b; 5 still lacks y. Returns the claim of row 2."""
    bench.put(store, 6)
    bench.through_a(store, 5)
    claim = bench.take(store, "b", 3)
    store.finish(claim, "filtered", "easy", rows=[0, 1])
    return claim


def test_a_new_stage_gets_every_live_row_that_has_its_columns(bench):
    store = bench.store()
    _rows_in_every_state(bench, store)
    audit = bench.store(_with(bench.table(), Stage("audit", ("y",))), worker="audit-0")
    counts = audit.counts("train")
    figures = {kind: getattr(counts, kind)["audit"] for kind in ("waiting", "ready", "leased", "acked")}
    assert figures == {"waiting": 1, "ready": 3, "leased": 0, "acked": 2}
    assert audit.verify("train") == []
    assert bench.xs(bench.take(audit, "audit", 3)) == [2, 3, 4]
    bench.through_a(store, 1)
    assert bench.xs(bench.take(audit, "audit", 1)) == [5]


def test_leases_outlive_the_coming_of_a_stage(bench):
    store = bench.store()
    claim = _rows_in_every_state(bench, store)
    audit = bench.store(_with(bench.table(), Stage("audit", ("z",))), worker="audit-0")
    store.write(claim, bench.z([0.0, 1.0, 2.0]), ack=True)
    assert bench.xs(bench.take(audit, "audit", 1)) == [2]


def test_a_row_ends_as_done_only_when_the_new_stage_is_done_with_it_too(bench):
    store = bench.store()
    bench.ready_for_end(store, 2)
    audit = bench.store(_with(bench.table(), Stage("audit", ("x",))), worker="audit-0")
    store.ack(bench.take(store, "end", 2))
    assert store.counts("train").live == 2
    audit.ack(bench.take(audit, "audit", 2))
    assert store.counts("train").ended == {"done": 2}


def test_a_new_stage_in_group_scope_waits_for_whole_groups(bench):
    store = bench.store()
    bench.put(store, 6, group_size=3)
    bench.through_a(store, 4)
    audit = bench.store(_with(bench.table(), Stage("audit", ("y",), "group")), worker="audit-0")
    assert audit.counts("train").ready["audit"] == 3
    assert bench.xs(audit.claim("train", "audit", max_rows=6)) == [0, 1, 2]
    bench.through_a(store, 2)
    assert bench.xs(audit.claim("train", "audit", max_rows=6)) == [3, 4, 5]


@pytest.mark.parametrize("selector", ["uniform", "prioritized", "fresh_first"])
def test_a_new_stage_has_a_selector_of_its_own(bench, selector):
    store = bench.store()
    bench.put(store, 4)
    bench.put(store, 4)
    audit = bench.store(_with(bench.table(), Stage("audit", ("x",), selector=selector)), worker="audit-0")
    assert sorted(bench.xs(bench.take(audit, "audit", 8))) == [0, 1, 2, 3, 100, 101, 102, 103]


def test_a_new_stage_with_a_min_batch_is_flushed_by_what_was_closed_before(bench):
    store = bench.store()
    bench.put(store, 3, closes=True)
    bench.through_a(store, 2)
    audit = bench.store(_with(bench.table(), Stage("audit", ("y",), min_batch=8)), worker="audit-0")
    assert audit.claim("train", "audit", max_rows=8) is None, "a row of the closed chunk is still to come"
    bench.through_a(store, 1)
    assert audit.claim("train", "audit", max_rows=8).count == 3


def test_a_new_stage_of_ended_rows_gets_those_that_end_from_now_on(bench):
    table = bench.table(recorder=False)
    store = bench.store(table)
    bench.put(store, 4)
    store.finish(bench.take(store, "a", 1), "dead", "before")
    watch = bench.store(_with(table, Stage("watch", (), ended=True)), worker="watch-0")
    store.finish(bench.take(store, "a", 1), "done")
    assert bench.xs(watch.claim("train", "watch", max_rows=4)) == [1]


def test_a_store_that_opened_before_the_stage_came_works_on(bench):
    store = bench.store()
    bench.put(store, 2)
    bench.store(_with(bench.table(), Stage("audit", ("x",))), worker="audit-0")
    bench.put(store, 2)
    bench.through_a(store, 4)
    assert store.counts("train").ready["b"] == 4
    assert "audit" not in store.counts("train").ready


def test_stages_that_only_the_server_knows_stay(bench):
    bench.store(_with(bench.table(), Stage("audit", ("x",))))
    store = bench.store(bench.table(), worker="w1")
    bench.put(store, 1)
    assert store.counts("train").ready["audit"] == 1


def test_opening_again_adds_nothing(bench):
    table = _with(bench.table(), Stage("audit", ("x",)))
    store = bench.store()
    bench.put(store, 2)
    for worker in ("w1", "w2"):
        assert bench.store(table, worker=worker).counts("train").ready["audit"] == 2


@pytest.mark.parametrize(
    "other",
    [{"scope": "group"}, {"needs": ("x", "y")}, {"selector": "uniform"}, {"ended": True}],
    ids=lambda other: next(iter(other)),
)
def test_a_stage_of_another_shape_is_refused_with_both_fingerprints(bench, other):
    bench.store()
    with pytest.raises(SchemaMismatch, match=r"stage 'b'.*fingerprint [0-9a-f]{16} here.*[0-9a-f]{16} as in the"):
        bench.store(bench.with_stage(bench.table(), "b", **other))


def test_another_lease_time_or_limit_of_a_stage_is_taken_over(bench):
    store = bench.store()
    bench.put(store, 2)
    bench.store(bench.with_stage(bench.table(), "a", min_batch=3), worker="w1")
    assert store.claim("train", "a", max_rows=3) is None
    bench.put(store, 1)
    assert bench.xs(store.claim("train", "a", max_rows=3)) == [0, 1, 100]


# -- a table that was lost ----------------------------------------------------------------------------------

_RANGE = RowRange("p.0", 0, 1)
_VERBS = {
    "put": lambda bench, store, claim: store.put("train", bench.rows(0, 1), producer="p", sequence=9, group_size=1),
    "flush": lambda bench, store, claim: store.flush("train"),
    "set_version": lambda bench, store, claim: store.set_version("train", 1),
    "claim": lambda bench, store, claim: store.claim("train", "end", max_rows=1),
    "claim, blocking": lambda bench, store, claim: store.claim("train", "end", max_rows=1, timeout_s=20),
    "wait": lambda bench, store, claim: store.wait([Interest("train", "end")], timeout_s=20),
    "read": lambda bench, store, claim: store.read("train", [_RANGE], ["x"]),
    "extend": lambda bench, store, claim: store.extend(claim),
    "write": lambda bench, store, claim: store.write(claim, bench.y([0])),
    "finish": lambda bench, store, claim: store.finish(claim, "done"),
    "finish_logged": lambda bench, store, claim: store.finish_logged("train", "end", [_RANGE], step=0),
    "ack": lambda bench, store, claim: store.ack(claim),
    "nack": lambda bench, store, claim: store.nack(claim, "no"),
    "release": lambda bench, store, claim: store.release(claim),
    "lose": lambda bench, store, claim: store.lose(claim, [0], "end", ["x"]),
    "held": lambda bench, store, claim: store.held("train"),
    "advance": lambda bench, store, claim: store.advance(0),
    "prioritize": lambda bench, store, claim: store.prioritize("train", "end", [_RANGE], [1.0]),
    "dead_letters": lambda bench, store, claim: store.dead_letters("train"),
    "retry": lambda bench, store, claim: store.retry(DeadLetter("train", _RANGE, "end", "", 0.0)),
    "drop": lambda bench, store, claim: store.drop(DeadLetter("train", _RANGE, "end", "", 0.0)),
    "lineage": lambda bench, store, claim: store.lineage("train", [_RANGE]),
    "leases": lambda bench, store, claim: store.leases("train"),
    "verify": lambda bench, store, claim: store.verify("train"),
    "counts": lambda bench, store, claim: store.counts("train"),
    "waiting": lambda bench, store, claim: store.waiting(),
    "expire": lambda bench, store, claim: store.expire(),
    "recover": lambda bench, store, claim: store.recover(),
}


@pytest.mark.parametrize("verb", _VERBS)
def test_a_store_never_works_on_a_table_that_another_one_made_anew(bench, verb):
    table = bench.one_stage(selector="prioritized")
    store = bench.store(table)
    bench.put(store, 2)
    claim = bench.take(store, "end", 1)
    bench.client.flushall()
    fresh = bench.store(table, worker="w1")
    fresh.put("train", bench.rows(0, 1), producer="p", sequence=0, group_size=1)
    before = fresh.counts("train"), bench.key_names()
    with pytest.raises(IntegrityError, match="came back empty"):
        _VERBS[verb](bench, store, claim)
    assert (fresh.counts("train"), bench.key_names()) == before


def test_every_verb_of_the_store_is_among_those(bench):
    others = {"open", "attach", "close", "server_id"}
    verbs = {name for name in dir(bench.store()) if not name.startswith("_")} - others
    assert verbs == {name.split(",")[0] for name in _VERBS}


def test_a_server_that_came_back_older_than_a_put_tells_the_producer_to_restart(own_server, own_bench):
    own_bench.client.config_set("appendfsync", "always")
    store = own_bench.store(worker="p-0")
    own_bench.put(store, 1)
    files, older = own_server.folder / "appendonlydir", own_server.folder / "older"
    shutil.copytree(files, older)
    own_bench.put(store, 1)
    own_server.kill()
    shutil.rmtree(files)
    older.rename(files)
    own_server.start()
    with pytest.raises(RestartRequired, match=r"knows sequences up to 0, expected 1, which it acknowledged"):
        own_bench.put(store, 1)
    restarted = own_bench.store(worker="p-0")
    for sequence in (1, 2):
        assert restarted.put(
            "train", own_bench.rows(100 * sequence, 1), producer="p", sequence=sequence, group_size=1
        )
    assert own_bench.xs(own_bench.take(restarted, "a", 3)) == [0, 100, 200]


# -- processes that came back -------------------------------------------------------------------------------


def test_recover_takes_back_from_the_same_worker_only_and_counts_a_delivery(bench):
    dead, other = bench.store(worker="actor-0"), bench.store(worker="actor-1")
    bench.put(dead, 3)
    lost, kept = bench.take(dead, "a", 2), bench.take(other, "a", 1)
    again = bench.store(worker="actor-0")
    assert again.recover() == 1
    assert again.recover() == 0
    claim = bench.take(again, "a", 2)
    assert {one.delivery for one in claim.ranges} == {2}
    with pytest.raises(Fenced, match="lease"):
        dead.write(lost, bench.y([0, 1]), ack=True)
    other.write(kept, bench.y([2]), ack=True)
    again.write(claim, bench.y([0, 1]), ack=True)
    assert again.counts("train").fenced == 1


def test_a_row_that_kills_every_process_of_its_worker_ends_as_dead(bench):
    table = bench.table(max_deliveries=2)
    for _ in range(2):
        store = bench.store(table, worker="actor-0")
        if not store.counts("train").admitted:
            bench.put(store, 1)
        store.recover()
        bench.take(store, "a", 1)
    last = bench.store(table, worker="actor-0")
    assert last.recover() == 1
    assert last.counts("train").ended == {"dead(worker ended)": 1}
    (letter,) = last.dead_letters("train")
    assert "last worker actor-0" in letter.reason


def test_recovered_rows_wake_a_blocked_claim(bench, blocked):
    dead, other = bench.store(worker="actor-0"), bench.store(worker="actor-1")
    bench.put(dead, 1)
    bench.take(dead, "a", 1)
    claim = blocked(lambda: other.claim("train", "a", max_rows=1, timeout_s=60)).registered(dead)
    bench.store(worker="actor-0").recover()
    assert claim.result().ranges[0].delivery == 2


def test_leases_tell_who_holds_what(bench):
    store = bench.store(worker="actor-0")
    bench.put(store, 3)
    claim = bench.take(store, "a", 2)
    (lease,) = store.leases("train")
    assert (lease.lease, lease.stage, lease.worker, lease.rows) == (claim.lease, "a", "actor-0", 2)
    assert 0 < lease.left_s <= 60
    store.release(claim)
    assert store.leases("train") == []


def test_a_claim_under_way_when_the_table_is_lost_does_not_sleep_out_its_time(bench, blocked):
    store, other = bench.store(worker="w1"), bench.store(worker="w2")
    claim = blocked(lambda: store.claim("train", "a", max_rows=1, timeout_s=60)).registered(other)
    bench.client.flushall()
    bench.store(worker="w3")
    with pytest.raises(IntegrityError, match="came back empty"):
        claim.result()


def test_a_put_that_waits_for_room_does_not_sleep_on_when_the_table_is_lost(bench, blocked):
    table = bench.table(capacity_rows=1)
    store, other = bench.store(table, worker="w1"), bench.store(table, worker="w2")
    bench.put(store, 1)
    put = blocked(lambda: bench.put(store, 1)).registered(other)
    bench.client.flushall()
    bench.store(table, worker="w3")
    with pytest.raises(IntegrityError, match="came back empty"):
        put.result()
