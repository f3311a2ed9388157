"""What producers, workers and trainers do, judged by the model, which follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from model.invariants import Broken, holds
from model.judge import Ask, judge_claim
from model.model import Row
from model.scene import Scene
from model.tables import NEEDS, WRITES, batch_of
from model.verbs import COIN, INDEX, WHO, WORKERS, between, one_of, verb
from model.workers import Held, Put, Worker

from rlmq.buffer.store import Claim, Facts, RowRange
from rlmq.common.errors import DeadlineExceeded, Fenced, IntegrityError, UsageError

BLOCKED_S, WAKE_S = 6.0, 1.5  # sleepers look for themselves every 2 s: who needs longer than `WAKE_S` was not woken
PLAN = ("put", "put", "put", "a", "a", "a", "b", "b", "b", "end", "end", "late", "recorder", "hold", "fail", "back")


class Work(Scene):
    """Everything that goes on while nothing goes wrong."""

    # -- producers -------------------------------------------------------------------------------------------

    @verb(
        2,
        who=WHO,
        groups=between(1, 3),
        size=between(1, 3),
        early=COIN,
        behind=one_of(None, 0, 0, 1, 2),
        tokens=COIN,
        closes=COIN,
    )
    def put(
        self, who: int, groups: int, size: int, early: bool, behind: int | None, tokens: bool, closes: bool
    ) -> None:
        """A chunk, and again as a new incarnation of its producer would."""
        worker, rows = self.workers[who], groups * size
        columns = self.columns(("x", "y", "y2") if early else ("x",), rows)
        version = None if behind is None else max(0, self.model.version - behind)
        facts = Facts(version=version, tokens=[1 + k % 4 for k in range(rows)] if tokens else None)
        limit, lost = self.model.refusal(rows), worker.lost
        put = Put(f"p{who}", self.sequences[f"p{who}"], columns, size, facts, closes)
        try:
            new = self.call(put.into, worker.store)
        except (DeadlineExceeded, UsageError) as error:
            holds("capacity_bound", limit is not None, f"{rows} rows refused: {error}")
            return
        holds("capacity_bound", limit is None, f"{rows} rows accepted against {limit}")
        holds("put_once", new or worker.lost > lost, f"{put.chunk} is said to be known")
        self.admit_chunk(put)
        again = self.call(put.into, self.workers[(who + 1) % WORKERS].store)
        holds("put_once", not again, f"{put.chunk} was put twice")

    def columns(self, names: Sequence[str], rows: int) -> dict[str, list[int]]:
        """Values that were never used before."""
        self.value += 1000
        return {name: [self.value + 100 * c + k for k in range(rows)] for c, name in enumerate(names)}

    def admit_chunk(self, put: Put) -> None:
        self.model.put(put.chunk, put.group_size, put.columns, put.facts)
        self.sequences[put.producer] += 1
        if put.closes:
            self.model.closed = len(self.model.chunks)

    @verb(1, who=WHO, what=one_of("closed", "version", "durable"), by=between(-1, 2))
    def tell(self, who: int, what: str, by: int) -> None:
        """What upstream, trainer and checkpoint have reached; old news change nothing."""
        store, model = self.workers[who].store, self.model
        if what == "closed":
            self.call(store.flush, "train")
            model.closed = len(model.chunks)
        elif what == "version":
            version = max(0, model.version + by)
            self.call(store.set_version, "train", version)
            model.version = max(model.version, version)
        else:
            step = max(0, self.step + min(by, 1))
            self.call(store.advance, step)
            model.advance(step)

    # -- claims ----------------------------------------------------------------------------------------------

    def claimed(self, worker: Worker, ask: Ask) -> Held | None:
        """Claim and judge."""
        options = {"max_rows": ask.most, "min_rows": ask.least, "max_tokens": ask.tokens, "version": ask.version}
        claim, refused = None, None
        try:
            claim = self.call(worker.store.claim, "train", ask.stage, **options)
        except UsageError as error:
            refused = error
        except IntegrityError as error:
            raise Broken("payload_intact", f"{ask}: {error}") from error
        return self.admit_claim(worker, ask, claim, refused)

    def admit_claim(
        self, worker: Worker, ask: Ask, claim: Claim | None, refused: UsageError | None = None
    ) -> Held | None:
        """Judge the answer to a claim and let the model follow."""
        self.follow_stale(ask)
        rows = judge_claim(self.model, ask, claim, refused)
        if claim is None:
            return None
        self.model.lease(claim.lease, ask.stage, worker.store._worker, rows)
        held = self.by_lease[claim.lease] = Held(claim, rows, worker)
        self.held = [*self.held[-11:], held]
        return held

    def follow_stale(self, ask: Ask) -> None:
        """A claim may end those stale units that it comes across: see which."""
        for unit, age in self.model.stale_units(self.model.stages[ask.stage], ask.version):
            alive = [row for row in unit if row.end is None]
            where = [RowRange(row.chunk.name, row.index, 1) for row in alive]
            try:
                gone = None not in self.watcher.read("train", where, ["end_state"])["end_state"].to_pylist()
            except IntegrityError:
                gone = True
            for row in alive if gone else []:
                self.model.end(row, "stale", f"{age} versions old", stage=ask.stage)
        self.model.settle()

    @verb(
        3,
        who=WHO,
        stage=one_of(*NEEDS),
        most=between(1, 7),
        least=between(1, 4),
        tokens=one_of(None, None, 1, 5),
        versioned=COIN,
    )
    def claim(self, who: int, stage: str, most: int, least: int, tokens: int | None, versioned: bool) -> None:
        worker = self.workers[who]
        if self.knows(worker, stage):
            version = self.model.version if versioned and stage == "end" else None
            self.claimed(worker, Ask(stage, most, min(most, least), tokens, version))

    def knows(self, worker: Worker, stage: str) -> bool:
        return stage in [one.name for one in worker.store._tables["train"].layout.table.stages]

    @verb(6, who=WHO, plan=lambda rng: rng.choices(PLAN, k=rng.randint(2, 6)))
    def progress(self, who: int, plan: list[str]) -> None:
        """What producers, workers and trainers do; now and then one holds its rows, or cannot work on them."""
        for k, what in enumerate(plan):
            most = 2 + 3 * k
            if what == "put":
                self.put(who, 1 + k % 3, 1 + self.value // 1000 % 3, False, 0, k % 2 == 0, k % 3 == 0)
            elif what == "end":
                self.train(who, most)
            elif what in ("hold", "fail", "back"):
                held = self.claimed(self.workers[who], Ask(("a", "b", "end")[self.value // 1000 % 3], most))
                if held is not None and what != "hold":
                    self.end_under(held, "nack" if what == "fail" else "release")
            else:
                self.work(who, what, most)
            self.everything_agrees()

    def work(self, who: int, stage: str, most: int) -> None:
        """Claim, write all that the stage writes, ack."""
        worker = self.workers[who]
        held = self.claimed(worker, Ask(stage, most)) if self.knows(worker, stage) else None
        if held is not None and stage in WRITES:
            self.write_under(held, WRITES[stage], ack=True)
        elif held is not None:
            self.end_under(held, "ack")

    def train(self, who: int, most: int) -> None:
        """The next step."""
        self.step += 1
        ready = len(self.model.at("end", "ready"))
        most = ready if self.model.stages["end"].scope == "batch" and 0 < ready <= most else most
        held = self.claimed(self.workers[who], Ask("end", most, version=self.model.version))
        if held is not None:
            self.finish_under(held, "trained", None)
            self.tell(who, "version", 1)

    def log(self, worker: Worker, rows: list[Row], use: int) -> None:
        chunk = rows[0].chunk
        ranges = [RowRange(chunk.name, row.index, 1, use=use) for row in rows]
        otherwise = [row for row in rows if row.end is not None and row.end[0] != "trained"]
        try:
            self.call(worker.store.finish_logged, "train", "end", ranges, step=self.step)
        except IntegrityError as error:
            holds("one_end_state", bool(otherwise) and not chunk.freed, f"redo of {rows}: {error}")
            return
        holds("one_end_state", not otherwise or chunk.freed, f"{otherwise} ended otherwise and were redone")
        self.model.finish_logged([(row, use) for row in rows], "end", self.step)

    @verb(
        1,
        when=lambda self: not self.model.at("a", "ready"),
        who=WHO,
        groups=between(1, 2),
        size=between(1, 3),
    )
    def sleep_until_put(self, who: int, groups: int, size: int) -> None:
        """A claim that finds nothing sleeps; a put wakes it."""
        if self.model.refusal(groups * size) is not None or self.model.logged:
            return
        sleeper = self.new_worker("sleeper")

        def claim() -> Claim | None:
            return sleeper.store.claim("train", "a", max_rows=50, timeout_s=BLOCKED_S)

        def put() -> None:
            self.put(who, groups, size, early=False, behind=None, tokens=False, closes=False)

        self.admit_claim(sleeper, Ask("a", 50), self.while_asleep("a", claim, put))

    @verb(1, when=lambda self: self.model.refusal(3) == "capacity_rows")
    def sleep_until_room(self) -> None:
        """A put that finds no room sleeps; rows that end wake it."""
        put = Put("sleeper", self.sequences["sleeper"], self.columns(("x",), 3), 3)
        sleeper = self.new_worker("sleeper", put_timeout_s=BLOCKED_S)

        def end_rows() -> None:
            for row in self.model.live:
                if self.model.refusal(3) == "capacity_rows":
                    for use in range(row.uses, self.table.max_uses):
                        self.log(self.workers[0], [row], use)

        if self.only_capacity():
            new = self.while_asleep("", lambda: put.into(sleeper.store), end_rows)
            holds("put_once", new, f"{put.chunk} is said to be known")
            self.admit_chunk(put)

    def only_capacity(self) -> bool:
        """Whether no other limit than that of live rows keeps a put waiting."""
        return self.table.window is None and all(s.samples_per_insert is None for s in self.table.stages)

    def while_asleep(self, stage: str, sleeps: Callable[[], Any], wakes: Callable[[], None]) -> Any:
        """Run `wakes` once `sleeps` waits for the stage; its answer."""
        answer: list[Any] = []

        def run() -> None:
            try:
                answer.append(sleeps())
            except Exception as error:  # for the machine's own thread
                answer.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        end = time.monotonic() + BLOCKED_S
        while not answer and not any(w.stage == stage for w in self.watcher.waiting()):
            holds("waiter_wakes", time.monotonic() < end, f"nobody waits for {stage or 'room'}")
        try:
            wakes()
        finally:
            woken = time.monotonic()
            thread.join()
        holds(
            "waiter_wakes",
            time.monotonic() - woken < WAKE_S,
            f"nobody woke who waited for {stage or 'room'}",
        )
        if isinstance(answer[0], Exception):
            raise Broken("waiter_wakes", f"who waited for {stage or 'room'}: {answer[0]}") from answer[0]
        return answer[0]

    # -- calls under a lease, live or over -------------------------------------------------------------------

    def under(self, held: Held, verb: str, *args: Any, **options: Any) -> bool:
        """Run the call; True when the lease is live, so that the model must follow.

        A store knows which of its claims `finish` ended, and lets what ends a claim do nothing to them.
        """
        lease, lost = held.claim.lease, held.worker.lost
        live = lease in self.model.leases
        try:
            self.call(getattr(held.worker.store, verb), held.claim, *args, **options)
        except Fenced as error:
            holds("lease_fences", not live, f"{verb} under {lease}, which is live: {error}")
            self.model.fenced += 1 + held.worker.lost - lost
            return False
        done = lease in self.finished and verb in ("ack", "nack", "release", "finish")
        holds("lease_fences", live or done, f"{verb} under {lease}, which is over")
        return live

    def write_under(self, held: Held, names: Sequence[str], *, ack: bool, behind: int | None = None) -> None:
        columns = self.columns(names, held.claim.count)
        facts = Facts(version=None if behind is None else max(0, self.model.version - behind))
        if not self.under(held, "write", batch_of(columns), ack=ack, facts=facts):
            return
        self.model.write(held.claim.lease, columns, facts.version)
        if ack:
            self.acked(held)

    def acked(self, held: Held) -> None:
        lease = held.claim.lease
        if held.claim.stage == "recorder":
            self.recorded.update(row.values["x"] for row in self.model.mine(lease))
        self.model.ack(lease)

    def end_under(self, held: Held, verb: str) -> None:
        reason = "bad\nTraceback: line 1"
        options = {"reason": reason} if verb == "nack" else {}
        if not self.under(held, verb, **options) or verb == "extend":
            return
        if verb == "ack":
            self.acked(held)
        else:
            self.model.give_back(held.claim.lease, counted=verb == "nack", reason=reason)

    def finish_under(self, held: Held, state: Any, some: list[int] | None) -> None:
        lease = held.claim.lease
        rows = held.rows if some is None else [held.rows[k] for k in some]
        reason = "" if state in ("trained", "done") else "why"
        step = self.step if state == "trained" else -1
        if not self.under(held, "finish", state, reason, rows=some, step=step):
            return
        if held.claim.stage == "recorder":
            self.recorded.update(row.values["x"] for row in rows if row in self.model.mine(lease))
        self.model.finish(lease, rows, state, reason, step)
        if lease not in self.model.leases:
            self.finished.add(lease)

    def some_held(self, which: int) -> Held:
        """A claim that some worker remembers, newest first; two of three times a live one, made now if need be."""
        live = [held for held in self.held if held.claim.lease in self.model.leases]
        if which % 3 and not live:
            made = self.claimed(self.workers[which % WORKERS], Ask(("a", "b", "end", "a")[which % 4], 5))
            live = [made] if made is not None else []
        some = (live if which % 3 else []) or self.held
        return some[-1 - which % len(some)]

    @verb(
        2,
        when=lambda self: self.held,
        which=INDEX,
        names=one_of(("y", "y2"), ("z",)),
        ack=COIN,
        behind=one_of(None, None, 0, 2),
    )
    def write(self, which: int, names: tuple[str, ...], ack: bool, behind: int | None) -> None:
        self.write_under(self.some_held(which), names, ack=ack, behind=behind)

    @verb(
        3,
        when=lambda self: self.held,
        which=INDEX,
        verb=one_of("ack", "nack", "nack", "release", "extend"),
    )
    def end(self, which: int, verb: str) -> None:
        self.end_under(self.some_held(which), verb)

    @verb(
        3,
        when=lambda self: self.held,
        which=INDEX,
        state=one_of("trained", "filtered", "done", "stale", "dead"),
        some=lambda rng: rng.choice([None, {rng.randrange(7) for _ in range(3)}]),
    )
    def finish(self, which: int, state: str, some: set[int] | None) -> None:
        held = self.some_held(which)
        if state == "trained" and held.claim.stage not in ("end", "recorder"):
            state = "done"
        self.finish_under(held, state, None if some is None else sorted({k % held.claim.count for k in some}))
