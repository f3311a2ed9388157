"""The store over a server that restarts, forgets, or is at its memory limit."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest
import redis

from rlmq.buffer.store import Interest
from rlmq.common.errors import DeadlineExceeded, DependencyError, IntegrityError


def test_work_goes_on_over_a_restart_of_the_server(own_server, own_bench):
    store = own_bench.store()
    own_bench.put(store, 4)
    claim = own_bench.take(store, "a", 2)
    time.sleep(1.1)  # appendfsync everysec: what is older than a second survives any kill
    own_server.kill()
    restart = threading.Thread(target=own_server.start, daemon=True)
    restart.start()
    store.write(claim, own_bench.y([0, 1]), ack=True)
    restart.join(20)
    assert own_bench.xs(own_bench.take(store, "b", 2)) == [0, 1]
    assert own_bench.xs(own_bench.take(store, "a", 2)) == [2, 3]


def test_a_sleeping_waiter_survives_a_restart_of_the_server(own_server, own_bench):
    store, other = own_bench.store(worker="w1"), own_bench.store(worker="w2")
    woken = []
    thread = threading.Thread(
        target=lambda: woken.append(store.wait([Interest("train", "a")], timeout_s=60)), daemon=True
    )
    thread.start()
    end = time.monotonic() + 20
    while not own_bench.key_names("waiters") and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(1.1)
    own_server.kill()
    own_server.start()
    own_bench.put(other, 1)
    thread.join(20)
    assert woken == [True]


def test_a_server_that_stays_away_is_a_dependency_error(own_server, own_bench):
    store = own_bench.store(retry_s=0.2)
    own_server.kill()
    with pytest.raises(DependencyError, match=r"no answer for 0\.2 s"):
        store.counts("train")


def test_a_server_that_came_back_empty_is_an_integrity_error(bench):
    store = bench.store()
    bench.put(store, 1)
    bench.client.flushall()
    with pytest.raises(IntegrityError, match="came back empty"):
        store.claim("train", "a", max_rows=1)
    with pytest.raises(IntegrityError, match="came back empty"):
        bench.put(store, 1)
    with pytest.raises(IntegrityError, match="came back empty"):
        store.wait([Interest("train", "a")], timeout_s=1)
    assert bench.key_names() == []


def test_functions_that_the_server_lost_are_loaded_again(bench):
    store = bench.store()
    bench.put(store, 1)
    bench.client.function_flush("SYNC")
    assert store.counts("train").live == 1
    bench.client.function_flush("SYNC")
    bench.put(store, 1)
    assert store.counts("train").live == 2


def _long_rows(bench, first, count):
    rows = bench.rows(first, count)
    names = pa.array(["n" * 100_000] * count)
    return pa.record_batch([names, rows["x"]], names=["name", "x"])


@pytest.fixture
def little_memory(bench):
    """A memory limit 4 MB above what the server holds."""
    used = int(bench.client.info("memory")["used_memory"])
    bench.client.config_set("maxmemory", used + 4_000_000)
    yield
    bench.client.config_set("maxmemory", 0)


def test_at_its_memory_limit_producers_wait_and_consumers_drain(bench, little_memory):
    table = bench.table(recorder=False)
    store, producer = bench.store(table, worker="w1"), bench.store(table, worker="p1")
    done = []

    def produce():
        for sequence in range(12):  # 12 MB in all
            producer.put(
                "train", _long_rows(bench, sequence * 10, 10), producer="p", sequence=sequence, group_size=1
            )
        done.append(True)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    drained, end = 0, time.monotonic() + 60
    while drained < 120 and time.monotonic() < end:
        claim = store.claim("train", "a", max_rows=5, columns=["x"])
        if claim is not None:
            store.finish(claim, "done")
            drained += claim.count
    thread.join(20)
    assert (drained, done) == (120, [True])


def test_a_server_that_stays_at_its_memory_limit_is_a_missed_deadline(bench, little_memory):
    store = bench.store(put_timeout_s=0.3)

    def fill():
        for sequence in range(10):
            store.put("train", _long_rows(bench, 0, 10), producer="p", sequence=sequence, group_size=1)

    with pytest.raises(DeadlineExceeded, match="maxmemory"):
        fill()
    units = 2  # `name`, which no stage needs, and `x`
    assert len(bench.key_names("payload:")) == units * len(bench.key_names("chunk:"))


def test_two_runs_on_one_server_do_not_see_each_other(bench):
    from rlmq.buffer.redis_store import RedisStore

    store = bench.store()
    other = RedisStore(bench.url, run_id="run-2", worker="w0")
    other.open([bench.table()])
    bench.put(store, 2)
    assert other.claim("train", "a", max_rows=2) is None
    other.close()


def test_every_key_of_a_table_shares_its_hash_tag(bench):
    store = bench.store(bench.table(lease_s=0.01))
    bench.ready_for_end(store, 4)
    bench.take(store, "end", 2)
    store.finish(bench.take(store, "end", 2), "trained", step=3)
    assert not store.wait([Interest("train", "a")], timeout_s=0.05)
    assert {key.split(":", 2)[0] + ":" + key.split("}")[0].split("{")[1] for key in bench.key_names()} == {
        "rlmq:run-1:train"
    }


def test_concurrent_workers_train_every_row_exactly_once(bench):
    table = bench.table(a="chunk", b="row", end="group")
    stores = {name: bench.store(table, worker=name) for name in ("p", "a1", "a2", "b1", "b2", "e1")}
    rows, trained, errors = 480, [], []

    def guarded(work):
        def run():
            try:
                work()
            except (redis.RedisError, IntegrityError, AssertionError) as error:
                errors.append(error)

        return threading.Thread(target=run, daemon=True)

    def produce():
        for _ in range(rows // 24):
            bench.put(stores["p"], 24, group_size=4)

    def transform(name, stage, size, columns):
        store = stores[name]
        while len(trained) < rows and not errors:
            claim = store.claim("train", stage, max_rows=size, columns=["x"])
            if claim is None:
                store.wait([Interest("train", stage)], timeout_s=0.2)
            else:
                store.write(claim, columns(bench.xs(claim)), ack=True)

    def train():
        step = 0
        while len(trained) < rows and not errors:
            claim = stores["e1"].claim("train", "end", max_rows=10, columns=["x", "y", "z"])
            if claim is None:
                stores["e1"].wait([Interest("train", "end")], timeout_s=0.2)
                continue
            for row in claim.rows.to_pylist():
                assert row["y"] == [row["x"], row["x"]] and row["z"] == row["x"]
            stores["e1"].finish(claim, "trained", step=step)
            trained.extend(bench.xs(claim))
            step += 1

    threads = [guarded(produce), guarded(train)]
    threads += [guarded(lambda n=n: transform(n, "a", 24, bench.y)) for n in ("a1", "a2")]
    threads += [guarded(lambda n=n: transform(n, "b", 7, bench.z)) for n in ("b1", "b2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sorted(trained) == sorted(100 * chunk + k for chunk in range(rows // 24) for k in range(24))
    assert stores["p"].counts("train").ended == {"trained": rows}
