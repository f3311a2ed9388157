"""The buffer alone: what a sample costs, in which part, and whether that stays so with many live rows.

    rlmq bench buffer [--steps 40] [--chunk 64]
    rlmq bench buffer --flat [--rows 1000000]

W1: two producers put steps of 2048 GRPO samples, a reward worker reads two columns and writes one, a trainer takes
whole rows in batches of 256. W3: the same with 100 000 rows of 200 bytes and no reward. Every role is a process;
the first step is not measured. CPU is that of all processes; the clients' parts by sampling on the wall clock, a
sample weighing the CPU time since the one before:

    server   of it `scripts`: inside functions
    wire     packing commands, sending, receiving, parsing replies
    encode   rows to Arrow messages and back
    Python   the rest of the client
    load     the benchmark itself: making verdicts, checking rows
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from types import FrameType

import numpy as np
import pyarrow as pa

import rlmq.buffer
from benchmarks import flat
from benchmarks.load import GROUP, GRPO, RUN, SMALL, Server, grpo_rows, rewards, small_rows, user_bytes
from benchmarks.result import BenchResult, Cell
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, Table
from rlmq.common.errors import IntegrityError

_TIMEOUT_S = 60.0
_SAMPLE_S = 0.002
_LIVE_ROWS = 40_960  # of the memory figure: about 100 MB of payload
_PARTS = {
    "codec": "encode",
    "payload": "encode",
    "connection": "wire",
    "wire": "wire",
}  # by module of rlmq.buffer; others: Python
_SHOWN = ("wire", "encode", "Python", "load")
_FOLDER = str(Path(rlmq.buffer.__file__).parent)


@dataclass(frozen=True, slots=True)
class Load:
    """One load: `rows` a step from two producers in puts of `chunk`, claims of `batch` rows by the trainer."""

    name: str
    table: Table
    make: Callable[[int, int, int, int], pa.RecordBatch]
    rows: int
    chunk: int
    batch: int
    steps: int

    @property
    def rewarded(self) -> bool:
        """Whether a reward worker stands between producers and trainer."""
        return self.table == GRPO  # not `is`: it came to this process as a copy


@dataclass(slots=True)
class Used:
    """What one process used in the measured steps."""

    cpu_s: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    user_bytes: int = 0
    wall_s: float = 0.0


def run(arguments: Sequence[str] = ()) -> BenchResult:
    """Measure both loads, or with `--flat` the cost by number of live rows."""
    parser = argparse.ArgumentParser(prog="rlmq bench buffer")
    parser.add_argument("--steps", type=int, default=40, help="steps of W1, the first of them not measured")
    parser.add_argument("--chunk", type=int, default=64, help="rows a put of W1")
    parser.add_argument("--flat", action="store_true", help="cost by number of live rows instead")
    parser.add_argument("--rows", type=int, default=1_000_000, help="live rows of --flat")
    given = parser.parse_args(arguments)
    if given.flat:
        return flat.run_flat(given.rows)
    loads = (
        Load("W1", GRPO, grpo_rows, rows=2048, chunk=given.chunk, batch=256, steps=given.steps),
        Load("W3", SMALL, small_rows, rows=100_000, chunk=500, batch=1000, steps=max(2, given.steps // 8)),
    )
    rows = [measured(load) for load in loads]
    ratios = {"server RSS growth / live payload, limit 1.5": memory_ratio()}
    return BenchResult("buffer", rows, ratios)


def measured(load: Load) -> dict[str, Cell]:
    """One line of the table."""
    roles: list[Callable[[str, Load], Used]] = [_first_producer, _second_producer, _trainer]
    if load.rewarded:
        roles.append(_reward)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(roles) + 1)
    server_s = script_s = 0.0
    moved = 0
    pool = ProcessPoolExecutor(len(roles), context, initializer=_set_barrier, initargs=(barrier,))
    with pool, Server() as server:  # the server ends first: whoever waits for it when a role has failed ends too
        futures = [pool.submit(_in_role, role, server.url, load) for role in roles]
        for step in range(load.steps):
            before = (server.cpu_s(), server.script_s(), server.moved_bytes())
            _meet(barrier, futures)
            _meet(barrier, futures)
            if step > 0:
                server_s += server.cpu_s() - before[0]
                script_s += server.script_s() - before[1]
                moved += server.moved_bytes() - before[2]
        used = [future.result(_TIMEOUT_S) for future in futures]
        settings = server.append_only()
    return _line(load, used, server_s, script_s, moved) | {"AOF": " ".join(settings.values())}


def _meet(barrier: Barrier, futures: Sequence[Future[Used]]) -> None:
    """Wait for the roles; when one of them failed, raise what it raised."""
    try:
        barrier.wait(_TIMEOUT_S)
    except BrokenBarrierError:
        for future in as_completed(futures, _TIMEOUT_S):
            error = future.exception()
            if error is not None and not isinstance(error, BrokenBarrierError):
                raise error from None
        raise


def _line(load: Load, used: Sequence[Used], server_s: float, script_s: float, moved: int) -> dict[str, Cell]:
    count = load.rows * (load.steps - 1)
    clients_s = sum(one.cpu_s for one in used)
    total_s = server_s + clients_s
    sampled_s = {part: sum(one.parts[part] for one in used) for part in _SHOWN}
    shares = {part: part_s / sum(sampled_s.values()) for part, part_s in sampled_s.items()}
    return {
        "load": f"{load.name}, {load.chunk}-row chunks",
        "CPU µs/sample": 1e6 * total_s / count,
        "samples/s": count / max(one.wall_s for one in used),
        "server (%)": 100 * server_s / total_s,
        "of it scripts (%)": 100 * script_s / total_s,
        **{f"{part} (%)": 100 * share * clients_s / total_s for part, share in shares.items()},
        "moved / payload": moved / max(one.user_bytes for one in used),
    }


def memory_ratio(rows: int = _LIVE_ROWS) -> float:
    """Growth of the server's memory by live rows that nobody claims, over their user bytes."""
    with Server() as server:
        store = RedisStore(server.url, run_id=RUN, worker="fill")
        store.open([GRPO])
        before, held = server.rss_bytes(), 0
        for sequence, first in enumerate(range(0, rows, 64), start=1):
            chunk = grpo_rows(64, sequence, first, 0)
            store.put(GRPO.name, chunk, producer="fill", sequence=sequence, group_size=GROUP)
            held += user_bytes(chunk)
        grown = server.rss_bytes() - before
        store.close()
    return grown / held


