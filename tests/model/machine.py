"""The state machine: healthy work, mishaps, the trainer's log, dead letters; at its end nothing is left."""

from __future__ import annotations

import sys
import time
from collections import Counter

from model.invariants import Broken, equal, holds
from model.judge import OVERWHELMING, Ask
from model.model import NEAR_S, Row
from model.tables import COLUMNS, SOON_S, WRITES, table_of
from model.verbs import COIN, INDEX, WHO, between, one_of, verb
from model.work import Work

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Interest, RowRange
from rlmq.common.errors import IntegrityError, UsageError

# Keys that do not grow with a table's rows.
LASTING = {"state", "config", "ended", "marks", "clients", "leases", "fetch"}


class BufferMachine(Work):
    """Random verbs from three workers, against the server and against the model side by side."""

    # -- what goes wrong -------------------------------------------------------------------------------------

    @verb(2, who=WHO, stage=one_of("a", "b"), late=one_of("ack", "nack", "release", "extend", "write"))
    def come_late(self, who: int, stage: str, late: str) -> None:
        """A worker gives rows back, has others, and then a call of before comes late."""
        first = self.claimed(self.workers[who], Ask(stage, 3))
        if first is None:
            return
        self.end_under(first, "release")
        self.claimed(self.workers[who], Ask(stage, 3))
        if late == "write":
            self.write_under(first, WRITES[stage], ack=True)
        else:
            self.end_under(first, late)

    def pass_lease(self, lease: str) -> None:
        """Let the time of a lease be over: extend it by next to nothing, and wait that long."""
        self.watcher.open([table_of(self.dimensions, late=self.late, lease_s=SOON_S)])
        self.watcher.extend(self.by_lease[lease].claim)
        self.watcher.open([self.table])
        time.sleep(NEAR_S)

    @verb(2, when=lambda self: self.model.leases, which=INDEX, who=WHO, how=one_of("expire", "claim"))
    def expire(self, which: int, who: int, how: str) -> None:
        """A lease's time is over; somebody looks, or the next claim does."""
        lease = list(self.model.leases.values())[which % len(self.model.leases)]
        self.pass_lease(lease.name)
        if how == "expire":
            equal("lease_fences", self.call(self.watcher.expire), 1, "leases that ran out:")
        self.model.give_back(lease.name, counted=True, reason="lease expired")
        if how == "claim":
            worker = next(w for w in self.workers[who:] + self.workers if self.knows(w, lease.stage))
            self.claimed(worker, Ask(lease.stage, 7))

    @verb(1, when=lambda self: self.model.stages["b"].max_wait_s is not None, who=WHO, most=between(1, 7))
    def claim_overdue(self, who: int, most: int) -> None:
        """The oldest ready row of `b` has waited for too long."""
        self.watcher.open([table_of({**self.dimensions, "max_wait_s": SOON_S}, late=self.late)])
        time.sleep(NEAR_S)
        self.model.overdue = True
        self.claimed(self.workers[who], Ask("b", most))
        self.model.overdue = False
        self.watcher.open([self.table])

    @verb(3, when=lambda self: self.server is not None)
    def restart(self) -> None:
        """The server is killed, and comes back with what it had appended."""
        assert self.server is not None
        self.server.kill()
        self.client.connection_pool.disconnect()
        self.server.start()
        try:
            self.everything_agrees()
        except (Broken, IntegrityError) as error:
            raise Broken("rows_stay", error) from error

    @verb(2, who=WHO)
    def lose_next_reply(self, who: int) -> None:
        self.workers[who].lose_next_reply()

    @verb(1, who=WHO, recovers=COIN)
    def crash(self, who: int, recovers: bool) -> None:
        """A worker dies without a word; its successor gives back what it held, or leaves that to the leases."""
        self.workers[who] = self.new_worker(f"w{who}")
        mine = [lease.name for lease in self.model.leases.values() if lease.worker == f"w{who}"]
        if recovers:
            given = self.call(self.workers[who].store.recover)
            equal("leases_agree", given, len(mine), f"leases given back by w{who}:")
            for lease in mine:
                self.model.give_back(lease, counted=True, reason="worker ended")

    @verb(1, when=lambda self: not self.late)
    def add_stage(self) -> None:
        """A stage comes while rows are live; workers that are there already need not know it."""
        self.late, self.table = True, table_of(self.dimensions, late=True)
        self.call(self.watcher.open, [self.table])
        self.model.add_stage(self.table.stages[-1])

    # -- the trainer's log, dead letters, priorities -----------------------------------------------------------

    @verb(1, who=WHO, which=INDEX, count=between(1, 4), again=COIN, done=COIN)
    def finish_logged(self, who: int, which: int, count: int, again: bool, done: bool) -> None:
        """Redo of a batch-log entry: of one that counted already, or twice, or of a chunk that is still to come."""
        worker, chunks = self.workers[who], self.model.chunks[-4:]
        if which % 8 == 0 or not chunks:
            chunk = f"p{who}.{self.sequences[f'p{who}']}"  # the server came back older than the log
            self.call(worker.store.finish_logged, "train", "end", [RowRange(chunk, 0, 1)], step=self.step)
            self.model.logged.setdefault(chunk, []).append((0, 0, "end", self.step))
            return
        rows = chunks[which % len(chunks)].rows
        start = rows[which % len(rows)]
        alike = [row for row in rows[start.index : start.index + count] if row.uses == start.uses]
        use = max(0, start.uses - done)
        for _ in range(1 + again):
            self.log(worker, alike, use)

    @verb(2, when=lambda self: self.model.buried(), who=WHO, which=INDEX, again=COIN)
    def take_letter(self, who: int, which: int, again: bool) -> None:
        """Retry a dead letter, or drop it; then once more, which finds nothing."""
        worker, lost = self.workers[who], self.workers[who].lost
        letters = sorted(self.watcher.dead_letters("train"), key=lambda one: (one.range.chunk, one.range.first))
        letter = letters[which % len(letters)]
        if letter.stage and not self.knows(worker, letter.stage):
            return
        rows = self.rows_of(letter)
        full = len(self.model.live) + len(rows) > self.table.capacity_rows
        take = worker.store.retry if again else worker.store.drop
        try:
            taken = self.call(take, letter)
        except UsageError as error:
            holds("dead_letters_kept", again and (self.model.named(rows) or full), f"{letter}: {error}")
            return
        holds("capacity_bound", not (again and full), f"{letter} was retried without room")
        holds("dead_letters_kept", taken == len(rows) or worker.lost > lost, f"{letter}: {taken} rows")
        if again:
            self.model.retry(rows)
            self.recorded.subtract({row.values["x"]: self.recorded[row.values["x"]] for row in rows})
        else:
            self.model.drop(rows)
        equal("dead_letters_kept", self.call(worker.store.drop, letter), 0, f"{letter} again:")

    @verb(
        5,
        when=lambda self: self.model.rows and self.model.stages["end"].selector == "prioritized",
        who=WHO,
        which=INDEX,
        rate=one_of(0.5, OVERWHELMING, OVERWHELMING),
        claims=COIN,
    )
    def prioritize(self, who: int, which: int, rate: float, claims: bool) -> None:
        """Give a unit its rate, ready ones first; it shows in the next claim."""
        stage, worker = self.model.stages["end"], self.workers[who]
        some = [unit[0] for unit in self.model.ready_units(stage)] or self.model.rows
        unit = self.model.unit(some[which % len(some)], stage)
        ranges = [RowRange(unit[0].chunk.name, unit[0].index, len(unit))]
        self.call(worker.store.prioritize, "train", "end", ranges, [rate])
        for row in unit:
            row.rate = rate
        if claims:
            self.claimed(worker, Ask("end", len(unit)))

    # -- looking ---------------------------------------------------------------------------------------------

    @verb(2, who=WHO, what=one_of("read", "read", "wait", "verify"), which=INDEX, count=between(1, 6))
    def look(self, who: int, what: str, which: int, count: int) -> None:
        """Rows without a lease; whether a claim may succeed; the store's own check."""
        store = self.workers[who].store
        if what == "verify":
            equal("verify_agrees", self.watcher.verify("train"), [])
        elif what == "wait":
            self.ask(store, sorted(self.model.stages)[which % len(self.model.stages)], count)
        elif self.model.chunks:
            chunk = self.model.chunks[-1 - which % len(self.model.chunks)]
            self.read(store, chunk.rows[which % len(chunk.rows) :][:count])

    def read(self, store: RedisStore, rows: list[Row]) -> None:
        chunk, names = rows[0].chunk, [column.name for column in COLUMNS]
        ranges = [RowRange(chunk.name, rows[0].index, len(rows))]
        try:
            got = self.call(store.read, "train", ranges, names).to_pylist()
        except IntegrityError as error:
            holds("held_while_needed", chunk.freed, f"{rows} are not held: {error}")
            return
        holds("freed_when_over", not chunk.freed, f"{rows} are still held")
        equal("payload_intact", got, [{name: row.values.get(name) for name in names} for row in rows], f"{rows}")

    def ask(self, store: RedisStore, name: str, rows: int) -> None:
        """`wait` with no time is the question whether a claim may succeed."""
        if name == "late":  # not every worker knows it
            return
        met = self.call(store.wait, [Interest("train", name, rows)], timeout_s=0.0)
        ready, stage = len(self.model.at(name, "ready")), self.model.stages[name]
        least = max(rows, stage.min_size, 1 if self.model.flushed(stage) else stage.min_batch)
        expected = ready >= least and self.model.allowance(stage) >= rows
        equal("ready_is_given", met, expected, f"wait for {rows} of {ready} rows of {name}:")

    # -- the end ---------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None and hasattr(self, "workers"):
                self.drain()
        finally:
            for store in self.stores:
                store.close()
            self.client.close()

    def drain(self) -> None:
        """Bring every row to its end; then nothing is left."""
        worker = self.workers[0] = self.new_worker("w0")
        for lease in list(self.model.leases):
            self.pass_lease(lease)
            self.call(self.watcher.expire)
            self.model.give_back(lease, counted=True, reason="lease expired")
        self.tell(0, "closed", 0)
        while self.model.live:
            self.everything_agrees()
            before = len(self.model.leases), self.value, len(self.held), self.model.uses, len(self.model.live)
            for stage in ("a", "b", "late"):
                self.work(0, stage, 50)
                self.everything_agrees()
            if ready := len(self.model.at("end", "ready")):
                self.train(0, ready)
            after = len(self.model.leases), self.value, len(self.held), self.model.uses, len(self.model.live)
            if before == after:  # what is left is for a limiter of the trainer
                self.log(worker, self.model.live[:1], self.model.live[0].uses)
        self.everything_agrees()
        for letter in self.watcher.dead_letters("train"):
            equal("dead_letters_kept", worker.store.drop(letter), letter.range.count, f"{letter}:")
            self.model.drop(self.rows_of(letter))
        for by in (-1, 0, 1):
            self.tell(0, "durable", by)
            self.everything_agrees()
        while "recorder" in self.model.stages and self.model.at("recorder", "ready"):
            self.work(0, "recorder", 50)
        self.everything_agrees()
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        counts = self.watcher.counts("train")
        equal("one_end_state", sum(counts.ended.values()), counts.admitted, "ended rows against admitted ones:")
        if "recorder" in self.model.stages:
            once = Counter(row.values["x"] for row in self.model.rows)
            equal("one_end_state", self.recorded, once, "rows that the recorder got:")
        equal("freed_when_over", counts.payload_bytes, 0, "bytes of an empty table:")
        left = {key.decode().rpartition("}:")[2] for key in set(self.client.keys("*")) - self.keys_at_first}
        equal("freed_when_over", left - LASTING - ({"logged"} if self.model.logged else set()), set(), "keys:")
        equal("verify_agrees", self.watcher.verify("train"), [])
