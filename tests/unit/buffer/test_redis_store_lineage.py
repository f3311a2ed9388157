"""Lineage: who wrote which columns, when, with which policy version, and for whom."""

from __future__ import annotations

import json
import time

import pytest

from rlmq.buffer.store import Facts, RowRange
from rlmq.common.errors import IntegrityError, UsageError

pytestmark = pytest.mark.timeout(60)


def _two_writers(bench):
    """Four rows: `x` by p, then `y` of the first two rows by a-0 and of the others by a-1."""
    producer, first, second = (bench.store(worker=name) for name in ("p-0", "a-0", "a-1"))
    bench.put(producer, 4, version=3, tag="call-7")
    for store, version in ((first, 4), (second, None)):
        time.sleep(0.003)  # entries of one millisecond have no order
        claim = bench.take(store, "a", 2)
        store.write(claim, bench.y([0, 0]), ack=True, facts=Facts(version=version, tag=f"reward-{version}"))
    return producer


def test_lineage_names_writers_versions_and_tags_oldest_first(bench):
    store = _two_writers(bench)
    entries = store.lineage("train", [RowRange("p.0", 0, 4)])
    found = [(e.range, e.columns, e.writer, e.version, e.tag) for e in entries if "name" not in e.columns]
    assert found == [
        (RowRange("p.0", 0, 4), ("x",), "p-0", 3, "call-7"),
        (RowRange("p.0", 0, 2), ("y",), "a-0", 4, "reward-4"),
        (RowRange("p.0", 2, 2), ("y",), "a-1", None, "reward-None"),
    ]


def test_lineage_is_of_the_rows_that_were_asked_for(bench):
    store = _two_writers(bench)
    entries = store.lineage("train", [RowRange("p.0", 1, 1)])
    assert {e.range for e in entries} == {RowRange("p.0", 1, 1)}
    assert {e.writer for e in entries} == {"p-0", "a-0"}


def test_times_are_those_of_the_server_in_order_of_the_writes(bench):
    before = time.time() - 1
    store = _two_writers(bench)
    times = [e.at for e in store.lineage("train", [RowRange("p.0", 0, 4)])]
    assert times == sorted(times)
    assert len(set(times)) >= 3
    assert all(before < at < time.time() + 1 for at in times)


def test_lineage_comes_as_a_column_of_a_claim(bench):
    store = _two_writers(bench)
    claim = bench.take(store, "b", 4, columns=["x", "lineage"])
    rows = [json.loads(text) for text in claim.rows["lineage"].to_pylist()]
    writers = [{column: e["writer"] for e in entries for column in e["columns"]} for entries in rows]
    assert writers == [{"name": "p-0", "x": "p-0", "y": f"a-{k // 2}"} for k in range(4)]
    (y,) = (e for e in rows[0] if e["columns"] == ["y"])
    assert (y["version"], y["tag"]) == (4, "reward-4")


def test_ended_rows_keep_their_lineage_for_the_recorder(bench):
    store = _two_writers(bench)
    store.finish(bench.take(store, "b", 4), "filtered", "easy")
    rows = bench.take(store, "recorder", 4, columns=["lineage"]).rows["lineage"].to_pylist()
    assert [{e["writer"] for e in json.loads(text)} for text in rows] == [{"p-0", f"a-{k // 2}"} for k in range(4)]


def test_a_redelivered_write_replaces_the_lineage_of_its_rows(bench):
    dead, alive = bench.store(worker="a-0"), bench.store(worker="a-1")
    bench.put(alive, 3)
    lost = bench.take(dead, "a", 3)
    dead.write(lost, bench.y([7, 7, 7]), facts=Facts(tag="first"))
    dead.nack(lost, "died")
    claim = bench.take(alive, "a", 3)
    alive.write(claim, bench.y([1, 2, 3]), ack=True, facts=Facts(tag="second"))
    y = [e for e in alive.lineage("train", [RowRange("p.0", 0, 3)]) if e.columns == ("y",)]
    assert [(e.range, e.writer, e.tag) for e in y] == [(RowRange("p.0", 0, 3), "a-1", "second")]


def test_a_part_that_is_written_again_is_told_after_what_it_hides(bench):
    dead, alive = bench.store(worker="a-0"), bench.store(worker="a-1")
    bench.put(alive, 3)
    lost = bench.take(dead, "a", 3)
    dead.write(lost, bench.y([7, 7, 7]))
    dead.finish(lost, "filtered", "easy", rows=[0])
    dead.nack(lost, "died")
    time.sleep(0.003)  # entries of one millisecond have no order
    claim = bench.take(alive, "a", 2)
    alive.write(claim, bench.y([2, 3]), ack=True)
    y = [e for e in alive.lineage("train", [RowRange("p.0", 0, 3)]) if e.columns == ("y",)]
    assert [(e.range, e.writer) for e in y] == [
        (RowRange("p.0", 0, 3), "a-0"),
        (RowRange("p.0", 1, 2), "a-1"),
    ]


def test_a_reader_knows_writers_that_came_after_it_and_left(bench):
    reader = bench.store(worker="reader")
    writer = bench.store(worker="gone")
    bench.put(writer, 1)
    writer.close()
    assert {e.writer for e in reader.lineage("train", [RowRange("p.0", 0, 1)])} == {"gone"}


def test_rows_that_are_not_held_have_no_lineage(bench):
    store = bench.store(bench.table(recorder=False))
    bench.put(store, 1)
    store.finish(bench.take(store, "a", 1), "done")
    with pytest.raises(IntegrityError, match=r"chunk 'p\.0'"):
        store.lineage("train", [RowRange("p.0", 0, 1)])


@pytest.mark.parametrize("tag", ["a:b", "a;b", "t" * 201])
def test_a_tag_that_cannot_be_kept_is_refused(bench, tag):
    store = bench.store()
    with pytest.raises(UsageError, match="at most 200 characters without ':' and ';'"):
        bench.put(store, 1, tag=tag)


def test_a_tag_may_have_any_other_characters(bench):
    store = bench.store()
    tag = "sha256=0f/é, {x} \n" + "t" * 182
    bench.put(store, 1, tag=tag)
    assert {e.tag for e in store.lineage("train", [RowRange("p.0", 0, 1)])} == {tag}
