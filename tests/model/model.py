"""What the buffer promises, in plain objects: rows, their place in each stage, leases.

Written from `buffer/store.py`, row by row: no ranges, no vectors, and every figure is counted anew from the rows.
What depends on moments (leases that run out, groups that are overdue) happens when the caller says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import floor, inf

from rlmq.buffer.store import Facts, Stage, Table

NEAR_S = 0.0025  # moments of two processes that lie closer than this cannot be told apart


@dataclass
class Place:
    """Where a row is in one stage: `waiting`, `ready`, `leased` (by `lease`), or `past`."""

    state: str = "waiting"
    deliveries: int = 0
    lease: str = ""
    skipped: bool = False  # past, because the row ended before the stage was done with it


@dataclass(eq=False)
class Row:
    """One sample. `end` is (state, reason); `step` that of its last use; `buried` while it is a dead letter."""

    chunk: Chunk
    index: int
    values: dict[str, int]
    places: dict[str, Place]
    version: int | None = None
    tokens: int = 0
    end: tuple[str, str] | None = None
    lost_by: str = ""  # the stage that ended it
    died: tuple[float, float] = (0.0, 0.0)
    buried: bool = False
    rate: float = 1.0
    step: int = -1
    uses: int = 0

    @property
    def group(self) -> int:
        return self.index // self.chunk.group_size

    def __repr__(self) -> str:
        return f"{self.chunk.name}[{self.index}]"


@dataclass(eq=False)
class Chunk:
    """What one put brought; `freed` once nobody needs any of its rows."""

    name: str
    ordinal: int
    group_size: int
    rows: list[Row] = field(default_factory=list)
    freed: bool = False


@dataclass(eq=False)
class Lease:
    """Rows that one claim brought, those that have left it since included."""

    name: str
    stage: str
    worker: str
    rows: list[Row]


class Model:
    """A table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.stages = {stage.name: stage for stage in table.stages}
        self.chunks: list[Chunk] = []
        self.rows: list[Row] = []
        self.leases: dict[str, Lease] = {}
        self.ended: Counter[str] = Counter()
        self.consumed: Counter[str] = Counter()  # rows that a stage took and did not give back
        self.redelivered = self.uses = self.fenced = self.version = self.closed = 0
        self.durable = -1
        self.logged: dict[str, list[tuple[int, int, str, int]]] = {}  # log entries of chunks that are still to come
        self.overdue = False  # whatever is ready has been so for longer than max_wait_s
        self.now = (0.0, 0.0)  # the call that is modelled ran between these moments

    # -- looking ---------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Row]:
        return [row for row in self.rows if row.end is None]

    @property
    def ordinary(self) -> list[Stage]:
        return [stage for stage in self.stages.values() if not stage.ended]

    def at(self, stage: str, state: str) -> list[Row]:
        return [row for row in self.rows if row.places[stage].state == state]

    def mine(self, lease: str) -> list[Row]:
        """Rows that the lease still holds."""
        held = self.leases[lease]
        return [row for row in held.rows if row.places[held.stage].lease == lease]

    def named(self, rows: Sequence[Row]) -> bool:
        """Whether a live lease had one of the rows."""
        return any(row in one.rows for one in self.leases.values() for row in rows)

    def unit(self, row: Row, stage: Stage) -> list[Row]:
        """Rows that the stage never splits from `row`."""
        if stage.scope == "chunk":
            return row.chunk.rows
        drawn = stage.selector in ("uniform", "prioritized")
        if stage.scope == "group" or (stage.scope == "batch" and drawn):
            return [other for other in row.chunk.rows if other.group == row.group]
        return [row]

    def ready_units(self, stage: Stage) -> list[list[Row]]:
        """Ready units in the order of `fifo` or `fresh_first`."""
        units: list[list[Row]] = []
        seen: set[int] = set()
        for chunk in reversed(self.chunks) if stage.selector == "fresh_first" else self.chunks:
            for row in chunk.rows:
                if row.places[stage.name].state == "ready" and id(row) not in seen:
                    unit = [r for r in self.unit(row, stage) if r.places[stage.name].state == "ready"]
                    seen.update(map(id, unit))
                    units.append(unit)
        return units

    def waits(self, row: Row, stage: Stage) -> bool:
        """Whether the row lives and still misses a column."""
        waiting = row.end is None and row.places[stage.name].state == "waiting"
        return waiting and not set(stage.needs) <= set(row.values)

    def held(self, row: Row) -> bool:
        """Whether somebody may still want the row's payload."""
        recorded = all(row.places[s.name].state == "past" for s in self.stages.values() if s.ended)
        durable = row.end is not None and (row.end[0] != "trained" or row.step <= self.durable)
        return not (durable and recorded and not row.buried)

    def buried(self) -> list[Row]:
        return [row for row in self.rows if row.buried]

    def stale_units(self, stage: Stage, version: int | None) -> list[tuple[list[Row], int]]:
        """Units with a ready row that is too old for the trainer's version, and how old it is."""
        units = []
        for unit in self.ready_units(stage) if stage.max_staleness is not None and version is not None else []:
            age = max(version - row.version if row.version is not None else 0 for row in unit)
            if age > stage.max_staleness:
                units.append((self.unit(unit[0], stage), age))
        return units

    # -- limits ----------------------------------------------------------------------------------------------

    def refusal(self, rows: int) -> str | None:
        """The limit that a put of so many rows would pass; bytes are not modelled."""
        if len(self.live) + rows > self.table.capacity_rows:
            return "capacity_rows"
        admitted, window = len(self.rows) + rows, self.table.window
        dropped = sum(row.end is not None and row.end[0] != "trained" for row in self.rows)
        if window and admitted - dropped > window.rows_per_version * (self.version + 1 + window.versions):
            return "window"
        for stage in self.ordinary:
            if stage.samples_per_insert is not None:
                diff = admitted * stage.samples_per_insert - self.consumed[stage.name]
                if diff > stage.min_size * stage.samples_per_insert + stage.error_buffer:
                    return "samples_per_insert"
        return None

    def allowance(self, stage: Stage) -> float:
        """Rows that the stage's rate limiter lets it take."""
        if stage.samples_per_insert is None:
            return inf
        diff = len(self.rows) * stage.samples_per_insert - self.consumed[stage.name]
        return floor(diff - stage.min_size * stage.samples_per_insert + stage.error_buffer)

    def flushed(self, stage: Stage) -> bool:
        """Whether `min_batch` is waived."""
        closed = [row for chunk in self.chunks if chunk.ordinal <= self.closed for row in chunk.rows]
        missing = any(row.end is None and row.places[stage.name].state == "waiting" for row in closed)
        ready = any(row.places[stage.name].state == "ready" for row in closed)
        return (ready and not missing) or (self.overdue and bool(self.at(stage.name, "ready")))

    # -- transitions -----------------------------------------------------------------------------------------

    def put(self, name: str, group_size: int, columns: dict[str, list[int]], facts: Facts) -> None:
        chunk = Chunk(name, len(self.chunks) + 1, group_size)
        for k in range(len(next(iter(columns.values())))):
            values = {column: values[k] for column, values in columns.items()}
            tokens = facts.tokens[k] if facts.tokens is not None else 0
            chunk.rows.append(Row(chunk, k, values, {s: Place() for s in self.stages}, facts.version, tokens))
        self.chunks.append(chunk)
        self.rows += chunk.rows
        self.settle()
        for index, use, stage, step in self.logged.pop(name, []):
            self.finish_logged([(chunk.rows[index], use)], stage, step)

    def add_stage(self, stage: Stage) -> None:
        self.stages[stage.name] = stage
        for row in self.rows:
            row.places[stage.name] = Place("waiting") if row.end is None else Place("past", skipped=True)
        self.settle()

    def settle(self) -> None:
        """Make ready what is complete; free chunks that nobody needs."""
        for stage in self.ordinary:
            for row in self.live:
                if row.places[stage.name].state == "waiting" and not any(
                    self.waits(other, stage) for other in self.unit(row, stage)
                ):
                    self.make_ready(row, stage.name)
        for chunk in self.chunks:
            chunk.freed = chunk.freed or not any(map(self.held, chunk.rows))

    def make_ready(self, row: Row, stage: str, *, deliveries: int = 0) -> None:
        row.places[stage] = Place("ready", deliveries)

    def lease(self, name: str, stage: str, worker: str, rows: list[Row]) -> None:
        for row in rows:
            row.places[stage] = Place("leased", row.places[stage].deliveries + 1, name)
        self.consumed[stage] += len(rows)
        self.leases[name] = Lease(name, stage, worker, rows)

    def write(self, lease: str, columns: dict[str, list[int]], version: int | None) -> None:
        for k, row in enumerate(self.leases[lease].rows):
            if row.chunk.freed:
                continue
            row.values.update({column: values[k] for column, values in columns.items()})
            if version is not None:
                row.version = version if row.version is None else min(row.version, version)
        self.settle()

    def end(self, row: Row, state: str, reason: str = "", step: int = -1, stage: str = "") -> None:
        """The row ends; one that was trained on before ends as trained whatever ends it."""
        if row.end is not None:
            return
        if row.uses > 0:
            state, row.step = "trained", max(row.step, step)
        row.end, row.lost_by, row.died = (state, reason), stage, self.now
        row.buried = state == "dead" and self.table.max_dead_rows > 0
        self.ended[self.label(row)] += 1
        for name, one in self.stages.items():
            if one.ended:
                self.make_ready(row, name)
            elif row.places[name].state != "past":
                row.places[name] = Place("past", skipped=name != stage or state == "dead")

    def label(self, row: Row) -> str:
        """The counter under which the row ended."""
        assert row.end is not None
        state, reason = row.end
        if state == "trained":
            return state if self.table.max_uses == 1 else f"trained({row.uses})"
        first = reason.strip().split("\n", 1)[0]
        return f"{state}({first})" if first else state

    def pass_by(self, rows: Iterable[Row], stage: Stage) -> None:
        """The stage is done with the rows; those that every ordinary stage is done with end as `done`."""
        for row in rows:
            row.places[stage.name] = Place("past")
            if not stage.ended and all(row.places[s.name].state == "past" for s in self.ordinary):
                self.end(row, "done")

    def ack(self, lease: str) -> None:
        rows, stage = self.mine(lease), self.stages[self.leases.pop(lease).stage]
        self.pass_by(rows, stage)
        self.settle()

    def give_back(self, lease: str, *, counted: bool, reason: str = "") -> None:
        rows, stage = self.mine(lease), self.stages[self.leases.pop(lease).stage]
        for row in rows:
            deliveries = row.places[stage.name].deliveries
            if counted and not stage.ended and deliveries >= stage.max_deliveries:
                self.end(row, "dead", reason, stage=stage.name)
                continue
            self.make_ready(row, stage.name, deliveries=deliveries - (not counted))
            self.redelivered += counted
            self.consumed[stage.name] -= 1
        self.settle()

    def finish(self, lease: str, rows: Sequence[Row], state: str, reason: str, step: int) -> None:
        stage, mine = self.stages[self.leases[lease].stage], self.mine(lease)
        for row in [row for row in rows if row in mine]:
            if stage.ended:
                self.pass_by([row], stage)
            elif state == "trained":
                self.train(row, stage.name, step)
            else:
                self.end(row, state, reason, step, stage.name)
        if not self.mine(lease):
            del self.leases[lease]
        self.settle()

    def train(self, row: Row, stage: str, step: int) -> None:
        """One use of the row."""
        row.uses, row.step = row.uses + 1, max(row.step, step)
        self.uses += 1
        if row.uses >= self.table.max_uses:
            self.end(row, "trained", step=step, stage=stage)
        elif row.places[stage].state == "leased":
            self.make_ready(row, stage)

    def finish_logged(self, rows: Sequence[tuple[Row, int]], stage: str, step: int) -> None:
        """Redo: with uses left, whoever holds the rows for this stage has lost its lease."""
        again = [row for row, use in rows if row.end is None and row.uses <= use]
        lost = {row.places[stage].lease for row in again} if self.table.max_uses > 1 else set()
        for row in again:
            self.train(row, stage, step)
        for lease in lost - {""}:
            self.give_back(lease, counted=True, reason="worker ended")
        self.settle()

    def advance(self, step: int) -> None:
        self.durable = max(self.durable, step)
        self.settle()

    def waiting_groups(self) -> list[tuple[Stage, list[Row], list[Row]]]:
        """Groups that a deadline runs for: stage, complete members, missing ones."""
        groups = []
        for stage in [stage for stage in self.ordinary if stage.group_deadline_s is not None]:
            waiting = [row for row in self.live if row.places[stage.name].state == "waiting"]
            for unit in {id(unit[0]): unit for unit in (self.unit(row, stage) for row in waiting)}.values():
                missing = [row for row in unit if self.waits(row, stage)]
                complete = [row for row in unit if row in waiting and row not in missing]
                if missing and complete:
                    groups.append((stage, complete, missing))
        return groups

    def pass_group_deadlines(self) -> None:
        """Every group that waits for members has waited too long."""
        for stage, complete, missing in self.waiting_groups():
            for lost in self.unit(missing[0], stage) if len(complete) < stage.group_min else missing:
                self.end(lost, "dead", "group deadline")
        self.settle()

    def retry(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.ended[self.label(row)] -= 1
            row.end, row.buried = None, False
            for name, stage in self.stages.items():
                if stage.ended or row.places[name].skipped:
                    row.places[name] = Place()
        self.settle()

    def drop(self, rows: Iterable[Row]) -> None:
        for row in rows:
            row.buried = False
        self.settle()
