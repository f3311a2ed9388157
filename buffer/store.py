"""The experience store: the one seam between rows and the processes that work on them.

A *table* holds *samples* (rows) in *chunks*; a chunk is what one `put` brought, always whole *groups*.
A *stage* consumes each row once, as soon as the columns that it needs are there, independently of the
other stages. A *claim* leases rows to one worker; the lease is the fence of every write under it.

A *group* is the record {expected, ready, terminal} of its members for a stage: complete when ready + terminal =
expected, so that a member that was filtered or failed never blocks its siblings.

Rows end in exactly one of the `END_STATES`, counted by the store itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import pyarrow as pa

from rlmq.common.columns import Column

Scope = Literal["row", "group", "chunk", "batch"]
Selector = Literal["fifo", "fresh_first", "uniform", "prioritized"]
EndState = Literal["trained", "done", "filtered", "stale", "dead"]
END_STATES: tuple[EndState, ...] = ("trained", "done", "filtered", "stale", "dead")


@dataclass(frozen=True, slots=True)
class Stage:
    """A consumer of rows.

    A row is *ready* for the stage when every column in `needs` is there; with `ended=True` the stage
    instead receives rows that reached an end state, with whatever columns they have (the recorder).

    `scope` is the unit that a claim never splits: single rows, whole groups, one whole chunk per claim
    (the unit of generation), or `batch`: all of `max_rows` at once or nothing.

    `selector` is the order in which ready units are claimed: `fifo` and `fresh_first` by admission of their
    chunk; `uniform` and `prioritized` by exponential clocks (each unit rings at rate w, the next one is unit k
    with probability w_k / sum(w), independently of the past; Efraimidis and Spirakis 2006), drawn from the
    table's seed, the unit and its use, so that a run repeats its own draws. Units are then groups, or single
    rows in scope `row`.

    `min_batch`: a claim takes at least so many rows, or its `max_rows` if that is less, except after a flush:
    when the upstream has closed (`put(closes=True)` or `flush`) and no row of the closed chunks can still
    become ready, or when the oldest ready row has waited `max_wait_s`.

    `min_size`: nothing is claimed while fewer rows are ready (a warm-up of a replay buffer; no flush).

    `samples_per_insert`, `error_buffer`: the rate limiter of dm-reverb (Cassirer et al. 2021, section 3.4). With
    diff = admitted × samples_per_insert − consumed, a claim keeps
    diff ≥ min_size × samples_per_insert − error_buffer, and a put keeps
    diff ≤ min_size × samples_per_insert + error_buffer.

    `max_staleness`: a claim that tells the trainer's version v ends rows as `stale` whose policy version is
    below v − max_staleness, with all of their unit.

    `group_deadline_s`: so long after the first member of a group is complete, the missing members end as
    `dead(group deadline)`, and with fewer than `group_min` complete ones all members do.
    """

    name: str
    needs: tuple[str, ...]
    scope: Scope = "row"
    lease_s: float = 60.0
    max_deliveries: int = 3
    ended: bool = False
    selector: Selector = "fifo"
    min_batch: int = 1
    max_wait_s: float | None = None
    min_size: int = 0
    samples_per_insert: float | None = None
    error_buffer: float = 0.0
    max_staleness: int | None = None
    group_deadline_s: float | None = None
    group_min: int = 1


@dataclass(frozen=True, slots=True)
class VersionWindow:
    """In-flight capacity in policy versions: admitted − dropped ≤ rows_per_version × (version + 1 + versions).

    `version` is the newest told by `set_version`; `dropped` counts rows that ended in any other state than
    `trained`. With `versions = 0` generation and training alternate (Fu et al. 2025, AReaL, equation 3).
    """

    rows_per_version: int
    versions: int


@dataclass(frozen=True, slots=True)
class Table:
    """A named partition with typed columns, its stages, and its limits.

    live rows ≤ `capacity_rows`; payload bytes ≤ `capacity_bytes` when rows are put (columns that are written
    later come on top; None: no such limit), and `window`. A row is used `max_uses` times by the stage that
    trains before it ends. The newest `max_dead_rows` dead letters keep their payload.
    """

    name: str
    columns: tuple[Column, ...]
    stages: tuple[Stage, ...]
    capacity_rows: int = 1_000_000
    capacity_bytes: int | None = None
    max_uses: int = 1
    window: VersionWindow | None = None
    seed: int = 0
    max_dead_rows: int = 10_000

    def before(self, stage: str) -> tuple[str, ...]:
        """Stages that must have worked on a row before this one, the first ones first."""
        needs = {one.name: one.needs for one in self.stages if not one.ended}
        writers = {column.name: column.writer for column in self.columns}
        found: dict[str, None] = {}
        for writer in sorted({writers.get(need, "") for need in needs.get(stage, ())} & needs.keys() - {stage}):
            found |= dict.fromkeys((*self.before(writer), writer))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the store itself knows of rows that are put or written, beside their payload.

    `version`: the least policy version that made them (None: nothing new to say); `tokens`: size of each row in
    tokens, for token budgets; `tag`: who asked for it, kept in the lineage (call id, hash of a reward function;
    at most 200 characters, without `:` and `;`).
    """

    version: int | None = None
    tokens: Sequence[int] | None = None
    tag: str = ""


