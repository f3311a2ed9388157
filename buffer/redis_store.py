"""The experience store on a Redis-compatible server.

State changes are Redis functions (`functions/*.lua`), one round trip each; payload goes beside them with SET
in the same transaction and never passes through a function. See `store.py` for the semantics.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import redis

from rlmq.buffer import payload
from rlmq.buffer.connection import RETRY_S, Argument, Link, as_client
from rlmq.buffer.keys import checked_name, payload_key, table_prefix
from rlmq.buffer.layout import Layout
from rlmq.buffer.reading import fetch, locate, subset
from rlmq.buffer.store import (
    END_STATES,
    Claim,
    EndState,
    ExperienceStore,
    Interest,
    RowRange,
    Table,
    TableCounts,
    Waiting,
)
from rlmq.buffer.waiting import Waiter
from rlmq.common.errors import DeadlineExceeded, Fenced, IntegrityError, SchemaMismatch, UsageError

_LABEL_CHARS = 80  # of a reason, in the name of a counter
_REASON_CHARS = 4000  # of a reason, kept with its rows
_MEMORY_PAUSE_S = 0.2


class RedisStore(ExperienceStore):
    """Tables of one run, for one worker.

    Args:
        client_or_url: a `redis.Redis` that returns bytes, or a URL.
        run_id: part of every key.
        worker: who waits and who holds leases, for `waiting` and for the reasons of dead rows.
        put_timeout_s: how long `put` and `write` wait for room.
        retry_s: how long a lost server is waited for.
    """

    def __init__(
        self,
        client_or_url: redis.Redis | str,
        *,
        run_id: str,
        worker: str,
        put_timeout_s: float = 600,
        retry_s: float = RETRY_S,
    ) -> None:
        self._run_id = run_id
        self._worker = checked_name("worker", worker)
        self._put_timeout_s = put_timeout_s
        self._owns_client = isinstance(client_or_url, str)
        self._client = as_client(client_or_url, retry_s)
        self._link = Link(self._client, retry_s=retry_s)
        self._nonce = secrets.token_hex(6)
        self._serial = itertools.count(1)
        self._row_waiter = Waiter(self._client, self._link, worker, f"{worker}.{self._nonce}.rows")
        self._room_waiter = Waiter(self._client, self._link, worker, f"{worker}.{self._nonce}.room")
        self._layouts: dict[str, Layout] = {}
        self._prefixes: dict[str, str] = {}
        self._finished: dict[str, None] = {}  # leases that `finish` ended, newest last

    # -- tables ----------------------------------------------------------------------------------------------

    def open(self, tables: Sequence[Table]) -> None:
        """Create the tables, or check that the existing ones are the same; see `ExperienceStore.open`."""
        for table in tables:
            layout = Layout(table)
            prefix = table_prefix(self._run_id, table.name)
            reply = self._link.call(
                "open", prefix, layout.version, layout.config, layout.schema_fingerprint, layout.shape_fingerprint
            )
            if reply[0] != "ok":
                kind, ours = ("schema", layout.schema_fingerprint)
                if reply[0] == "shape":
                    kind, ours = ("stages (names, needs, scopes)", layout.shape_fingerprint)
                raise SchemaMismatch(
                    f"{kind} of table '{table.name}' in run '{self._run_id}'",
                    got=f"fingerprint {ours} here",
                    expected=f"{reply[1].decode()} as in the server",
                    remedy="Start every process of the run from the same recipe and version, or start a new run",
                )
            self._layouts[table.name] = layout
            self._prefixes[table.name] = prefix

    def recover(self) -> int:
        """Give back the rows that earlier processes of this worker's name hold, in every open table.

        A restarted worker need not wait for the lease of the process that died. A process of that name that
        lives on is fenced. Counted as a delivery, so that a row that kills its worker still ends as dead.

        Returns:
            Leases that were given back.
        """
        args = (self._worker, self._nonce)
        return sum(int(self._link.call("recover", prefix, *args)[1]) for prefix in self._prefixes.values())

    def _layout(self, table: str) -> tuple[Layout, str]:
        if table not in self._layouts:
            raise UsageError("table", got=repr(table), expected=f"one that was opened: {sorted(self._layouts)}")
        return self._layouts[table], self._prefixes[table]

    # -- adding rows -----------------------------------------------------------------------------------------

    def put(self, table: str, rows: pa.RecordBatch, *, producer: str, sequence: int, group_size: int) -> bool:
        """Add one chunk of whole groups; see `ExperienceStore.put`."""
        layout, prefix = self._layout(table)
        layout.checked(rows, prefix=True)
        self._check_chunk(layout, rows, producer, sequence, group_size)
        chunk = f"{producer}.{sequence}"
        pieces = payload.cut(layout, rows, [RowRange(chunk, 0, rows.num_rows)], self._tag())
        end = time.monotonic() + self._put_timeout_s
        while True:
            reply = self._send("put", prefix, [producer, sequence, chunk, rows.num_rows, group_size], pieces, end)
            if reply[0] != "full":
                return bool(reply[0] == "ok")
            left_s = end - time.monotonic()
            room = {prefix: (0, rows.num_rows, 0)}
            if left_s <= 0 or not self._room_waiter.wait(room, timeout_s=left_s):
                raise self._still_full(table, rows.num_rows, reply)

    def _check_chunk(
        self, layout: Layout, rows: pa.RecordBatch, producer: str, sequence: int, group_size: int
    ) -> None:
        checked_name("producer", producer)
        subject = f"put into table '{layout.table.name}'"
        if rows.num_rows < 1 or group_size < 1 or rows.num_rows % group_size:
            raise UsageError(subject, got=f"{rows.num_rows} rows", expected=f"whole groups of {group_size}")
        if not 0 <= sequence < 2**53:
            raise UsageError(f"sequence of {subject}", got=sequence, expected="0 to 2**53 - 1")
        if rows.num_rows > layout.table.capacity_rows:
            expected = f"at most the capacity of {layout.table.capacity_rows}"
            raise UsageError(subject, got=f"a chunk of {rows.num_rows} rows", expected=expected)

    def _still_full(self, table: str, rows: int, reply: list[Any]) -> DeadlineExceeded:
        _, live, capacity, stage, todo = reply
        name = stage.decode()
        return DeadlineExceeded(
            f"put into table '{table}'",
            got=f"{live} of {capacity} rows live after {self._put_timeout_s:g} s",
            expected=f"room for {rows}",
            remedy=f"Stage '{name}' must drain ({todo} rows ready or leased): look at its workers",
        )

    def _tag(self) -> str:
        return f"{self._nonce}{next(self._serial)}"

    def _send(
        self, verb: str, prefix: str, head: list[Argument], pieces: Sequence[payload.OutgoingPiece], end: float
    ) -> list[Any]:
        """A function with its payload; a server at its memory limit is full, not broken: try until `end`."""
        args: list[Argument] = list(head)
        for piece in pieces:
            args += [piece.first, piece.count, piece.unit, piece.columns, len(piece.data), piece.name]
        sets = [(payload_key(prefix, piece.name), piece.data) for piece in pieces]
        while True:
            try:
                return self._link.call(verb, prefix, *args, payload=sets)
            except redis.OutOfMemoryError as error:
                if time.monotonic() + _MEMORY_PAUSE_S > end:
                    raise DeadlineExceeded(
                        f"{verb} under {prefix}*",
                        got=f"a Redis server at its maxmemory for {self._put_timeout_s:g} s",
                        expected="consumers that free rows",
                        remedy="Raise maxmemory, or look at the stages that do not drain",
                    ) from error
                time.sleep(_MEMORY_PAUSE_S)

    # -- claims ----------------------------------------------------------------------------------------------

    def claim(
        self, table: str, stage: str, *, max_rows: int, min_rows: int = 1, columns: Sequence[str] | None = None
    ) -> Claim | None:
        """Lease ready rows; see `ExperienceStore.claim`.

        Raises:
            UsageError: the first group has more than `max_rows` rows. DecodeError: damaged payload; its rows are
            redelivered, and end as dead.
        """
        layout, prefix = self._layout(table)
        index, schema = layout.stage_index(stage), layout.select(columns)
        if not 1 <= min_rows <= max_rows:
            raise UsageError(
                "claim", got=f"min_rows {min_rows}, max_rows {max_rows}", expected="1 ≤ min_rows ≤ max_rows"
            )
        if layout.stage(stage).scope == "batch":
            min_rows = max_rows
        units = layout.units_of(schema)
        reply = self._link.call("claim", prefix, index, self._tag(), self._worker, max_rows, min_rows, *units)
        if reply[0] == "none":
            return None
        if reply[0] == "large":
            expected = f"at least its group size of {reply[1]}"
            raise UsageError(f"claim of stage '{stage}'", got=f"max_rows {max_rows}", expected=expected)
        _, lease, flat, located = reply
        ranges = tuple(
            RowRange(flat[k].decode(), int(flat[k + 1]), int(flat[k + 2]), int(flat[k + 3]))
            for k in range(0, len(flat), 4)
        )
        where = dict(payload.parse_whereabouts(layout, units, one) for one in located)
        try:
            rows = fetch(self._link, layout, prefix, ranges, schema, where)
        except IntegrityError as error:  # rows with damaged payload end as dead and do not stay leased
            no_rows = pa.RecordBatch.from_pylist([], schema=schema)
            self.nack(Claim(table, stage, lease.decode(), ranges, no_rows), str(error))
            raise
        return Claim(table, stage, lease.decode(), ranges, rows)

    def read(self, table: str, ranges: Sequence[RowRange], columns: Sequence[str]) -> pa.RecordBatch:
        """Columns of held rows; see `ExperienceStore.read`.

        Raises:
            IntegrityError: a chunk is not held (any more), or is shorter than its range.
        """
        layout, prefix = self._layout(table)
        schema = layout.select(columns)
        where = locate(self._link, layout, prefix, ranges, schema)
        for one in ranges:
            if where[one.chunk].rows < one.first + one.count or one.first < 0 or one.count < 1:
                got = f"rows {one.first} to {one.first + one.count - 1}"
                expected = f"rows of the {where[one.chunk].rows} held"
                raise IntegrityError(f"chunk '{one.chunk}' of table '{table}'", got=got, expected=expected)
        return fetch(self._link, layout, prefix, ranges, schema, where)

    def extend(self, claim: Claim) -> None:
        """Renew the lease; see `ExperienceStore.extend`."""
        _, prefix = self._layout(claim.table)
        self._checked(claim, self._link.call("extend", prefix, claim.lease))

    def write(self, claim: Claim, columns: pa.RecordBatch, *, ack: bool = False) -> None:
        """Add columns to the claimed rows; see `ExperienceStore.write`."""
        layout, prefix = self._layout(claim.table)
        layout.checked(columns, prefix=False)
        if columns.num_rows != claim.count:
            subject = f"columns written to table '{claim.table}'"
            raise SchemaMismatch(subject, got=f"{columns.num_rows} rows", expected=f"the claim's {claim.count}")
        pieces = payload.cut(layout, columns, claim.ranges, self._tag())
        head: list[Argument] = [self._nonce, next(self._serial), claim.lease, int(ack)]
        self._checked(claim, self._send("write", prefix, head, pieces, time.monotonic() + self._put_timeout_s))

    def ack(self, claim: Claim) -> None:
        """This stage is done with the rows; see `ExperienceStore.ack`."""
        self._end(claim, "ack")

    def nack(self, claim: Claim, reason: str) -> None:
        """Redeliver and count; see `ExperienceStore.nack`."""
        self._end(claim, "give_back", 1, _label("dead", reason), _clean(reason)[:_REASON_CHARS])

    def release(self, claim: Claim) -> None:
        """Give the rows back unworked; see `ExperienceStore.release`."""
        self._end(claim, "give_back", 0, "", "")

    def finish(
        self, claim: Claim, state: EndState, reason: str = "", *, rows: Sequence[int] | None = None, step: int = -1
    ) -> None:
        """Give claimed rows their end state; see `ExperienceStore.finish`.

        A claim whose rows all have theirs is over: a later `ack` of it does nothing.
        """
        if state not in END_STATES or (state == "trained" and step < 0):
            expected = f"one of {END_STATES}, `trained` with its step"
            raise UsageError("finish", got=f"state {state!r}, step {step}", expected=expected)
        ranges: list[Argument] = []
        if rows is not None:
            if not rows:
                return
            for one in subset(claim, rows):
                ranges += [one.chunk, one.first, one.count]
        args = (state, _label(state, reason), _clean(reason)[:_REASON_CHARS], step, *ranges)
        reply = self._end(claim, "finish", *args)
        if reply is not None and len(reply) > 1 and reply[1] == 1:
            self._finished[claim.lease] = None
            if len(self._finished) > 1000:
                del self._finished[next(iter(self._finished))]

    def _end(self, claim: Claim, verb: str, *args: Argument) -> list[Any] | None:
        if claim.lease in self._finished:
            return None
        _, prefix = self._layout(claim.table)
        return self._checked(
            claim, self._link.call(verb, prefix, self._nonce, next(self._serial), claim.lease, *args)
        )

    def _checked(self, claim: Claim, reply: list[Any]) -> list[Any]:
        if reply[0] == "fenced":
            raise Fenced(
                f"lease {claim.lease} of stage '{claim.stage}' in table '{claim.table}'",
                got="a lease that ended or expired",
                expected="a live one",
                remedy="Drop this work: its rows belong to somebody else now",
            )
        return reply

    def finish_logged(self, table: str, stage: str, ranges: Sequence[RowRange], *, step: int) -> None:
        """Redo of a batch-log entry; see `ExperienceStore.finish_logged`.

        Raises:
            IntegrityError: a row of the entry ended otherwise.
        """
        layout, prefix = self._layout(table)
        args: list[Argument] = []
        for one in ranges:
            producer, _, sequence = one.chunk.rpartition(".")
            args += [one.chunk, producer, sequence, one.first, one.count]
        reply = self._link.call("finish_logged", prefix, layout.stage_index(stage), step, *args)
        if reply[0] == "conflict":
            raise IntegrityError(
                f"chunk '{reply[1].decode()}' of table '{table}'",
                got=f"rows of logged step {step} that ended without being trained",
                expected="the batch log and the store to agree",
            )

    def advance(self, durable_step: int) -> None:
        """A checkpoint covers this step, in every open table; see `ExperienceStore.advance`."""
        for prefix in self._prefixes.values():
            while self._link.call("advance", prefix, durable_step)[1] > 0:
                pass

    def expire(self) -> int:
        """Return rows of expired leases; see `ExperienceStore.expire`. Returns the number of leases."""
        total = 0
        for prefix in self._prefixes.values():
            while leases := self._link.call("expire", prefix)[1]:
                total += leases
        return total

    # -- looking and waiting ---------------------------------------------------------------------------------

    def wait(self, interests: Sequence[Interest], *, timeout_s: float, wake_fd: int | None = None) -> bool:
        """Sleep until an interest may be met; see `ExperienceStore.wait`."""
        wanted: dict[str, list[int]] = {}
        for one in interests:
            layout, prefix = self._layout(one.table)
            wanted.setdefault(prefix, []).extend((layout.stage_index(one.stage), one.rows, int(one.or_settled)))
        return self._row_waiter.wait(wanted, timeout_s=timeout_s, wake_fd=wake_fd)

    def counts(self, table: str) -> TableCounts:
        """The table's counters; see `ExperienceStore.counts`."""
        layout, prefix = self._layout(table)
        _, state, ended = self._link.call("counts", prefix)
        fields = {state[k].decode(): state[k + 1] for k in range(0, len(state), 2)}

        def by_stage(letter: str) -> dict[str, int]:
            stages = enumerate(layout.table.stages, start=1)
            return {stage.name: int(fields.get(f"{letter}{i}", 0)) for i, stage in stages}

        return TableCounts(
            admitted=int(fields.get("admitted", 0)),
            live=int(fields.get("live", 0)),
            payload_bytes=int(fields.get("bytes", 0)),
            ready=by_stage("r"),
            leased=by_stage("l"),
            acked=by_stage("a"),
            ended={ended[k].decode(): int(ended[k + 1]) for k in range(0, len(ended), 2)},
            redelivered=int(fields.get("redelivered", 0)),
        )

    def waiting(self) -> list[Waiting]:
        """Everybody who waits on the open tables; `since_s` is how long already."""
        lines: list[Waiting] = []
        for name, prefix in self._prefixes.items():
            counts = self.counts(name)
            stages = ["", *(stage.name for stage in self._layouts[name].table.stages)]
            for _, worker, waited_ms, _, *interests in self._link.call("waiting", prefix)[1]:
                for k in range(0, len(interests), 3):
                    index, rows, settled = interests[k : k + 3]
                    what = f"{rows} ready rows" + (", or none left to come" if settled else "")
                    what = what if index else f"room for {rows} rows"
                    lines.append(Waiting(worker.decode(), name, stages[index], what, waited_ms / 1000, counts))
        return lines

    def close(self) -> None:
        """Close the connections (not those of a client that was given)."""
        self._link.attempt([("forget", prefix, self._nonce) for prefix in self._prefixes.values()])
        self._row_waiter.close()
        self._room_waiter.close()
        self._link.close()
        if self._owns_client:
            self._client.close()


def _clean(text: str) -> str:
    """Without the characters that separate fields in a chunk's record."""
    return text.replace("\x1e", " ").replace("\x1f", " ")


def _label(state: str, reason: str) -> str:
    """Name of the counter: the state, with the first line of the reason."""
    first = _clean(reason).strip().split("\n", 1)[0][:_LABEL_CHARS]
    return f"{state}({first})" if first else state
