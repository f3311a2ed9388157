"""A small table and stores on it: `x` comes with the put, `a` writes `y`, `b` writes `z`, `end` ends rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import redis

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, Facts, Scope, Stage, Table
from rlmq.common.columns import Column

_LISTS = pa.list_(pa.field("item", pa.int32()))
_COLUMNS = (
    Column("name", pa.string(), "source"),
    Column("x", pa.int64(), "source"),
    Column("y", _LISTS, "a"),
    Column("z", pa.float64(), "b"),
    Column("note", pa.string(), "b"),
)


class Bench:
    """Stores of several workers on one server and table, and what tests do with them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = redis.Redis.from_url(url)
        self.intact = True  # a test that damages a table on purpose says False
        self._stores: list[RedisStore] = []
        self._sequence = 0

    @staticmethod
    def table(
        *,
        a: Scope = "row",
        b: Scope = "row",
        end: Scope = "row",
        lease_s: float = 60.0,
        max_deliveries: int = 3,
        capacity_rows: int = 1000,
        recorder: bool = True,
        columns: tuple[Column, ...] = _COLUMNS,
    ) -> Table:
        stages = (
            Stage("a", ("x",), a, lease_s, max_deliveries),
            Stage("b", ("y",), b, lease_s, max_deliveries),
            Stage("end", ("z",), end, lease_s, max_deliveries),
            Stage("recorder", (), "row", lease_s, max_deliveries, ended=True),
        )
        return Table("train", columns, stages if recorder else stages[:3], capacity_rows)

    @staticmethod
    def one_stage(*, max_uses: int = 1, seed: int = 0, limits: dict[str, Any] | None = None, **stage: Any) -> Table:
        """A table whose rows are ready for its only stage, `end`, as soon as they are put."""
        return Table(
            "train", _COLUMNS, (Stage("end", ("x",), **stage),), max_uses=max_uses, seed=seed, **(limits or {})
        )

    @staticmethod
    def with_stage(table: Table, name: str, **changes: Any) -> Table:
        """The table with one stage changed."""
        return replace(
            table, stages=tuple(replace(one, **changes) if one.name == name else one for one in table.stages)
        )

    def store(
        self, table: Table | None = None, *, worker: str = "w0", put_timeout_s: float = 20, retry_s: float = 20
    ) -> RedisStore:
        store = RedisStore(self.url, run_id="run-1", worker=worker, put_timeout_s=put_timeout_s, retry_s=retry_s)
        self._stores.append(store)
        store.open([table or self.table()])
        return store

    @staticmethod
    def rows(first: int, count: int) -> pa.RecordBatch:
        """What a put brings: `x` counts from `first`."""
        numbers = range(first, first + count)
        return pa.record_batch({"name": [f"n{k}" for k in numbers], "x": pa.array(numbers, pa.int64())})

    @staticmethod
    def y(values: Sequence[int]) -> pa.RecordBatch:
        return pa.record_batch({"y": pa.array([[v, v] for v in values], _LISTS)})

    @staticmethod
    def z(values: Sequence[float]) -> pa.RecordBatch:
        return pa.record_batch({"z": pa.array(values, pa.float64()), "note": [f"z{v:g}" for v in values]})

    def put(
        self,
        store: RedisStore,
        count: int,
        *,
        group_size: int = 1,
        version: int | None = None,
        tokens: Sequence[int] | None = None,
        tag: str = "",
        closes: bool = False,
    ) -> str:
        """A chunk of `count` rows; x counts up over the chunks. Returns the chunk's name."""
        rows, sequence = self.rows(self._sequence * 100, count), self._sequence
        facts = Facts(version, tokens, tag)
        assert store.put(
            "train", rows, producer="p", sequence=sequence, group_size=group_size, facts=facts, closes=closes
        )
        self._sequence += 1
        return f"p.{sequence}"

    @staticmethod
    def take(store: RedisStore, stage: str, count: int, columns: Sequence[str] | None = None) -> Claim:
        """A claim of exactly `count` rows."""
        claim = store.claim("train", stage, max_rows=count, min_rows=count, columns=columns)
        assert claim is not None, f"stage {stage} has not {count} rows ready"
        assert claim.count == count
        return claim

    @staticmethod
    def xs(claim: Claim | None) -> list[int]:
        """The claimed rows' x."""
        assert claim is not None
        values: list[int] = claim.rows["x"].to_pylist()
        return values

    def through_a(self, store: RedisStore, count: int) -> None:
        """`count` rows get y = [x, x]."""
        claim = self.take(store, "a", count)
        store.write(claim, self.y(self.xs(claim)), ack=True)

    def through_b(self, store: RedisStore, count: int) -> None:
        """`count` rows get z = x."""
        claim = self.take(store, "b", count)
        store.write(claim, self.z(self.xs(claim)), ack=True)

    def ready_for_end(self, store: RedisStore, count: int, *, group_size: int = 1) -> None:
        """`count` new rows with all columns."""
        self.put(store, count, group_size=group_size)
        self.through_a(store, count)
        self.through_b(store, count)

    def key_names(self, part: str = "") -> list[str]:
        """Keys of the server that contain `part`."""
        return sorted(key.decode() for key in self.client.keys("*") if part in key.decode())

    def calls(self) -> int:
        """Functions that the server ran so far."""
        stats: dict[str, dict[str, int]] = self.client.info("commandstats")
        return sum(stats.get(f"cmdstat_{verb}", {}).get("calls", 0) for verb in ("fcall", "fcall_ro"))

    def broken(self) -> list[str]:
        """Invariants that do not hold, of every table that is there."""
        tables = [key.decode().split(":")[2].rstrip("}") for key in self.client.keys("rlmq:{run-1:*}:config")]
        observer = RedisStore(self.url, run_id="run-1", worker="observer")
        try:
            observer.attach(tables)
            return [line for table in tables for line in observer.verify(table)]
        finally:
            observer.close()

    def close(self) -> None:
        for store in self._stores:
            store.close()
        self.client.close()


class Blocked:
    """A call in a thread of its own that is expected to block; it fails the test that asks for its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # raised again where the result is asked for
            self._error = error

    @property
    def asleep(self) -> bool:
        return self._thread.is_alive()

    def registered(self, store: RedisStore, waiters: int = 1) -> Blocked:
        """Return when so many waiters are known to the server."""
        end = time.monotonic() + 20
        while len(store.waiting()) < waiters:
            if not self.asleep:
                self.result()
            assert time.monotonic() < end, "the call did not wait"
            time.sleep(0.002)
        return self

    def result(self, timeout_s: float = 20.0) -> Any:
        """What the call returned."""
        self._thread.join(timeout_s)
        assert not self.asleep, "the call slept on"
        if self._error is not None:
            raise self._error
        return self._result


@pytest.fixture
def blocked() -> type[Blocked]:
    """Start a call that blocks: `blocked(lambda: store.claim(...)).registered(store)`."""
    return Blocked


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    """A bench on an empty server; afterwards every invariant of its tables holds."""
    bench = Bench(redis_url)
    yield bench
    broken = bench.broken() if bench.intact else []
    bench.close()
    assert broken == []


@pytest.fixture
def own_bench(own_server: object) -> Iterator[Bench]:
    """A bench on the test's own server; where it still runs, every invariant holds afterwards."""
    bench = Bench(own_server.url)  # type: ignore[attr-defined]
    yield bench
    broken: list[str] = []
    with suppress(redis.ConnectionError):
        bench.client.ping()
        broken = bench.broken()
    bench.close()
    assert broken == []
