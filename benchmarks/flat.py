"""What an operation costs the server with few and with many live rows, and how long single functions take.

Times are the server's own statistics of its functions, for one verb at a time. (Its slow log would enter what they
call too, at their expense.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.load import RUN, Server
from benchmarks.result import BenchResult, Cell
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, Stage, Table
from rlmq.common.columns import Column

TINY = Table(
    "tiny",
    (Column("uid", pa.int64(), "rollout"), Column("reward", pa.float32(), "reward")),
    (Stage("reward", needs=("uid",)), Stage("trainer", needs=("reward",))),
    capacity_rows=10_000_000,
)
_FEW_ROWS = 10_000
_LIMITS = {64: 1.25, 8: 1.6}  # by rows of a chunk
_VERBS = ("put", "claim", "write", "ack")
_ROUNDS, _OPERATIONS = 15, 64
_BATCH = 256  # rows a claim of the trainer
_RANGES, _RANGE_CALLS = 256, 1000
_TIMEOUT_S = 60.0


def run_flat(many_rows: int, *, rounds: int = _ROUNDS, range_calls: int = _RANGE_CALLS) -> BenchResult:
    """Both chunk sizes with `_FEW_ROWS` and `many_rows` live rows, then claims of one-row ranges."""
    rows: list[dict[str, Cell]] = []
    ratios: dict[str, float] = {}
    for chunk, limit in _LIMITS.items():
        with Server() as small, Server() as large:
            few, many = Filled(small, _FEW_ROWS, chunk), Filled(large, many_rows, chunk)
            for _ in range(rounds):
                few.operate()
                many.operate()
        rows += [few.line(), many.line()]
        for verb in _VERBS:
            name = f"{verb}, {chunk}-row chunks: {many_rows} / {_FEW_ROWS} live rows, limit {limit}"
            ratios[name] = median(many.times[verb]) / median(few.times[verb])
        if chunk == max(_LIMITS):
            ratios[f"metadata per row at {many_rows} (bytes), limit 40"] = many.metadata_bytes
    notes: list[str] = []
    for chunk in (max(_LIMITS), 1):
        spread = range_times(chunk, range_calls)
        name = f"p99.9 of functions on {_RANGES} one-row ranges of {chunk}-row chunks (ms), limit 2"
        ratios[name] = max(one.ms["p99.9"] for one in spread.values())
        notes += [
            f"{verb} of {_RANGES} ranges, {chunk}-row chunks, ms: {one.told()}" for verb, one in spread.items()
        ]
    return BenchResult("buffer --flat", rows, ratios, notes)


@dataclass(frozen=True, slots=True)
class Times:
    """Functions of one phase. `ms`: percentiles in milliseconds; p100 is the slowest."""

    mean_us: float
    calls: int
    ms: dict[str, float]

    def told(self) -> str:
        """For people."""
        return ", ".join(f"{mark} {value:.2f}" for mark, value in self.ms.items()) + f" ({self.calls} calls)"


class Filled:
    """A server that holds `live` rows of `TINY`, ready for its first stage."""

    def __init__(self, server: Server, live: int, chunk: int) -> None:
        self.times: dict[str, list[float]] = {verb: [] for verb in _VERBS}  # µs, means of a round
        self._server = server
        self._store = RedisStore(server.url, run_id=RUN, worker="flat")
        self._store.open([TINY])
        self._chunk, self._sequence, self._live = chunk, itertools.count(1), live
        before = self._used_bytes()
        for _ in range(live // chunk):
            self.put()
        held = self._used_bytes() - before - self._store.counts(TINY.name).payload_bytes
        self.metadata_bytes = held / live

    def _used_bytes(self) -> int:
        memory: dict[str, Any] = self._server.client.info("memory")
        return int(memory["used_memory"])

    def put(self) -> None:
        """One more chunk."""
        put_chunk(self._store, self._chunk, next(self._sequence))

    def operate(self) -> None:
        """One round of every verb; as many rows live after it as before."""
        self._timed("put", [self.put] * _OPERATIONS)
        claims: list[Claim] = []
        self._timed("claim", [partial(claim_rows, self._store, "reward", self._chunk, claims)] * _OPERATIONS)
        self._timed("write", [partial(self._store.write, one, _verdicts(one.count), ack=True) for one in claims])
        batches: list[Claim] = []
        for _ in range(_OPERATIONS * self._chunk // _BATCH):
            claim_rows(self._store, "trainer", _BATCH, batches)
        self._timed("ack", [partial(self._store.ack, one) for one in batches])

    def _timed(self, verb: str, operations: Sequence[Callable[[], None]]) -> None:
        self.times[verb].append(timed(self._server, operations).mean_us)

    def line(self) -> dict[str, Cell]:
        """One line of the table."""
        means = {f"{verb} (µs)": median(times) for verb, times in self.times.items()}
        first: dict[str, Cell] = {"live rows": self._live, "rows a chunk": self._chunk}
        return first | means | {"metadata per row (bytes)": self.metadata_bytes}


def timed(server: Server, operations: Sequence[Callable[[], None]]) -> Times:
    """What the functions that these operations call take in the server, what they call included."""
    server.client.config_resetstat()
    for operation in operations:
        operation()
    commands: dict[str, Any] = server.client.info("commandstats")
    spread: dict[str, Any] = server.client.info("latencystats")
    of_functions = spread["latency_percentiles_usec_fcall"]
    marks = {mark: float(of_functions[mark]) / 1000 for mark in ("p50", "p99", "p99.9", "p100")}
    return Times(float(commands["cmdstat_fcall"]["usec_per_call"]), int(commands["cmdstat_fcall"]["calls"]), marks)


def range_times(chunk: int, number: int) -> dict[str, Times]:
    """Functions on `_RANGES` ranges of one row each, `number` calls of each verb.

    Either chunks have one row, or every other row of a chunk was filtered.
    """
    claims: list[Claim] = []
    times: dict[str, Times] = {}
    with Server() as server:
        store = RedisStore(server.url, run_id=RUN, worker="ranges")
        store.open([TINY])
        for sequence in range(1, _RANGES * number * min(2, chunk) // chunk + 1):
            put_chunk(store, chunk, sequence)
            if chunk > 1:
                claim_rows(store, "reward", chunk, claims)
        for one in claims:
            store.finish(one, "filtered", "every other", rows=range(0, chunk, 2))
            store.release(one)

        def claim(stage: str) -> Times:
            claims.clear()
            return timed(server, [partial(claim_rows, store, stage, _RANGES, claims)] * number)

        claim("reward")
        times["release"] = timed(server, [partial(store.release, one) for one in claims])
        times["claim"] = claim("reward")
        writes = [partial(store.write, one, _verdicts(_RANGES), ack=True) for one in claims]
        times["write"] = timed(server, writes)
        claim("trainer")
        times["ack"] = timed(server, [partial(store.ack, one) for one in claims])
        store.close()
    return times


def put_chunk(store: RedisStore, chunk: int, sequence: int) -> None:
    """One more chunk of so many rows."""
    uid = pa.array(np.arange(chunk) + sequence * chunk)
    rows = pa.RecordBatch.from_arrays([uid], names=["uid"])
    store.put(TINY.name, rows, producer="flat", sequence=sequence, group_size=1)


def claim_rows(store: RedisStore, stage: str, rows: int, claims: list[Claim]) -> None:
    """One claim of so many rows more."""
    claim = store.claim(TINY.name, stage, max_rows=rows, min_rows=rows, timeout_s=_TIMEOUT_S)
    assert claim is not None  # a claim with a time-out raises
    claims.append(claim)


def _verdicts(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.ones(rows, np.float32))], names=["reward"])