class RowRange(msgspec.Struct, frozen=True):
    """`count` rows of one chunk from index `first`.

    `delivery` is 1 the first time they are claimed; `use` counts how often they were trained on before.
    """

    chunk: str
    first: int
    count: int
    delivery: int = 1
    use: int = 0


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
    """What a waiter waits for: that a claim of at least `rows` rows may succeed.

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

    `ended` maps `"state"` or `"state(reason)"` to rows since the run began. `waiting`, `ready`, `leased` and
    `acked` map stage name to rows; `acked` counts all that the stage is past. `uses` counts trainings of rows.
    `fenced` counts writes that were refused because their lease was over. `durable` is the newest step that
    `advance` was told (-1: none): the payload of what was trained up to it is gone.
    """

    admitted: int
    live: int
    payload_bytes: int
    ready: Mapping[str, int]
    leased: Mapping[str, int]
    acked: Mapping[str, int]
    ended: Mapping[str, int]
    redelivered: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)
    uses: int = 0
    fenced: int = 0
    dead_letters: int = 0
    version: int = 0
    durable: int = -1


@dataclass(frozen=True, slots=True)
class Waiting:
    """Who waits for what: one line of `rlmq why`. `since_s` is how long already; `stage` is empty for room."""

    worker: str
    table: str
    stage: str
    for_what: str
    since_s: float
    counts: TableCounts | None = field(default=None)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Rows that ended as dead together: `reason` holds the traceback. `at` is Unix time in seconds."""

    table: str
    range: RowRange
    stage: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Written:
    """One piece of lineage: who wrote these columns of these rows, and when (Unix time in seconds)."""

    range: RowRange
    columns: tuple[str, ...]
    writer: str
    at: float
    version: int | None
    tag: str


@dataclass(frozen=True, slots=True)
class Lease:
    """One live lease: for `rlmq buffer`. `left_s` is negative when it is over and nobody has looked yet."""

    lease: str
    stage: str
    worker: str
    rows: int
    left_s: float


class ExperienceStore(Protocol):
    """Rows by stage. Every verb is one transition, atomic in the server, idempotent when repeated."""

    def open(self, tables: Sequence[Table]) -> None:
        """Create the tables, or check that the existing ones are the same.

        Stages that the server does not know yet are added, also while rows are live: they get every live row.
        Stages that only the server knows stay.

        Raises:
            SchemaMismatch: a table exists with other columns, or a stage with other needs or scope; both
            fingerprints are named. DependencyError: the server cannot be reached, or is too old.
        """

    def put(
        self,
        table: str,
        rows: pa.RecordBatch,
        *,
        producer: str,
        sequence: int,
        group_size: int,
        facts: Facts = Facts(),
        closes: bool = False,
    ) -> bool:
        """Add one chunk of whole groups. Blocks while a limit of the table is reached.

        `(producer, sequence)` makes a repeated put a no-op: sequences of a producer only grow. `closes` says that
        the rows put so far are complete (the step's last chunk): what is ready need not wait for a `min_batch`.

        Returns:
            False when this sequence was put before.

        Raises:
            DeadlineExceeded: still full after the store's put deadline; names the limit and the stage that must
            drain. SchemaMismatch: `rows` is not whole column groups of the table, from its first column on.
        """

    def flush(self, table: str) -> None:
        """The rows put so far are complete: see `Stage.min_batch`."""

    def set_version(self, table: str, version: int) -> None:
        """Tell the trainer's policy version (it only grows): see `VersionWindow`."""

    def claim(
        self,
        table: str,
        stage: str,
        *,
        max_rows: int,
        min_rows: int = 1,
        columns: Sequence[str] | None = None,
        max_tokens: int | None = None,
        version: int | None = None,
        timeout_s: float = 0.0,
    ) -> Claim | None:
        """Lease ready rows in the order of the stage's selector.

        Without `timeout_s` it never blocks: None when it cannot have `min_rows`. With it, it sleeps until it
        can, without polling.

        `max_tokens`: at most so many tokens (but one unit always), by what `Facts.tokens` told; a row of
        unknown size counts 0. A claim touches at most 128 ranges or 64 chunks, unless it must for `min_rows`,
        `min_batch` or scope `batch`. `version`: the trainer's, see `Stage.max_staleness`. `columns=None` brings
        all columns of the table. `end_state`, `end_reason`, `end_step` and `lineage` may be asked for too: how
        the row ended (null while it lives), and who wrote its columns (JSON).

        Raises:
            DeadlineExceeded: nothing after `timeout_s`; names the stage, what it lacks, and the counts.
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
            Fenced: the lease expired.
        """

    def write(
        self,
        claim: Claim,
        columns: pa.RecordBatch,
        *,
        ack: bool = False,
        facts: Facts = Facts(),
        wait: bool = True,
    ) -> None:
        """Add columns to the claimed rows (all of them, in order); with `ack`, end the claim as done too.

        A write brings whole column groups: all columns of one writer that the same stages need.

        Without `wait`, a write with `ack` of at most 64 KiB is *posted*: the call returns when it is sent, and the
        next call of this store gets its answer. What it would have raised is then raised by the first call on a
        table of this store that begins after that, before this one does anything, or by `close`. For stages that do
        with a refusal nothing but drop the work: not for one that must know that its rows were its own.

        Raises:
            Fenced: the lease is no longer valid. SchemaMismatch: wrong columns, types or row count.
        """

    def finish(
        self, claim: Claim, state: EndState, reason: str = "", *, rows: Sequence[int] | None = None, step: int = -1
    ) -> None:
        """Give claimed rows (indices within the claim, default all) their end state; ends the claim for them.

        A finished row is ready for no other stage except those with `ended=True`. Rows finished as `trained`
        keep their payload until `advance(step)` reaches their step; while they have uses left they become ready
        for this stage again instead of ending. With `max_uses` above 1 they are counted as `trained(uses)`.
        """

    def finish_logged(self, table: str, stage: str, ranges: Sequence[RowRange], *, step: int) -> None:
        """Mark rows of a batch-log entry as trained, whoever holds them now:

        redo after a crash. Idempotent by `RowRange.use`.
        """

    def ack(self, claim: Claim, *, wait: bool = True) -> None:
        """This stage is done with the rows. Without `wait` it is posted, as a `write` is."""

    def nack(self, claim: Claim, reason: str) -> None:
        """Redeliver the rows and count it; after `max_deliveries` they end as `dead(reason)`."""

    def release(self, claim: Claim) -> None:
        """Give the rows back unworked; not counted."""

    def lose(self, claim: Claim, rows: Sequence[int], maker: str, columns: Sequence[str]) -> None:
        """What stage `maker` wrote in these columns of claimed rows (indices, at least one) points at nothing now.

        The rows leave the claim and are ready for `maker` again, and for who needs the columns when it has written
        them; stages that are done with a row stay so.
        """

    def server_id(self) -> str:
        """Which server process answers: one that was started again may have come back older."""

    def advance(self, durable_step: int) -> None:
        """A checkpoint covers this step: free the payload of rows trained up to it. Idempotent."""

    def prioritize(self, table: str, stage: str, ranges: Sequence[RowRange], priorities: Sequence[float]) -> None:
        """Give each range (whole units of a `prioritized` stage) its rate; a freed one is left alone."""

    def dead_letters(self, table: str) -> list[DeadLetter]:
        """Dead rows whose payload is still held, oldest first."""

    def retry(self, letter: DeadLetter) -> int:
        """Make dead rows live again, ready for the stage that lost them, with all deliveries. Returns rows.

        Raises:
            UsageError: a lease still names the rows, or the table is full.
        """

    def drop(self, letter: DeadLetter) -> int:
        """Let go of dead rows; they stay counted as dead. Returns rows."""

    def lineage(self, table: str, ranges: Sequence[RowRange]) -> list[Written]:
        """Who wrote the columns of held rows, oldest first."""

    def leases(self, table: str) -> list[Lease]:
        """Live leases."""

    def verify(self, table: str) -> list[str]:
        """Every broken invariant between the counters, the chunks, the leases and the payload;

        empty when all hold.
        """

    def counts(self, table: str) -> TableCounts:
        """The table's counters."""

    def waiting(self) -> list[Waiting]:
        """Everybody who waits on this store now."""

    def expire(self) -> int:
        """Return rows of expired leases to their stages (`Redis TIME` decides); also done by every claim."""

    def close(self) -> None:
        """Close the connections, after the answer to what was posted."""
