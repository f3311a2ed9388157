"""Faults 14 to 17: a server that dies, comes back empty, older or damaged, or is at its memory limit."""

from __future__ import annotations

import re
import shutil
import signal

import pytest
import redis
from faults.scene import until
from faults.workers import STAGES

from rlmq.common.errors import DependencyError, ExitCode

pytestmark = pytest.mark.timeout(180)

_ROWS = 640


def _start_pipeline(scene, *, chunks=_ROWS // 32, **produce):
    """Two producers, two workers per stage, a trainer and a recorder."""
    feed = {"chunks": chunks} | produce
    return scene.start_all(
        rollout1={}, rollout2={}, reward1={}, reward2={}, actor={"rows": 32}, recorder={"rows": 32},
        produce1=feed, produce2=feed,
    )  # fmt: skip


def _kill_server_under_load(scene, times, **table):
    scene.open(capacity_rows=128, **table)
    _start_pipeline(scene)
    for k in range(times):
        until(
            lambda n=_ROWS * (k + 1) // (times + 2): scene.ended() >= n,
            "the next part of the rows ended",
            state=scene.state,
        )
        scene.server.kill(scene.rng)
        scene.server.start()
    scene.until_ended(_ROWS)
    assert scene.ended("trained") == _ROWS
    scene.check()


def test_a_run_goes_on_over_a_killed_server(scene):
    """Fault 14."""
    _kill_server_under_load(scene, 2)


@pytest.mark.faults_long
def test_a_run_goes_on_over_many_killed_servers(scene):
    """Fault 14, with rows that are trained twice."""
    _kill_server_under_load(scene, 8, max_uses=2)


def test_a_server_that_is_loading_is_waited_for(scene):
    """Fault 14: for as long as it loads its file, it answers LOADING."""
    scene.open()
    _start_pipeline(scene)
    until(lambda: scene.ended() >= _ROWS // 2, "half of the rows ended")
    with scene.server.client() as client, client.pipeline(transaction=False) as pipe:
        for k in range(5000):  # it answers between blocks of 1024 commands
            pipe.set(f"other:{k}", "")
        pipe.execute()
    scene.server.kill(scene.rng)
    server = scene.server.launch("--key-load-delay", "200", "--loading-process-events-interval-bytes", "1024")
    said = set()

    def loaded():
        try:
            with scene.server.client() as client:
                client.ping()
        except redis.RedisError as error:
            said.add(type(error).__name__)
            return False
        return True

    until(loaded, "the server has loaded its file")
    assert server.poll() is None
    assert "BusyLoadingError" in said
    scene.until_ended(_ROWS)
    scene.check()


def test_a_server_that_stays_away_is_named(scene):
    """Fault 14, without the restart: each process says so and ends with its documented code."""
    scene.open()
    workers = scene.start_all(
        rollout={"retry_s": 1.0}, actor={"retry_s": 1.0}, produce={"retry_s": 1.0, "chunks": 9999}
    )
    scene.server.kill()
    assert {worker.wait() for worker in workers.values()} == {ExitCode.DEPENDENCY}
    for worker in workers.values():
        (raised,) = worker.did("raised")
        assert raised["error"] == "DependencyError"
        assert "Redis" in raised["text"] and "start it again" in raised["text"]


def test_a_server_that_comes_back_empty_ends_every_process(scene):
    """Fault 15: never a run mixed of two."""
    scene.open(capacity_rows=128)
    workers = _start_pipeline(scene, chunks=1000)
    until(lambda: scene.ended("trained") >= 64, "rows are trained")
    scene.server.forget()
    scene.server.start()
    assert {worker.wait() for worker in workers.values()} == {ExitCode.INTEGRITY}
    for worker in workers.values():
        (raised,) = worker.did("raised")
        assert raised["error"] == "IntegrityError"
        assert "came back empty" in raised["text"]
    with scene.server.client() as client:
        assert client.keys("*") == []


def test_a_server_that_came_back_empty_and_was_opened_again_is_not_taken_for_the_old_one(scene):
    """Fault 15: a process that starts first makes new tables; those that were there before do not mix with it."""
    scene.open(capacity_rows=128)
    old = _start_pipeline(scene, chunks=1000)
    until(lambda: scene.ended("trained") >= 64, "rows are trained")
    for worker in old.values():
        worker.signal(signal.SIGSTOP)
    scene.server.forget()
    scene.server.start()
    new = scene.start("rollout", "rollout3")
    for worker in old.values():
        worker.signal(signal.SIGCONT)
    assert {worker.wait() for worker in old.values()} == {ExitCode.INTEGRITY}
    assert new.did("claimed") == []


def _cut_tail(scene, least):
    """Kill the server and cut its file in the middle of a record, anywhere after `least` bytes."""
    scene.server.kill()
    data = scene.server.aof.read_bytes()
    kept = scene.rng.randrange(least, len(data))
    while data[kept - 1] == ord("\n"):
        kept -= 1
    print(f"{kept} of {len(data)} bytes are kept")
    scene.server.aof.write_bytes(data[:kept])
    scene.server.start()
    assert "loaded anyway because aof-load-truncated is enabled" in scene.server.log
    scene.server.rewrite()


def _cut_and_begin_again(scene, times):
    scene.open(stages={name: {"lease_s": 2.0} for name in STAGES})
    for k in range(times + 1):
        _start_pipeline(scene)
        until(
            lambda n=_ROWS * (k + 1) // (times + 1): scene.ended() >= n,
            "the next part of the rows ended",
            state=scene.state,
        )
        if k < times:
            scene.kill_workers()
            _cut_tail(scene, 2 * scene.server.aof.stat().st_size // 3)
    scene.until_ended(_ROWS)
    assert scene.ended("trained") == _ROWS
    scene.check(rewound=True)


def test_a_run_goes_on_from_a_cut_file(scene):
    """Fault 16: the torn record is lost and no more; producers put again, the trainer tells what its log has."""
    _cut_and_begin_again(scene, 1)


@pytest.mark.faults_long
def test_a_run_goes_on_from_a_file_that_is_cut_again_and_again(scene):
    """Fault 16."""
    _cut_and_begin_again(scene, 4)


def test_living_workers_go_on_with_a_server_that_forgot_what_they_did(scene):
    """Fault 16: their leases are nobody's, their batches are told again, and newcomers are not taken for them."""
    scene.open(stages={name: {"lease_s": 2.0} for name in STAGES})
    scene.start("produce", chunks=20).wait()
    puts = scene.server.aof.stat().st_size
    scene.start_all(rollout1={}, rollout2={}, reward1={}, reward2={}, actor={}, recorder={})
    until(lambda: scene.ended() >= 160, "half of the rows ended")
    _cut_tail(scene, puts)
    scene.start_all(rollout3={}, reward3={})
    scene.until_ended(320)
    assert scene.ended("trained") == 320
    scene.check(rewound=True)


def test_a_producer_whose_chunks_were_forgotten_starts_again(scene):
    """Fault 16: it is told to, before it puts the next one; started again it puts what is missing."""
    scene.open(stages={name: {"lease_s": 2.0} for name in STAGES}, capacity_rows=64)
    scene.start_all(rollout={}, reward={}, actor={"checkpoint_every": 1}, recorder={}, produce={"chunks": 30})
    until(lambda: scene.ended() >= 160, "a third of the rows ended")
    _cut_tail(scene, scene.server.aof.stat().st_size // 2)

    def over():
        if scene.worker("produce").code == ExitCode.RESTART:
            scene.start("produce", chunks=30)
        return scene.ended() == 480 and scene.counts.acked["recorder"] == 480

    until(over, "all rows ended and recorded", state=scene.state)
    assert scene.ended("trained") == 480
    (told,) = scene.worker("produce").did("raised")
    assert "it came back older" in told["text"]
    scene.check(rewound=True)


def test_a_file_damaged_in_its_middle_is_refused_and_named(scene):
    """Fault 16: the server does not start, the processes name it, and the repaired file goes on."""
    store = scene.open()
    scene.start_all(produce={"chunks": 10}, rollout={}, reward={}, actor={}, recorder={})
    scene.until_ended(160)
    scene.end_workers()
    scene.server.kill(scene.rng)
    whole = scene.server.aof.with_suffix(".whole")
    shutil.copy(scene.server.aof, whole)
    data = bytearray(whole.read_bytes())
    heads = [m.start() for m in re.finditer(rb"\r\n\*\d+\r\n\$\d+\r\n", data)]
    at = scene.rng.choice(heads[len(heads) // 4 : len(heads) // 2])
    data[at + 2 : at + 6] = b"\x00\xff??"
    scene.server.aof.write_bytes(data)
    refused = scene.server.launch()
    assert refused.wait(20) == 1
    assert "Bad file format" in scene.server.log
    worker = scene.start("rollout", ready=False, retry_s=1.0)
    assert worker.wait() == ExitCode.DEPENDENCY
    (raised,) = worker.did("raised")
    assert str(scene.server.socket) in raised["text"] and "Start it" in raised["text"]
    whole.replace(scene.server.aof)
    scene.server.start()
    assert store.counts("train").admitted == 160
    scene.check()


def test_a_store_without_its_server_says_where_to_look(scene):
    """Fault 16, for a process that was up before."""
    store = scene.open()
    scene.server.kill()
    store._link._retry_s = 0.5
    with pytest.raises(DependencyError, match="Look at its log"):
        store.counts("train")


def test_at_the_memory_limit_producers_wait_and_consumers_drain(scene):
    """Fault 17: three times what fits; those who free rows find room for what they write."""
    scene.open()
    with scene.server.client() as client:
        limit = int(client.info("memory")["used_memory"]) + 6_000_000
        client.config_set("maxmemory", limit)
        feed = {"chunks": 30, "text_bytes": 20_000}  # 2 x 10 MB
        producers = scene.start_all(produce1=feed, produce2=feed)
        until(lambda: int(client.info("memory")["used_memory"]) > 0.85 * limit, "the server is full")
    assert [producer.code for producer in producers.values()] == [None, None]
    scene.start_all(
        rollout={}, reward={"rows": 16}, actor={"rows": 16, "checkpoint_every": 1}, recorder={"rows": 16}
    )
    scene.until_ended(2 * 30 * 16)
    assert scene.ended("trained") == 2 * 30 * 16
    scene.check()


def test_a_limit_below_what_is_held_stops_everything_until_it_is_raised(scene):
    """Fault 17: nothing is lost, nothing is doubled, nobody needs a restart."""
    scene.open(capacity_rows=64)
    feed = {"chunks": _ROWS // 32}
    scene.start_all(rollout1={}, rollout2={}, reward1={}, reward2={}, produce1=feed, produce2=feed)
    until(lambda: scene.counts.ready["actor"] == 64, "the table is full of scored rows", state=scene.state)
    with scene.server.client() as client:
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) // 2)
        scene.start_all(actor={"rows": 32}, recorder={"rows": 32})
        until(lambda: "errorstat_OOM" in client.info("errorstats"), "the server refuses more", state=scene.state)
        client.config_set("maxmemory", 0)
    scene.until_ended(_ROWS)
    assert scene.ended("trained") == _ROWS
    scene.check()
