"""The experience store: the one seam between rows and the processes that work on them.

A *table* holds *samples* (rows) in *chunks*; a chunk is what one `put` brought, always whole groups.
A *stage* consumes each row once, as soon as the columns that it needs are there, independently of the
other stages. A *claim* leases rows to one worker; the lease is the fence of every write under it.

Rows end in exactly one of the `END_STATES`, counted by the store itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa

from rlmq.common.columns import Column

Scope = Literal["row", "group", "chunk", "batch"]
EndState = Literal["trained", "done", "filtered", "stale", "dead"]
END_STATES: tuple[EndState, ...] = ("trained", "done", "filtered", "stale", "dead")


@dataclass(frozen=True, slots=True)
class Stage:
    """A consumer of rows.

    A row is *ready* for the stage when every column in `needs` is there; with `ended=True` the stage
    instead receives rows that reached an end state, with whatever columns they have (the recorder).

    `scope` is the unit that a claim never splits: single rows, whole groups, one whole chunk per claim
    (the unit of generation), or `batch`: all of `max_rows` at once or nothing.
    """

    name: str
    needs: tuple[str, ...]
    scope: Scope = "row"
    lease_s: float = 60.0
    max_deliveries: int = 3
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A named partition with typed columns, its stages, and a capacity in live rows."""

    name: str
    columns: tuple[Column, ...]
    stages: tuple[Stage, ...]
    capacity_rows: int = 1_000_000


@dataclass(frozen=True, slots=True)
class RowRange:
    """`count` rows of one chunk from index `first`; `delivery` is 1 the first time they are claimed."""

    chunk: str
    first: int
    count: int
    delivery: int = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """Rows leased to one worker. `rows` holds the columns asked for, in the order of `ranges`."""

    table: str
    stage: str
    lease: str
    ranges: tuple[RowRange, ...]
    rows: pa.RecordBatch

    @property
    def count(self) -> int:
        """Number of rows claimed."""
        return sum(r.count for r in self.ranges)


@dataclass(frozen=True, slots=True)
class Interest:
    """What a waiter waits for: at least `rows` ready rows of a stage.

    With `or_settled`, also that no live row of the table can become ready any more without a new
    `put` (each is ready for, leased by or past this stage, or ended), so that a batch thinned out by
    filters is noticed at once.
    """

    table: str
    stage: str
    rows: int = 1
    or_settled: bool = False


@dataclass(frozen=True, slots=True)
class TableCounts:
    """What a table holds now; every figure comes from the store's own counters.

    `ended` maps `"state"` or `"state(reason)"` to rows since the run began.
    `ready`, `leased`, `acked` map stage name to rows.
    """

    admitted: int
    live: int
    payload_bytes: int
    ready: Mapping[str, int]
    leased: Mapping[str, int]
    acked: Mapping[str, int]
    ended: Mapping[str, int]
    redelivered: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Who waits for what: one line of `rlmq why`. `since_s` is how long already; `stage` is empty for room."""

    worker: str
    table: str
    stage: str
    for_what: str
    since_s: float
    counts: TableCounts | None = field(default=None)


class ExperienceStore(Protocol):
    """Rows by stage. Every verb is one transition, atomic in the server, idempotent when repeated."""

    def open(self, tables: Sequence[Table]) -> None:
        """Create the tables, or check that the existing ones are the same.

        Raises:
            SchemaMismatch: a table exists with other columns; both fingerprints are named.
            DependencyError: the server cannot be reached, or is too old.
        """

    def put(self, table: str, rows: pa.RecordBatch, *, producer: str, sequence: int, group_size: int) -> bool:
        """Add one chunk of whole groups. Blocks while the table is full.

        `(producer, sequence)` makes a repeated put a no-op: sequences of a producer only grow.

        Returns:
            False when this sequence was put before.

        Raises:
            DeadlineExceeded: still full after the store's put deadline; names the stage that must drain.
            SchemaMismatch: `rows` does not start the table's columns.
        """

    def claim(
        self, table: str, stage: str, *, max_rows: int, min_rows: int = 1, columns: Sequence[str] | None = None
    ) -> Claim | None:
        """Lease ready rows in order of admission; None when fewer than `min_rows` are ready. Never blocks.

        `columns=None` brings all columns of the table. `end_state`, `end_reason` and `end_step` may be asked for
        too: how the row ended (null while it lives).
        """

    def wait(self, interests: Sequence[Interest], *, timeout_s: float, wake_fd: int | None = None) -> bool:
        """Sleep until one interest may be met, `wake_fd` is readable, or the time is over.

        Wakes at once when rows become ready; no polling.

        Returns:
            True when an interest may be met now.
        """

    def read(self, table: str, ranges: Sequence[RowRange], columns: Sequence[str]) -> pa.RecordBatch:
        """Columns of rows whose payload is still held, without a lease. Absent columns are null."""

    def extend(self, claim: Claim) -> None:
        """Renew the lease: the worker made progress.

        Raises:
            Fenced: the lease expired and was given to somebody else.
        """

    def write(self, claim: Claim, columns: pa.RecordBatch, *, ack: bool = False) -> None:
        """Add columns to the claimed rows (all of them, in order); with `ack`, end the claim as done too.

        Raises:
            Fenced: the lease is no longer valid. SchemaMismatch: wrong columns, types or row count.
        """

    def finish(
        self, claim: Claim, state: EndState, reason: str = "", *, rows: Sequence[int] | None = None, step: int = -1
    ) -> None:
        """Give claimed rows (indices within the claim, default all) their end state; ends the claim for them.

        A finished row is ready for no other stage except those with `ended=True`. Rows finished as
        `trained` keep their payload until `advance(step)` reaches their step.
        """

    def finish_logged(self, table: str, stage: str, ranges: Sequence[RowRange], *, step: int) -> None:
        """Mark rows of a batch-log entry as trained, whoever holds them now: redo after a crash. Idempotent."""

    def ack(self, claim: Claim) -> None:
        """This stage is done with the rows."""

    def nack(self, claim: Claim, reason: str) -> None:
        """Redeliver the rows and count it; after `max_deliveries` they end as `dead(reason)`."""

    def release(self, claim: Claim) -> None:
        """Give the rows back unworked; not counted."""

    def advance(self, durable_step: int) -> None:
        """A checkpoint covers this step: free the payload of rows trained up to it. Idempotent."""

    def counts(self, table: str) -> TableCounts:
        """The table's counters."""

    def waiting(self) -> list[Waiting]:
        """Everybody who waits on this store now."""

    def expire(self) -> int:
        """Return rows of expired leases to their stages (`Redis TIME` decides); also done by every claim."""

    def close(self) -> None:
        """Close the connections."""
