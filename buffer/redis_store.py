"""The experience store on a Redis-compatible server.

State changes are Redis functions (`functions/*.lua`), one round trip each; payload goes beside them with SET
in the same transaction and never passes through a function. See `store.py` for the semantics.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import redis

from rlmq.buffer import payload, verifying
from rlmq.buffer.connection import RETRY_S, Argument, Link, Payload, as_client
from rlmq.buffer.keys import TABLE_SUFFIXES, checked_name, table_prefix
from rlmq.buffer.layout import Layout, Selection
from rlmq.buffer.memory import Memory
from rlmq.buffer.reading import Reader, subset
from rlmq.buffer.store import (
    END_STATES,
    Claim,
    DeadLetter,
    EndState,
    ExperienceStore,
    Facts,
    Interest,
    Lease,
    RowRange,
    Table,
    TableCounts,
    Waiting,
    Written,
)
from rlmq.buffer.waiting import Waiter
from rlmq.common.errors import (
    DeadlineExceeded,
    Fenced,
    IntegrityError,
    RestartRequired,
    SchemaMismatch,
    UsageError,
)

_LABEL_CHARS = 80  # of a reason, in the name of a counter
_REASON_CHARS = 4000  # of a reason, kept with its rows
_TAG_CHARS = 200
_ADOPTED_AT_ONCE = 128
_POSTED_BYTES = 64 * 1024  # what is kept until its answer comes
_NO_FACTS = Facts()
# Fields of the functions' state (functions/table.lua): of the table, and per stage.
_FIELDS, _STAGE_FIELDS = 16, 7
_ADMITTED, _ENDED, _BYTES, _DURABLE, _REDELIVERED, _FENCED, _USES, _TRAINER, _DEAD = 1, 2, 4, 6, 7, 8, 9, 12, 14
_READY, _LEASED, _PAST = 0, 1, 2


@dataclass
class _Open:
    """What this client knows of an open table."""

    layout: Layout
    prefix: str
    target: str  # prefix and identity: what functions are called on
    reader: Reader
    put: dict[str, int] = field(default_factory=dict)  # producer to the last sequence that was put here
    slots: list[int] = field(default_factory=list)  # free ones: their leases are over
    used_slots: int = 0
    leases: dict[str, int] = field(default_factory=dict)  # live ones of this client, to their slots
    room: int | None = None  # rows that fitted after the last put

    def new_lease(self, client: str, serial: int) -> str:
        if self.slots:
            slot = self.slots.pop()
        else:
            slot, self.used_slots = self.used_slots, self.used_slots + 1
        lease = f"{client}.{slot}.{serial}"
        self.leases[lease] = slot
        return lease

    def over(self, lease: str) -> None:
        """This client is done with the lease: its slot is free."""
        slot = self.leases.pop(lease, None)
        if slot is not None:
            self.slots.append(slot)


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
        self._memory = Memory(self._link, run_id, put_timeout_s)
        self._serial = itertools.count(1)
        self._name = secrets.token_hex(5)  # part of leases and payload names; a counter could come back older
        self._row_waiter = Waiter(self._client, self._link, worker, f"{worker}.{self._name}.rows")
        self._room_waiter = Waiter(self._client, self._link, worker, f"{worker}.{self._name}.room")
        self._tables: dict[str, _Open] = {}
        self._late: deque[Callable[[], object]] = deque()  # of posted calls that failed: raises, or tries again
        self._finished: dict[str, None] = {}  # leases that `finish` ended, newest last

    # -- tables ----------------------------------------------------------------------------------------------

    def open(self, tables: Sequence[Table]) -> None:
        """Create the tables, or check that the existing ones are the same; see `ExperienceStore.open`."""
        for table in tables:
            layout = Layout(table)
            prefix = table_prefix(self._run_id, table.name)
            number = secrets.randbits(52)
            head = (layout.schema_fingerprint, number, self._name, self._worker)
            reply = self._link.call("open", prefix, *head, *layout.blobs)
            if reply[0] == "schema":
                raise self._other_schema(layout, reply[1])
            if reply[0] == "shape":
                theirs = Layout.stored(table.name, self._link.call("attach", prefix)[1])
                raise SchemaMismatch(
                    f"stage '{reply[1].decode()}' of table '{table.name}' (needs, scope, selector)",
                    got=f"fingerprint {layout.shape_fingerprint} here",
                    expected=f"{theirs.shape_fingerprint} as in the server",
                    remedy="Start every process of the run from the same recipe and version, or start a new run",
                )
            _, blobs, added = reply
            self._tables[table.name] = self._opened(Layout.stored(table.name, blobs), prefix)
            if added:
                self._adopt(prefix)

    def attach(self, names: Sequence[str]) -> list[Table]:
        """Open existing tables to look at them, as the server has them; nothing is changed.

        Returns:
            The tables, in the order of `names`.

        Raises:
            IntegrityError: the server has no such table.
        """
        for name in names:
            prefix = table_prefix(self._run_id, name)
            layout = Layout.stored(name, self._link.call("attach", prefix)[1])
            self._tables[name] = self._opened(layout, prefix)
        return [self._tables[name].layout.table for name in names]

    def _opened(self, layout: Layout, prefix: str) -> _Open:
        target = f"{prefix} {prefix}{layout.identity}"
        return _Open(layout, prefix, target, Reader(self._link, prefix, target, layout))

    def _adopt(self, prefix: str) -> None:
        """Show live rows to stages that were added after them."""
        chunks = self._names(prefix, "chunk")
        while some := list(itertools.islice(chunks, _ADOPTED_AT_ONCE)):
            self._link.call("adopt", prefix, *some)

    def _names(self, prefix: str, kind: str) -> Iterable[str]:
        start = prefix + TABLE_SUFFIXES[kind]
        pattern = start.replace("[", "\\[").replace("?", "\\?").replace("*", "\\*") + "*"
        for key in self._client.scan_iter(match=pattern, count=1000):
            yield key.decode()[len(start) :]

    def _other_schema(self, layout: Layout, theirs: bytes) -> SchemaMismatch:
        return SchemaMismatch(
            f"schema of table '{layout.table.name}' in run '{self._run_id}'",
            got=f"fingerprint {layout.schema_fingerprint} here",
            expected=f"{theirs.decode()} as in the server",
            remedy="Start every process of the run from the same recipe and version, or start a new run",
        )

    def recover(self) -> int:
        """Give back the rows that earlier processes of this worker's name hold, in every open table.

        A restarted worker need not wait for the lease of the process that died. A process of that name that
        lives on is fenced. Counted as a delivery, so that a row that kills its worker still ends as dead.

        Returns:
            Leases that were given back.
        """
        who = (self._worker, self._name)
        return sum(int(self._link.call("recover", one.target, *who)[1]) for one in self._tables.values())

    def _open(self, table: str) -> _Open:
        if self._late:
            self._late.popleft()()
        found = self._tables.get(table)
        if found is None:
            raise UsageError("table", got=repr(table), expected=f"one that was opened: {sorted(self._tables)}")
        return found

    # -- adding rows -----------------------------------------------------------------------------------------

    def put(
        self,
        table: str,
        rows: pa.RecordBatch,
        *,
        producer: str,
        sequence: int,
        group_size: int,
        facts: Facts = _NO_FACTS,
        closes: bool = False,
    ) -> bool:
        """Add one chunk of whole groups; see `ExperienceStore.put`."""
        one = self._open(table)
        layout = one.layout
        parts = layout.checked(rows, prefix=True)
        self._check_chunk(one, rows, producer, sequence, group_size)
        chunk, count = f"{producer}.{sequence}", rows.num_rows
        sent = payload.cut(layout, one.prefix, rows, parts, {chunk: [(0, count, 0)]}, self._tag())
        previous, order = one.put.get(producer, ""), str(sequence)
        head = (layout.schema_fingerprint, producer, order, str(previous), chunk, count, group_size, int(closes))
        told = _told(facts, count, table)
        start = time.monotonic()
        end = start + self._put_timeout_s
        if one.room is not None and one.room < count:  # do not send what is not likely to fit
            self._wait_for_room(one, count, sent.nbytes, self._put_timeout_s)
            start = time.monotonic()
        while True:
            self._memory.reserve(sent.nbytes, start, end)
            reply = self._send("put", one, (*head, *told), sent, end)
            if reply[0] == "ok":
                one.put[producer] = sequence
                one.room = layout.table.capacity_rows - reply[1]
                return True
            if reply[0] == "known":
                if int(reply[1]) == sequence:  # the answer to the first call was lost
                    one.put[producer] = sequence
                return False
            if reply[0] == "schema":
                raise self._other_schema(layout, reply[1])
            if reply[0] == "older":
                raise RestartRequired(
                    f"put of sequence {sequence} by producer '{producer}' into table '{table}'",
                    got=f"a server that knows sequences up to {reply[1].decode()}",
                    expected=f"{previous}, which it acknowledged: it came back older",
                    remedy="Start the producer again: it puts what is missing",
                )
            start = time.monotonic()
            if start >= end or not self._wait_for_room(one, count, sent.nbytes, end - start):
                raise self._still_full(table, count, sent.nbytes, reply)

    def _check_chunk(self, one: _Open, rows: pa.RecordBatch, producer: str, sequence: int, group_size: int) -> None:
        if producer not in one.put:
            checked_name("producer", producer)
        count, table = rows.num_rows, one.layout.table
        if count < 1 or group_size < 1 or count % group_size:
            raise UsageError(_put_into(table), got=f"{count} rows", expected=f"whole groups of {group_size}")
        if not 0 <= sequence < 2**53:
            raise UsageError(f"sequence of {_put_into(table)}", got=sequence, expected="0 to 2**53 - 1")
        if count > table.capacity_rows:
            expected = f"at most the capacity of {table.capacity_rows}"
            raise UsageError(_put_into(table), got=f"a chunk of {count} rows", expected=expected)

    def _wait_for_room(self, one: _Open, rows: int, nbytes: int, timeout_s: float) -> bool:
        return self._room_waiter.wait({one.target: (0, rows, nbytes)}, timeout_s=timeout_s)

    def _still_full(self, table: str, rows: int, nbytes: int, reply: list[Any]) -> DeadlineExceeded:
        limit, value, most, stage, todo = (x.decode() if isinstance(x, bytes) else x for x in reply[1:6])
        return DeadlineExceeded(
            f"put into table '{table}'",
            got=f"{_LIMITS[limit].format(value=float(value), most=float(most))} after {self._put_timeout_s:g} s",
            expected=f"room for {rows} rows of {nbytes} bytes",
            remedy=f"Stage '{stage}' must drain ({todo} rows ready or leased): look at its workers",
        )

    def _tag(self) -> str:
        return f"{self._name}.{next(self._serial)}"

    def _send(
        self, verb: str, one: _Open, head: Sequence[Argument], sent: payload.Outgoing, end: float
    ) -> list[Any]:
        """A function with its payload; a server at its memory limit is full, not broken: try until `end`."""
        while True:
            try:
                return self._link.call(verb, one.target, *head, *sent.arguments, payload=sent.sets)
            except redis.OutOfMemoryError as error:
                self._memory.pause(verb, str(error), end)

    def flush(self, table: str) -> None:
        """The rows put so far are complete; see `ExperienceStore.flush`."""
        self._link.call("flush", self._open(table).target)

    def set_version(self, table: str, version: int) -> None:
        """Tell the trainer's policy version; see `ExperienceStore.set_version`."""
        self._link.call("set_version", self._open(table).target, version)

    # -- claims ----------------------------------------------------------------------------------------------

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
        """Lease ready rows; see `ExperienceStore.claim`.

        Raises:
            UsageError: the first group has more than `max_rows` rows. DecodeError: damaged payload; its rows are
            redelivered, and end as dead.
        """
        one = self._open(table)
        index, selection = one.layout.stage_index(stage), one.layout.select(columns)
        if not 1 <= min_rows <= max_rows:
            raise UsageError(
                "claim", got=f"min_rows {min_rows}, max_rows {max_rows}", expected="1 ≤ min_rows ≤ max_rows"
            )
        if one.layout.stage(stage).scope == "batch":
            min_rows = max_rows
        lease = one.new_lease(self._name, next(self._serial))
        tokens, newest = "" if max_tokens is None else max_tokens, "" if version is None else version
        head = (index, *_parts(lease), self._worker, max_rows, min_rows, tokens, newest)

        then = one.reader.follow if selection.units else None
        if timeout_s > 0:
            reply = self._row_waiter.until(one.target, "claim", head, selection.units, timeout_s, then)
        else:
            reply = self._link.call("claim", one.target, *head, "", 0, 0, *selection.units, then=then)
        if reply[0] == "ok":
            found = self._claimed(one, table, stage, lease, selection, reply)
            if found is not None or timeout_s <= 0:
                return found
            return self.claim(
                table,
                stage,
                max_rows=max_rows,
                min_rows=min_rows,
                columns=columns,
                max_tokens=max_tokens,
                version=version,
                timeout_s=timeout_s,
            )
        one.over(lease)
        if reply[0] == "large":
            expected = f"at least its group size of {reply[1]}"
            raise UsageError(f"claim of stage '{stage}'", got=f"max_rows {max_rows}", expected=expected)
        if timeout_s > 0:
            raise self._nothing(one, stage, min_rows, timeout_s, reply)
        return None

    def _claimed(
        self, one: _Open, table: str, stage: str, lease: str, selection: Selection, reply: list[Any]
    ) -> Claim | None:
        """The rows that a reply leases; None when the server has forgotten the lease since."""
        _, flat, located, *followed = reply
        ranges = tuple([RowRange(flat[k].decode(), *flat[k + 1 : k + 5]) for k in range(0, len(flat), 5)])
        where = dict([payload.parse_whereabouts(selection.units, chunk) for chunk in located])
        try:
            rows = one.reader.fetch(ranges, selection, where, one.reader.followed(*followed))
        except IntegrityError as error:  # rows with damaged payload end as dead and do not stay leased
            no_rows = pa.RecordBatch.from_pylist([], schema=selection.schema)
            try:
                self.nack(Claim(table, stage, lease, ranges, no_rows), str(error))
            except Fenced:  # the server came back older since: it knows neither lease nor payload
                return None
            raise
        return Claim(table, stage, lease, ranges, rows)

    def _nothing(
        self, one: _Open, stage: str, min_rows: int, timeout_s: float, reply: list[Any]
    ) -> DeadlineExceeded:
        table = one.layout.table
        counts = self.counts(table.name)
        needs = one.layout.stage(stage).needs
        by_stage = ", ".join(f"{s.name} {counts.ready[s.name]}+{counts.leased[s.name]}" for s in table.stages)
        return DeadlineExceeded(
            f"claim of stage '{stage}' in table '{table.name}'",
            got=f"{reply[1]} ready rows after {timeout_s:g} s; {reply[2]} more wait for {list(needs) or 'an end'}"
            f" (ready+leased: {by_stage}; {counts.admitted} admitted)",
            expected=f"{min_rows} rows that this stage may take now",
            remedy="Look at the stage that writes these columns: `rlmq why`",
        )

    def read(self, table: str, ranges: Sequence[RowRange], columns: Sequence[str]) -> pa.RecordBatch:
        """Columns of held rows; see `ExperienceStore.read`.

        Raises:
            IntegrityError: a chunk is not held (any more), or is shorter than its range.
        """
        one = self._open(table)
        selection = one.layout.select(columns)
        where = one.reader.locate(ranges, selection.units)
        self._check_held(table, ranges, where)
        return one.reader.fetch(ranges, selection, where)

    def _check_held(self, table: str, ranges: Sequence[RowRange], where: dict[str, payload.Whereabouts]) -> None:
        for one in ranges:
            if where[one.chunk].rows < one.first + one.count or one.first < 0 or one.count < 1:
                got = f"rows {one.first} to {one.first + one.count - 1}"
                expected = f"rows of the {where[one.chunk].rows} held"
                raise IntegrityError(f"chunk '{one.chunk}' of table '{table}'", got=got, expected=expected)

    def extend(self, claim: Claim) -> None:
        """Renew the lease; see `ExperienceStore.extend`."""
        self._checked(claim, self._link.call("extend", self._open(claim.table).target, *_parts(claim.lease), 0))

    def write(
        self,
        claim: Claim,
        columns: pa.RecordBatch,
        *,
        ack: bool = False,
        facts: Facts = _NO_FACTS,
        wait: bool = True,
    ) -> None:
        """Add columns to the claimed rows; see `ExperienceStore.write`."""
        one = self._open(claim.table)
        parts = one.layout.checked(columns, prefix=False)
        to, count = payload.places(claim.ranges)
        if columns.num_rows != count:
            subject = f"columns written to table '{claim.table}'"
            raise SchemaMismatch(subject, got=f"{columns.num_rows} rows", expected=f"the claim's {count}")
        sent = payload.cut(one.layout, one.prefix, columns, parts, to, self._tag())
        head = (*_parts(claim.lease), next(self._serial), int(ack), *_told(facts, count, claim.table))

        def send() -> None:
            end = time.monotonic() + self._put_timeout_s
            self._checked(claim, self._send("write", one, head, sent, end))
            if ack:
                one.over(claim.lease)

        if wait or not ack or sent.nbytes > _POSTED_BYTES:
            send()
        else:
            self._post(claim, one, "write", (*head, *sent.arguments), sent.sets, send)

    def ack(self, claim: Claim, *, wait: bool = True) -> None:
        """This stage is done with the rows; see `ExperienceStore.ack`."""
        if wait or claim.lease in self._finished:
            self._end(claim, "ack")
        else:
            one, args = self._open(claim.table), (*_parts(claim.lease), next(self._serial))
            self._post(claim, one, "ack", args, (), lambda: self._ended(claim, one, "ack", args))

    def _post(
        self,
        claim: Claim,
        one: _Open,
        verb: str,
        args: Sequence[Argument],
        sets: Sequence[tuple[str, Payload]],
        again: Callable[[], object],
    ) -> None:
        """Send what ends a claim and go on; a refusal is raised, or the call repeated, before the next one."""

        def then(reply: Any) -> None:
            if isinstance(reply, list) and reply[0] == b"ok":
                one.over(claim.lease)
            elif isinstance(reply, list) and reply[0] == b"fenced":
                self._late.append(lambda: self._checked(claim, ["fenced"]))
            else:
                self._late.append(again)

        self._link.post(verb, one.target, *args, payload=sets, then=then)

    def nack(self, claim: Claim, reason: str) -> None:
        """Redeliver and count; see `ExperienceStore.nack`."""
        self._end(claim, "give_back", 1, _label("dead", reason), _kept(reason))

    def release(self, claim: Claim) -> None:
        """Give the rows back unworked; see `ExperienceStore.release`."""
        self._end(claim, "give_back", 0, "", "")

    def lose(self, claim: Claim, rows: Sequence[int], maker: str, columns: Sequence[str]) -> None:
        """Columns of claimed rows are gone; see `ExperienceStore.lose`."""
        one = self._open(claim.table)
        units = one.layout.select(columns).units
        ranges: list[Argument] = []
        for r in subset(claim.ranges, rows):
            ranges += [r.chunk, r.first, r.count]
        head = (*_parts(claim.lease), next(self._serial), one.layout.stage_index(maker), len(units))
        self._checked(claim, self._link.call("lose", one.target, *head, *units, *ranges))

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
            for one in subset(claim.ranges, rows):
                ranges += [one.chunk, one.first, one.count]
        self._end(claim, "finish", state, _label(state, reason), _kept(reason), step, *ranges)

    def _end(self, claim: Claim, verb: str, *args: Argument) -> None:
        if claim.lease in self._finished:
            return
        self._ended(claim, self._open(claim.table), verb, (*_parts(claim.lease), next(self._serial), *args))

    def _ended(self, claim: Claim, one: _Open, verb: str, args: Sequence[Argument]) -> None:
        reply = self._checked(claim, self._link.call(verb, one.target, *args))
        if reply[1] == 1:
            one.over(claim.lease)
            if verb == "finish":
                self._finished[claim.lease] = None
                if len(self._finished) > 1000:
                    del self._finished[next(iter(self._finished))]

    def _checked(self, claim: Claim, reply: list[Any]) -> list[Any]:
        if reply[0] == "fenced":
            self._tables[claim.table].over(claim.lease)
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
        opened = self._open(table)
        args: list[Argument] = []
        for one in ranges:
            producer, _, sequence = one.chunk.rpartition(".")
            args += [one.chunk, producer, sequence, one.first, one.count, one.use]
        reply = self._link.call("finish_logged", opened.target, opened.layout.stage_index(stage), step, *args)
        if reply[0] == "conflict":
            raise IntegrityError(
                f"chunk '{reply[1].decode()}' of table '{table}'",
                got=f"rows of logged step {step} that ended without being trained",
                expected="the batch log and the store to agree",
            )

    def server_id(self) -> str:
        """Which server process answers; see `ExperienceStore.server_id`."""
        (info,) = self._link.exchange([("INFO", "server")])
        lines: list[str] = bytes(info).decode().splitlines()
        return next(line for line in lines if line.startswith("run_id:"))

    def advance(self, durable_step: int) -> None:
        """A checkpoint covers this step, in every open table; see `ExperienceStore.advance`."""
        for one in self._tables.values():
            while self._link.call("advance", one.target, durable_step)[1] > 0:
                pass

    def expire(self) -> int:
        """Return rows of expired leases; see `ExperienceStore.expire`. Returns the number of leases."""
        total = 0
        for one in self._tables.values():
            while leases := int(self._link.call("expire", one.target)[1]):
                total += leases
        return total

    # -- priorities, dead letters, lineage ---------------------------------------------------------------------

    def prioritize(self, table: str, stage: str, ranges: Sequence[RowRange], priorities: Sequence[float]) -> None:
        """Give units their rates; see `ExperienceStore.prioritize`.

        Raises:
            UsageError: not a prioritized stage, a rate that is not positive and finite, or a part of a unit.
        """
        one = self._open(table)
        subject = f"prioritize stage '{stage}' of table '{table}'"
        if one.layout.stage(stage).selector != "prioritized":
            raise UsageError(subject, got=one.layout.stage(stage).selector, expected="a prioritized stage")
        if len(ranges) != len(priorities) or not all(0 < rate < float("inf") for rate in priorities):
            got = f"{len(ranges)} ranges, {len(priorities)} rates {list(priorities)[:4]}"
            raise UsageError(subject, got=got, expected="one positive finite rate for each range")
        args: list[Argument] = []
        for where, rate in zip(ranges, priorities, strict=True):
            args += [where.chunk, where.first, where.count, repr(float(rate))]
        reply = self._link.call("prioritize", one.target, one.layout.stage_index(stage), *args)
        if reply[0] == "units":
            raise UsageError(
                subject, got=f"a part of a unit of chunk '{reply[1].decode()}'", expected="whole units"
            )

    def dead_letters(self, table: str) -> list[DeadLetter]:
        """Dead rows whose payload is still held; see `ExperienceStore.dead_letters`."""
        one = self._open(table)
        stages = ["", *(stage.name for stage in one.layout.table.stages)]
        letters: list[DeadLetter] = []
        for member, at_ms, why in self._link.call("dead_letters", one.target)[1]:
            chunk, first, count, stage = member.decode().rsplit(":", 3)
            where = RowRange(chunk, int(first), int(count))
            reason = ""
            for begin, rows, state, _, text in payload.parse_ends(why.decode()):
                if begin <= where.first < begin + rows and state == "dead":
                    reason = text
            letters.append(DeadLetter(table, where, stages[int(stage)], reason, at_ms / 1000))
        return letters

    def retry(self, letter: DeadLetter) -> int:
        """Make dead rows live again; see `ExperienceStore.retry`.

        Raises:
            UsageError: another worker's lease still names the rows, or the table is full.
        """
        return self._bury(letter, 1)

    def drop(self, letter: DeadLetter) -> int:
        """Let go of dead rows; see `ExperienceStore.drop`."""
        return self._bury(letter, 0)

    def _bury(self, letter: DeadLetter, again: int) -> int:
        one = self._open(letter.table)
        stage = one.layout.stage_index(letter.stage) if letter.stage else 0
        where = letter.range
        member = f"{where.chunk}:{where.first}:{where.count}:{stage}"
        reply = self._link.call("bury", one.target, member, again, _label("dead", letter.reason))
        if reply[0] == "leased":
            raise UsageError(
                f"retry of {where.count} rows of chunk '{where.chunk}'",
                got=f"a lease of worker '{reply[1].decode()}' that names them",
                expected="rows that nobody holds",
                remedy="Try again when its lease is over",
            )
        if reply[0] == "full":
            raise UsageError(
                f"retry of {where.count} rows of chunk '{where.chunk}'",
                got=f"{reply[1]} of {one.layout.table.capacity_rows} rows live",
                expected="room for them",
                remedy="Try again when rows have ended",
            )
        return int(reply[1])

    def lineage(self, table: str, ranges: Sequence[RowRange]) -> list[Written]:
        """Who wrote the columns of held rows; see `ExperienceStore.lineage`.

        Raises:
            IntegrityError: a chunk is not held (any more), or is shorter than its range.
        """
        one = self._open(table)
        where = one.reader.locate(ranges, range(1, len(one.layout.units) + 1))
        self._check_held(table, ranges, where)
        one.reader.learn_writers(where)
        return payload.written(ranges, one.layout, where, one.reader.writers)

    # -- looking and waiting ---------------------------------------------------------------------------------

    def wait(self, interests: Sequence[Interest], *, timeout_s: float, wake_fd: int | None = None) -> bool:
        """Sleep until an interest may be met; see `ExperienceStore.wait`."""
        wanted: dict[str, list[int]] = {}
        for interest in interests:
            one = self._open(interest.table)
            index = one.layout.stage_index(interest.stage)
            wanted.setdefault(one.target, []).extend((index, interest.rows, int(interest.or_settled)))
        return self._row_waiter.wait(wanted, timeout_s=timeout_s, wake_fd=wake_fd)

    def counts(self, table: str) -> TableCounts:
        """The table's counters; see `ExperienceStore.counts`."""
        one = self._open(table)
        _, packed, ended = self._link.call("counts", one.target)
        state = [int(value) if value < 2**53 else 0 for value in struct.unpack(f"<{len(packed) // 8}d", packed)]
        names = [stage.name for stage in one.layout.table.stages]

        def by_stage(index: int) -> dict[str, int]:
            return {name: state[_FIELDS + k * _STAGE_FIELDS + index] for k, name in enumerate(names, start=1)}

        ready, leased, past = by_stage(_READY), by_stage(_LEASED), by_stage(_PAST)
        admitted = state[_ADMITTED]
        return TableCounts(
            admitted=admitted,
            live=admitted - state[_ENDED],
            payload_bytes=state[_BYTES],
            ready=ready,
            leased=leased,
            acked=past,
            ended={ended[k].decode(): int(ended[k + 1]) for k in range(0, len(ended), 2) if int(ended[k + 1])},
            redelivered=state[_REDELIVERED],
            waiting={name: admitted - ready[name] - leased[name] - past[name] for name in names},
            uses=state[_USES],
            fenced=state[_FENCED],
            dead_letters=state[_DEAD],
            version=state[_TRAINER],
            durable=state[_DURABLE] - 1,
        )

    def leases(self, table: str) -> list[Lease]:
        """Live leases; see `ExperienceStore.leases`."""
        one = self._open(table)
        stages = ["", *(stage.name for stage in one.layout.table.stages)]
        lines = self._link.call("leases", one.target)[1]
        return [
            Lease(lease.decode(), stages[index], worker.decode(), rows, left_ms / 1000)
            for lease, index, worker, rows, left_ms, *_ in lines
        ]

    def held(self, table: str) -> list[RowRange]:
        """The rows whose payload is there now, live ones and others, for those who look on."""
        one = self._open(table)
        return list(verifying.held(self._client, self._link, one.prefix, one.target))

    def verify(self, table: str) -> list[str]:
        """Broken invariants; see `ExperienceStore.verify`."""
        one = self._open(table)
        return verifying.verify(self, self._client, self._link, one.layout, one.prefix, one.target)

    def waiting(self) -> list[Waiting]:
        """Everybody who waits on the open tables; `since_s` is how long already."""
        lines: list[Waiting] = []
        for name, one in self._tables.items():
            counts = self.counts(name)
            stages = ["", *(stage.name for stage in one.layout.table.stages)]
            for _, worker, waited_ms, _, *interests in self._link.call("waiting", one.target)[1]:
                for k in range(0, len(interests), 3):
                    index, rows, third = interests[k : k + 3]
                    what = f"{rows} ready rows" + (", or none left to come" if third else "")
                    what = what if index else f"room for {rows} rows of {third} bytes"
                    lines.append(Waiting(worker.decode(), name, stages[index], what, waited_ms / 1000, counts))
        return lines

    def close(self) -> None:
        """Close the connections (not those of a client that was given); see `ExperienceStore.close`."""
        try:
            self._link.settle()
            while self._late:
                self._late.popleft()()
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        ended = [
            ("forget", one.prefix, *(f"{self._name}.{slot}" for slot in one.slots)) for one in self._tables.values()
        ]
        self._link.attempt(ended)
        self._row_waiter.close()
        self._room_waiter.close()
        self._link.close()
        if self._owns_client:
            self._client.close()


