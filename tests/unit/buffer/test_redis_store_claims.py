"""Putting, claiming by scope, writing columns, reading."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rlmq.buffer.store import RowRange, Stage, Table
from rlmq.common.columns import Column
from rlmq.common.errors import Fenced, IntegrityError, SchemaMismatch, UsageError


def test_a_put_row_is_ready_for_the_stage_whose_columns_came_with_it(bench):
    store = bench.store()
    bench.put(store, 3)
    counts = store.counts("train")
    assert counts.ready == {"a": 3, "b": 0, "end": 0, "recorder": 0}
    assert (counts.admitted, counts.live) == (3, 3)
    assert counts.payload_bytes > 0


def test_a_repeated_put_is_a_no_op_and_leaves_no_payload_behind(bench):
    store = bench.store()
    rows = bench.rows(0, 4)
    assert store.put("train", rows, producer="p", sequence=7, group_size=2)
    before = bench.key_names()
    assert not store.put("train", rows, producer="p", sequence=7, group_size=2)
    assert not store.put("train", rows, producer="p", sequence=6, group_size=2)
    assert bench.key_names() == before
    assert store.counts("train").admitted == 4


def test_rows_are_claimed_in_order_of_admission_across_chunks(bench):
    store = bench.store()
    for _ in range(3):
        bench.put(store, 2)
    assert bench.xs(store.claim("train", "a", max_rows=3)) == [0, 1, 100]
    assert bench.xs(store.claim("train", "a", max_rows=99)) == [101, 200, 201]
    assert store.claim("train", "a", max_rows=1) is None


def test_released_rows_come_back_in_their_old_place(bench):
    store = bench.store()
    bench.put(store, 4)
    first = bench.take(store, "a", 2)
    store.release(first)
    again = bench.take(store, "a", 4)
    assert bench.xs(again) == [0, 1, 2, 3]
    assert {r.delivery for r in again.ranges} == {1}


def test_a_claim_below_min_rows_takes_nothing(bench):
    store = bench.store()
    bench.put(store, 3)
    assert store.claim("train", "a", max_rows=8, min_rows=4) is None
    assert store.counts("train").ready["a"] == 3


def test_claims_of_two_workers_never_overlap(bench):
    one, two = bench.store(worker="w1"), bench.store(worker="w2")
    bench.put(one, 5)
    assert set(bench.xs(one.claim("train", "a", max_rows=3))).isdisjoint(
        bench.xs(two.claim("train", "a", max_rows=3))
    )


def test_group_scope_never_splits_a_group(bench):
    store = bench.store(bench.table(a="group"))
    bench.put(store, 8, group_size=4)
    assert bench.xs(store.claim("train", "a", max_rows=7)) == [0, 1, 2, 3]
    assert bench.xs(store.claim("train", "a", max_rows=7)) == [4, 5, 6, 7]


def test_a_group_is_ready_only_when_all_of_its_members_are(bench):
    store = bench.store(bench.table(b="group"))
    bench.put(store, 6, group_size=3)
    bench.through_a(store, 2)
    assert store.counts("train").ready["b"] == 0
    bench.through_a(store, 3)
    assert store.counts("train").ready["b"] == 3
    assert bench.xs(store.claim("train", "b", max_rows=6)) == [0, 1, 2]


def test_an_ended_member_does_not_block_its_siblings(bench):
    store = bench.store(bench.table(b="group"))
    bench.put(store, 3, group_size=3)
    bench.through_a(store, 2)
    last = bench.take(store, "a", 1)
    store.finish(last, "filtered", "too_long")
    assert bench.xs(store.claim("train", "b", max_rows=3)) == [0, 1]


def test_a_group_larger_than_max_rows_is_refused_by_name(bench):
    store = bench.store(bench.table(a="group"))
    bench.put(store, 8, group_size=8)
    with pytest.raises(UsageError, match=r"max_rows 4.*group size of 8"):
        store.claim("train", "a", max_rows=4)
    assert store.counts("train").ready["a"] == 8


def test_chunk_scope_claims_one_whole_chunk_at_a_time(bench):
    store = bench.store(bench.table(a="chunk"))
    bench.put(store, 3)
    bench.put(store, 2)
    assert bench.xs(store.claim("train", "a", max_rows=64)) == [0, 1, 2]
    assert bench.xs(store.claim("train", "a", max_rows=64)) == [100, 101]


def test_batch_scope_takes_all_of_max_rows_or_nothing(bench):
    store = bench.store(bench.table(a="batch"))
    bench.put(store, 3)
    assert store.claim("train", "a", max_rows=5) is None
    bench.put(store, 3)
    assert bench.xs(store.claim("train", "a", max_rows=5)) == [0, 1, 2, 100, 101]


def test_written_columns_reach_the_next_stage_and_the_reader(bench):
    store = bench.store()
    bench.put(store, 3)
    bench.through_a(store, 3)
    claim = bench.take(store, "b", 3, columns=["y", "name"])
    assert claim.rows.to_pydict() == {"y": [[0, 0], [1, 1], [2, 2]], "name": ["n0", "n1", "n2"]}
    assert store.read("train", claim.ranges, ["z"]).to_pydict() == {"z": [None] * 3}


def test_without_a_list_of_columns_a_claim_brings_all_with_nulls_for_absent_ones(bench):
    store = bench.store()
    bench.put(store, 1)
    claim = bench.take(store, "a", 1)
    assert claim.rows.to_pylist() == [{"name": "n0", "x": 0, "y": None, "z": None, "note": None}]


def test_an_empty_list_of_columns_moves_no_payload(bench):
    store = bench.store()
    bench.put(store, 2)
    assert bench.take(store, "a", 2, columns=[]).rows.num_rows == 2


def test_rows_written_in_many_parts_come_together(bench):
    store = bench.store()
    bench.put(store, 9)
    for count in (2, 1, 4, 2):
        bench.through_a(store, count)
    claim = bench.take(store, "b", 9)
    assert claim.rows["y"].to_pylist() == [[k, k] for k in range(9)]


def test_one_claim_may_hold_several_ranges_of_one_chunk_and_of_several(bench):
    store = bench.store()
    bench.put(store, 4)
    bench.put(store, 3)
    middle = [bench.take(store, "a", 1) for _ in range(4)]
    store.ack(middle[1])
    for claim in (middle[0], middle[2], middle[3]):
        store.release(claim)
    claim = bench.take(store, "a", 6)
    assert bench.xs(claim) == [0, 2, 3, 100, 101, 102]
    store.write(claim, bench.y(bench.xs(claim)), ack=True)
    assert store.read("train", claim.ranges, ["y"])["y"].to_pylist() == [[x, x] for x in bench.xs(claim)]
    assert bench.xs(bench.take(store, "b", 6)) == [0, 2, 3, 100, 101, 102]


def test_a_second_write_hides_the_first_where_they_overlap(bench):
    store = bench.store()
    bench.put(store, 4)
    claim = bench.take(store, "a", 4)
    store.write(claim, bench.y([7, 7, 7, 7]))
    store.release(claim)
    part = bench.take(store, "a", 2)
    store.write(part, bench.y([1, 2]), ack=True)
    assert store.read("train", [RowRange("p.0", 0, 4)], ["y"])["y"].to_pylist() == [[1, 1], [2, 2], [7, 7], [7, 7]]


def test_a_replaced_piece_of_payload_is_unlinked_and_not_counted_twice(bench):
    store = bench.store()
    bench.put(store, 4)
    claim = bench.take(store, "a", 4)
    store.write(claim, bench.y([1, 2, 3, 4]))
    once = (len(bench.key_names("payload:")), store.counts("train").payload_bytes)
    store.write(claim, bench.y([5, 6, 7, 8]))
    assert (len(bench.key_names("payload:")), store.counts("train").payload_bytes) == once
    assert store.read("train", claim.ranges, ["y"])["y"].to_pylist() == [[v, v] for v in (5, 6, 7, 8)]


def test_a_write_of_a_part_of_a_column_group_is_refused(bench):
    columns = (Column("x", pa.int64(), "s"), Column("u", pa.int64(), "a"), Column("v", pa.int64(), "a"))
    table = Table("train", columns, (Stage("a", ("x",)), Stage("b", ("u", "v"))))
    store = bench.store(table)
    store.put(
        "train", pa.record_batch({"x": pa.array([1, 2, 3], pa.int64())}), producer="p", sequence=0, group_size=1
    )
    claim = bench.take(store, "a", 3)
    with pytest.raises(SchemaMismatch, match=r"without \['v'\]"):
        store.write(claim, pa.record_batch({"u": pa.array([10, 20, 30], pa.int64())}))
    assert store.counts("train").ready["b"] == 0


def test_a_put_may_bring_more_than_the_first_stage_needs(bench):
    store = bench.store()
    source = bench.rows(0, 2)
    rows = pa.record_batch([source["name"], source["x"], bench.y([5, 6])["y"]], names=["name", "x", "y"])
    store.put("train", rows, producer="p", sequence=0, group_size=1)
    assert store.counts("train").ready == {"a": 2, "b": 2, "end": 0, "recorder": 0}


@pytest.mark.parametrize(
    "rows",
    [
        pa.record_batch({"x": pa.array([1], pa.int64()), "name": ["n"]}),
        pa.record_batch({"name": ["n"], "x": pa.array([1], pa.int32())}),
        pa.record_batch({"name": ["n"], "unknown": ["n"]}),
    ],
    ids=["order", "type", "name"],
)
def test_a_put_with_other_columns_is_refused(bench, rows):
    store = bench.store()
    with pytest.raises(SchemaMismatch):
        store.put("train", rows, producer="p", sequence=0, group_size=1)


def test_a_put_of_broken_groups_is_refused(bench):
    store = bench.store()
    with pytest.raises(UsageError, match="whole groups of 2"):
        store.put("train", bench.rows(0, 3), producer="p", sequence=0, group_size=2)


def test_a_write_with_another_row_count_or_column_is_refused(bench):
    store = bench.store()
    bench.put(store, 2)
    claim = bench.take(store, "a", 2)
    with pytest.raises(SchemaMismatch, match=r"3 rows.*claim's 2"):
        store.write(claim, bench.y([1, 2, 3]))
    with pytest.raises(SchemaMismatch):
        store.write(claim, pa.record_batch({"w": [1, 2]}))


def test_opening_with_other_columns_is_refused_with_both_fingerprints(bench):
    bench.store()
    other = (*bench.table().columns, Column("extra", pa.string(), "b"))
    with pytest.raises(SchemaMismatch, match=r"fingerprint [0-9a-f]{16} here.*[0-9a-f]{16} as in the server"):
        bench.store(bench.table(columns=other))


def test_opening_with_other_stages_is_refused_but_another_capacity_is_taken_over(bench):
    first = bench.store(bench.table(capacity_rows=2))
    with pytest.raises(SchemaMismatch, match="stage 'b'"):
        bench.store(bench.table(b="group"))
    bench.store(bench.table(capacity_rows=4))
    bench.put(first, 2)
    bench.put(first, 2)
    assert first.counts("train").live == 4


def test_reading_a_freed_chunk_is_an_integrity_error_that_names_it(bench):
    store = bench.store(bench.table(recorder=False))
    bench.put(store, 2)
    store.finish(bench.take(store, "a", 2), "done")
    with pytest.raises(IntegrityError, match=r"chunk 'p\.0'"):
        store.read("train", [RowRange("p.0", 0, 2)], ["x"])


def test_a_write_under_an_ended_claim_is_fenced_and_leaves_no_payload(bench):
    store = bench.store()
    bench.put(store, 2)
    claim = bench.take(store, "a", 2)
    store.release(claim)
    before = bench.key_names()
    with pytest.raises(Fenced, match=r"stage 'a' in table 'train'"):
        store.write(claim, bench.y([1, 2]))
    assert bench.key_names() == before


def test_thousands_of_one_row_chunks_can_be_claimed_as_one_batch(bench):
    store = bench.store(bench.table(end="batch", capacity_rows=10_000))
    for _ in range(2500):
        bench.put(store, 1)
    claimed = 0
    while (claim := store.claim("train", "a", max_rows=5000)) is not None:
        store.write(claim, bench.y(bench.xs(claim)), ack=True)
        claimed += claim.count
    assert claimed == 2500
    while (claim := store.claim("train", "b", max_rows=5000)) is not None:
        store.write(claim, bench.z(bench.xs(claim)), ack=True)
    batch = bench.take(store, "end", 2500, columns=["x"])
    assert bench.xs(batch) == [100 * k for k in range(2500)]
    store.finish(batch, "trained", step=1)
    assert store.counts("train").ended == {"trained": 2500}


def test_a_claim_brings_its_payload_in_the_same_round_trip(bench):
    store = bench.store()
    bench.put(store, 2)
    bench.put(store, 2)
    bench.client.config_resetstat()
    claim = store.claim("train", "a", max_rows=4, min_rows=4, timeout_s=20)
    assert claim.rows["x"].null_count == 0 and claim.count == 4
    stats = bench.client.info("commandstats")
    assert stats["cmdstat_sort_ro"]["calls"] == 1 and "cmdstat_mget" not in stats
