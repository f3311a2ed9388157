"""A server, workers on a table, a model of it, and whether both agree."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any, ClassVar

import redis
from conftest import Server
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model.invariants import equal, holds
from model.model import NEAR_S, Model, Row
from model.tables import DIMENSIONS, table_of
from model.verbs import VERBS, WORKERS
from model.workers import Held, Worker

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import DeadLetter, TableCounts

PUT_S = 0.003  # a put that finds no room gives up at once


class Scene(RuleBasedStateMachine):
    """Three workers, one table, one model."""

    url: ClassVar[str]
    store_class: ClassVar[type[RedisStore]] = RedisStore
    server: ClassVar[Server | None] = None  # one that may be killed
    fixed: ClassVar[dict[str, Any]] = {}  # dimensions that are not drawn

    def __init__(self) -> None:
        super().__init__()
        self.client = redis.Redis.from_url(self.url, driver_info=None)  # it takes 5 ms to find out
        self.client.flushall()
        self.value = self.step = 0
        self.sequences: Counter[str] = Counter()  # of each producer, the next one
        self.held: list[Held] = []  # newest last
        self.by_lease: dict[str, Held] = {}
        self.finished: set[str] = set()  # leases that `finish` ended
        self.recorded: Counter[int] = Counter()
        self.stores: list[RedisStore] = []

    @initialize(drawn=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in DIMENSIONS.items()}))
    def open(self, drawn: dict[str, Any]) -> None:
        self.dimensions = {**drawn, **self.fixed}
        self.table = table_of(self.dimensions)
        self.late = False
        self.model = Model(self.table)
        self.watcher = self.new_worker("watcher").store
        self.workers = [self.new_worker(f"w{k}") for k in range(WORKERS)]
        self.keys_at_first = set(self.client.keys("*"))

    @rule(seed=st.binary(min_size=8, max_size=8))
    def step(self, seed: bytes) -> None:
        """One verb. The seed decides evenly which and how: Hypothesis prefers small numbers, and repeats itself."""
        rng = random.Random(seed)
        able = [one for one in VERBS if one.when(self)]
        (chosen,) = rng.choices(able, [one.weight for one in able])
        arguments = {name: draw(rng) for name, draw in chosen.arguments.items()}
        note(f"{chosen.action.__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})")
        chosen.action(self, **arguments)

    def new_worker(self, name: str, *, put_timeout_s: float = PUT_S) -> Worker:
        store = self.store_class(self.client, run_id="model", worker=name, put_timeout_s=put_timeout_s)
        self.stores.append(store)
        store.open([self.table])
        return Worker(store)

    def call(self, action: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a call and note when; options that say nothing are left out."""
        before = time.time()
        try:
            return action(*args, **{name: value for name, value in options.items() if value is not None})
        finally:
            self.model.now = (before, time.time())

    def rows_of(self, letter: DeadLetter) -> list[Row]:
        chunk = next(chunk for chunk in self.model.chunks if chunk.name == letter.range.chunk)
        return chunk.rows[letter.range.first : letter.range.first + letter.range.count]

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "workers"):
            return
        self.pass_group_deadlines()
        counts, model = self.watcher.counts("train"), self.model
        if counts.dead_letters or model.buried():
            self.follow_evictions()
            time.sleep(NEAR_S)  # those that die next are newer
        keys = self.client.keys("*:payload:*")
        chunks = {key.decode().split(":payload:")[1].split("/")[0] for key in keys}
        held = {chunk.name for chunk in model.chunks if not chunk.freed}
        holds("held_while_needed", held <= chunks, f"{held - chunks} are gone")
        holds("freed_when_over", chunks <= held, f"{chunks - held} are still there")
        leases = {(lease.lease, lease.stage, lease.worker) for lease in self.watcher.leases("train")}
        equal("leases_agree", leases, {(lease.name, lease.stage, lease.worker) for lease in model.leases.values()})
        equal("lease_fences", counts.fenced, model.fenced, "fenced calls:")
        equal("redelivery", counts.redelivered, model.redelivered, "redelivered:")
        equal("uses_bounded", counts.uses, model.uses, "uses:")
        told = {label: rows for label, rows in counts.ended.items() if rows}
        equal("ended_counted", told, dict(+model.ended))
        self.check_places(counts)
        equal("counts_agree", counts.version, model.version, "version:")
        live = (counts.admitted, counts.live)
        equal("counts_agree", live, (len(model.rows), len(model.live)), "(admitted, live):")

    def check_places(self, counts: TableCounts) -> None:
        """Rows of each stage by place."""
        for name, stage in self.model.stages.items():
            true = Counter(row.places[name].state for row in self.model.rows)
            ready = counts.ready[name]
            early = "group_whole" if stage.scope in ("group", "chunk") else "only_ready"
            holds(early, ready <= true["ready"], f"{name}: {ready} rows ready, not {true['ready']}")
            holds("ready_is_given", ready >= true["ready"], f"{name}: {ready} rows ready, not {true['ready']}")
            told = (counts.waiting[name], counts.leased[name], counts.acked[name])
            equal(
                "counts_agree",
                told,
                (true["waiting"], true["leased"], true["past"]),
                f"{name} (waiting, leased, past):",
            )

    def pass_group_deadlines(self) -> None:
        while self.model.waiting_groups():
            time.sleep(NEAR_S)
            self.call(self.watcher.expire)
            self.model.pass_group_deadlines()

    def follow_evictions(self) -> None:
        """The newest dead letters are kept; which of those that died together are, the store says."""
        most = self.table.max_dead_rows
        letters = self.watcher.dead_letters("train")
        kept = {id(row) for letter in letters for row in self.rows_of(letter)}
        buried = self.model.buried()
        gone = [row for row in buried if id(row) not in kept]
        holds("dead_letters_kept", len(kept) == len(buried) - len(gone), f"letters of rows that live: {letters}")
        equal("dead_letters_kept", self.watcher.counts("train").dead_letters, len(kept), "rows of dead letters:")
        holds("dead_letters_kept", len(kept) <= most, f"{len(kept)} dead rows are kept of at most {most}")
        holds("dead_letters_kept", not gone or len(buried) > most, f"{gone} are gone, {len(kept)} of {most} kept")
        soonest = min((row.died[1] for row in buried if id(row) in kept), default=inf)
        for row in gone:
            holds("dead_letters_kept", row.died[0] <= soonest + NEAR_S, f"{row} is gone before older ones")
        for letter in letters:
            for row in self.rows_of(letter):
                told = (letter.stage, letter.reason.split("\n")[0])
                equal("dead_letters_kept", told, (row.lost_by, row.end[1].split("\n")[0]), f"{row}:")
        self.model.drop(gone)