_LIMITS = {
    "rows": "{value:.0f} of {most:.0f} rows live",
    "bytes": "{value:.0f} of {most:.0f} payload bytes held",
    "versions": "{value:.0f} of {most:.0f} rows admitted for the versions in flight",
    "samples_per_insert": "{value:g} samples waiting to be drawn, of at most {most:g}",
}


def _put_into(table: Table) -> str:
    return f"put into table '{table.name}'"


def _parts(lease: str) -> tuple[str, int]:
    """Slot and serial, as the functions take them."""
    slot, _, serial = lease.rpartition(".")
    return slot, int(serial)


def _told(facts: Facts, rows: int, table: str) -> tuple[Argument, Argument, str]:
    """Version, tokens (four bytes little-endian each) and, for the pieces' entries, version and tag."""
    if facts is _NO_FACTS:  # as nearly always
        return "", "", "::;"
    tokens: bytes | str = ""
    if facts.tokens is not None:
        if len(facts.tokens) != rows or not all(0 <= count < 2**32 for count in facts.tokens):
            got, expected = f"{len(facts.tokens)} counts {list(facts.tokens)[:4]}", f"{rows} from 0 to 2**32 - 1"
            raise UsageError(f"tokens of rows for table '{table}'", got=got, expected=expected)
        tokens = struct.pack(f"<{rows}I", *facts.tokens)
    if facts.version is not None and facts.version < 0:
        raise UsageError(f"policy version of rows for table '{table}'", got=facts.version, expected="at least 0")
    if len(facts.tag) > _TAG_CHARS or ":" in facts.tag or ";" in facts.tag:
        expected = f"at most {_TAG_CHARS} characters without ':' and ';'"
        raise UsageError(f"tag of rows for table '{table}'", got=repr(facts.tag[:40]), expected=expected)
    version = "" if facts.version is None else facts.version
    return version, tokens, f":{version}:{facts.tag};"


def _kept(reason: str) -> str:
    """A reason as it is kept with its rows: of a very long one, both ends."""
    text = _clean(reason)
    half = _REASON_CHARS // 2
    return text if len(text) <= _REASON_CHARS else f"{text[:half]}\n…\n{text[-half:]}"


def _clean(text: str) -> str:
    """Without the characters that separate fields in a chunk's record."""
    return text.replace("\x1e", " ").replace("\x1f", " ")


def _label(state: str, reason: str) -> str:
    """Name of the counter: the state, with the reason's first line, or the last one of a traceback."""
    lines = _clean(reason).strip().split("\n")
    line = lines[-1 if lines[0].startswith("Traceback") else 0][:_LABEL_CHARS]
    return f"{state}({line})" if line else state
