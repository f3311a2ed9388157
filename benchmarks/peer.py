"""The buffer as one more system of a peer benchmark: `benchmarks.peer:Rlmq`.

The referee's `harness` module has the contract; its folder is on the path when it imports this one. Nothing here is
made for a benchmark: tables, leases, fencing and lineage are those of a run, the append-only file is on.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import harness  # type: ignore[import-not-found]  # the referee's
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.load import BULK, GROUP, GRPO, RUN, SMALL, Server
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, Facts, Table
from rlmq.common.errors import DeadlineExceeded

_FILL_S = 0.05  # so long the trainer waits for all rows that it may take; then it takes what there is
_TABLES = {"prompt_ids": GRPO, "meta": SMALL, "tensor": BULK}  # by a column that only this load has
_VERSIONS = ("policy_version", "version")
_KINDS = {  # by table and column: its type, and that of its items
    table.name: {c.name: (c.type, c.type.value_type if c.type.num_fields else None) for c in table.columns}
    for table in _TABLES.values()
}
_schemas: dict[tuple[str, ...], pa.Schema] = {}  # of columns by their names, as they were put first

Batch = Mapping[str, Any]  # column name to harness.Ragged or an array


class Rlmq(harness.Peer):  # type: ignore[misc]
    """The server's side: one server for all loads."""

    name = "rlmq"
    per_row = True

    def start(self, **_: object) -> dict[str, str]:
        """Start the server; what clients need to find it."""
        self.server = Server()
        self.pids = [self.server.process.pid]
        self.settings = self.server.append_only()
        return {"url": self.server.url}

    def stop(self) -> None:
        """End the server."""
        self.server.close()

    def wire_bytes(self) -> int:
        """Bytes that the server counted, in and out."""
        return self.server.moved_bytes()

    def client(self, info: Mapping[str, str]) -> RlmqClient:
        """One process's client."""
        return RlmqClient(info["url"])


class RlmqClient(harness.Client):  # type: ignore[misc]
    """One process: its store, its tables as it meets them, and the columns that its next ack brings."""

    def __init__(self, url: str) -> None:
        self._worker = f"w{os.getpid()}-{secrets.token_hex(4)}"
        self._store = RedisStore(url, run_id=RUN, worker=self._worker)
        self._sequence = itertools.count(1)
        self._opened: set[str] = set()
        self._written: dict[str, pa.RecordBatch] = {}  # by lease

    def put(self, batch: Batch) -> None:
        """New rows, as one chunk."""
        table = self._table(batch)
        version = next((int(batch[name][0]) for name in _VERSIONS if name in batch), None)
        self._store.put(
            table.name,
            to_arrow(batch, table),
            producer=self._worker,
            sequence=next(self._sequence),
            group_size=GROUP if table is GRPO else 1,
            facts=Facts(version=version),
        )

    def get(
        self, consumer: str, n: int, columns: Sequence[str], timeout: float = 30.0
    ) -> tuple[Claim, Batch] | None:
        """Up to `n` rows that have these columns. The trainer waits a little for all of them."""
        fill_s = min(_FILL_S, timeout) if consumer == "trainer" else 0.0
        for min_rows, wait_s in ((n, fill_s), (1, timeout - fill_s)):
            if wait_s > 0:
                with suppress(DeadlineExceeded):
                    claim = self._store.claim(
                        self._table(columns).name,
                        consumer,
                        max_rows=n,
                        min_rows=min_rows,
                        columns=columns,
                        timeout_s=wait_s,
                    )
                    assert claim is not None  # a claim with a time-out raises
                    return claim, from_arrow(claim.rows, self._table(columns))
        return None

    def put_columns(self, handle: Claim, batch: Batch) -> None:
        """Keep the new columns: they go with the ack, in one call."""
        self._written[handle.lease] = to_arrow(batch, self._table(("prompt_ids",)))

    def ack(self, consumer: str, handle: Claim) -> None:
        """Write what `put_columns` brought, and end the claim."""
        columns = self._written.pop(handle.lease, None)
        if columns is None:
            self._store.ack(handle, wait=False)
        else:
            self._store.write(handle, columns, ack=True, wait=False)

    def close(self) -> None:
        """Close the connections."""
        self._store.close()

    def _table(self, columns: Batch | Sequence[str]) -> Table:
        """The table of the load that has these columns, opened the first time."""
        table = next(table for name, table in _TABLES.items() if name in columns)
        if table.name not in self._opened:
            self._store.open([table])
            self._opened.add(table.name)
        return table


def to_arrow(batch: Batch, table: Table) -> pa.RecordBatch:
    """The referee's columns as Arrow's; values are not copied, offsets become int32."""
    kinds = _KINDS[table.name]
    names = tuple([name for name in kinds if name in batch])
    schema = _schemas.get(names)
    if schema is None:
        schema = _schemas[names] = pa.schema([(name, kinds[name][0]) for name in names])
    return pa.RecordBatch.from_arrays([_array(batch[name], *kinds[name]) for name in names], schema=schema)


def _array(column: Any, kind: pa.DataType, inner: pa.DataType | None) -> pa.Array:
    if inner is None:
        return pa.Array.from_buffers(kind, len(column), (None, pa.py_buffer(column)))
    ragged = type(column) is harness.Ragged
    values = column.values if ragged else column.reshape(-1)
    flat = pa.Array.from_buffers(inner, len(values), (None, pa.py_buffer(values)))
    if kind.num_buffers == 1:  # of fixed size
        return pa.Array.from_buffers(kind, len(column), (None,), children=[flat])
    offsets = column.offsets if ragged else np.arange(len(column) + 1) * column.shape[1]
    return pa.Array.from_buffers(
        kind, len(column), (None, pa.py_buffer(offsets.astype(np.int32))), children=(flat,)
    )


def from_arrow(rows: pa.RecordBatch, table: Table) -> dict[str, Any]:
    """Arrow's columns as the referee's, without a copy of the values."""
    kinds = _KINDS[table.name]
    return {name: _column(name, array, *kinds[name]) for name, array in zip(rows.schema.names, rows, strict=True)}


def _column(name: str, array: pa.Array, kind: pa.DataType, inner: pa.DataType | None) -> Any:
    if inner is None:
        return array.to_numpy()
    if kind.num_buffers == 1:  # of fixed size
        return array.flatten().to_numpy().reshape(len(array), -1)
    offsets: npt.NDArray[np.int64] = array.offsets.to_numpy().astype(np.int64)
    values = array.values.to_numpy()
    first, last = offsets[0], offsets[-1]
    if first or last < len(values):
        values, offsets = values[first:last], offsets - first
    if name == "tensor":  # rows of one length
        return values.reshape(len(array), -1)
    return harness.Ragged(values, offsets)
