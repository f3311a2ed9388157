"""A small table and stores on it: `x` comes with the put, `a` writes `y`, `b` writes `z`, `end` ends rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest
import redis

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, Scope, Stage, Table
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

    def put(self, store: RedisStore, count: int, *, group_size: int = 1) -> None:
        """A chunk of `count` rows; x counts up over the chunks."""
        rows = self.rows(self._sequence * 100, count)
        assert store.put("train", rows, producer="p", sequence=self._sequence, group_size=group_size)
        self._sequence += 1

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

    def close(self) -> None:
        for store in self._stores:
            store.close()
        self.client.close()


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    bench = Bench(redis_url)
    yield bench
    bench.close()


@pytest.fixture
def own_bench(own_server: object) -> Iterator[Bench]:
    """A bench on the test's own server."""
    bench = Bench(own_server.url)  # type: ignore[attr-defined]
    yield bench
    bench.close()