# -- the roles, each a process of its own ----------------------------------------------------------------------

_barrier: Barrier


def _set_barrier(barrier: Barrier) -> None:
    global _barrier  # noqa: PLW0603  # a pool's processes get it this way only
    _barrier = barrier


def _in_role(role: Callable[[str, Load], Used], url: str, load: Load) -> Used:
    try:
        return role(url, load)
    except BaseException:
        _barrier.abort()
        raise


def _first_producer(url: str, load: Load) -> Used:
    return _producer(url, load, 0)


def _second_producer(url: str, load: Load) -> Used:
    return _producer(url, load, 1)


def _producer(url: str, load: Load, index: int) -> Used:
    store, sequence = _opened(url, load, f"producer-{index}"), itertools.count(1)
    half = load.rows // 2

    def put() -> None:
        for chunk in chunks:
            store.put(
                load.table.name,
                chunk,
                producer=f"producer-{index}",
                sequence=next(sequence),
                group_size=GROUP if load.rewarded else 1,
            )

    steps = Steps(put)
    for step in range(load.steps):
        data = load.make(half, 1000 * step + index, (2 * step + index) * half, step)
        chunks = [data.slice(at, load.chunk) for at in range(0, half, load.chunk)]
        steps.take(step)
    return steps.used


def _reward(url: str, load: Load) -> Used:
    store = _opened(url, load, "reward-0")

    def score() -> None:
        left = load.rows
        while left > 0:
            claim = _claimed(store, load, "reward", min(load.chunk, left), ("prompt_ids", "response_ids"))
            verdicts = pa.RecordBatch.from_arrays([pa.array(rewards(claim.rows))], names=["reward"])
            store.write(claim, verdicts, ack=True)
            left -= claim.count

    steps = Steps(score)
    for step in range(load.steps):
        steps.take(step)
    return steps.used


def _trainer(url: str, load: Load) -> Used:
    store = _opened(url, load, "trainer-0")
    batches: list[pa.RecordBatch] = []

    def train() -> None:
        left = load.rows
        while left > 0:
            claim = _claimed(store, load, "trainer", min(load.batch, left), None)
            store.ack(claim)
            batches.append(claim.rows)
            left -= claim.count

    steps = Steps(train)
    for step in range(load.steps):
        steps.take(step)
        _check(batches, load, step)
        if step > 0:
            steps.used.user_bytes += sum(user_bytes(batch) for batch in batches)
        batches.clear()
    return steps.used


def _claimed(store: RedisStore, load: Load, stage: str, rows: int, columns: Sequence[str] | None) -> Claim:
    claim = store.claim(load.table.name, stage, max_rows=rows, min_rows=rows, columns=columns, timeout_s=_TIMEOUT_S)
    assert claim is not None  # a claim with a time-out raises
    return claim


def _check(batches: Sequence[pa.RecordBatch], load: Load, step: int) -> None:
    """Every row of the step once, with the verdict that its own tokens give."""
    uid = np.sort(np.concatenate([batch.column("uid").to_numpy() for batch in batches]))
    if not np.array_equal(uid, np.arange(step * load.rows, (step + 1) * load.rows)):
        raise IntegrityError(
            f"step {step}", got=f"{len(np.unique(uid))} samples", expected=f"{load.rows}, once each"
        )
    for batch in batches if load.rewarded else ():
        if not np.array_equal(batch.column("reward").to_numpy(), rewards(batch)):
            raise IntegrityError(f"step {step}", got="a reward of other tokens", expected="the sample's own")


def _opened(url: str, load: Load, worker: str) -> RedisStore:
    store = RedisStore(url, run_id=RUN, worker=worker, retry_s=1)
    store.open([load.table])
    return store


class Steps:
    """Runs one role's work between two barriers a step, and says what it used."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.used = Used()
        self._work = work
        self._sampled_s = 0.0
        signal.signal(signal.SIGALRM, self._sample)

    def take(self, step: int) -> None:
        """One step; the first is not counted."""
        _barrier.wait(_TIMEOUT_S)
        cpu_s, began = time.process_time(), time.monotonic()
        if step > 0:
            self._sampled_s = cpu_s
            signal.setitimer(signal.ITIMER_REAL, _SAMPLE_S, _SAMPLE_S)
        self._work()
        if step > 0:
            self.used.cpu_s += time.process_time() - cpu_s
            self.used.wall_s += time.monotonic() - began
        signal.setitimer(signal.ITIMER_REAL, 0)
        _barrier.wait(_TIMEOUT_S)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        before, self._sampled_s = self._sampled_s, time.process_time()
        while frame is not None:
            folder, name = os.path.split(frame.f_code.co_filename)
            if folder == _FOLDER:
                part = _PARTS.get(name.removesuffix(".py"), "Python")
                break
            frame = frame.f_back
        else:
            part = "load"
        self.used.parts[part] += self._sampled_s - before
