"""Random sequences of verbs against a plain model, row by row, without ranges, vectors or counters."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlmq.buffer.keys import TABLE_SUFFIXES, table_prefix
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import RowRange, Stage, Table
from rlmq.common.columns import Column
from rlmq.common.errors import Fenced, IntegrityError, UsageError

_MAX_DELIVERIES = 2
_COLUMNS = (
    Column("x", pa.int64(), "source"),
    Column("y", pa.int64(), "a"),
    Column("y2", pa.int64(), "a"),
    Column("z", pa.int64(), "b"),
)
_NEEDS = {"a": ("x",), "b": ("y", "y2"), "end": ("x", "z"), "recorder": ()}
_ORDINARY = ("a", "b", "end")
_INDEX = st.integers(0, 1000)


@dataclass
class Row:
    """One row as a user would describe it."""

    chunk: str
    index: int
    group: int
    columns: dict[str, int]
    stages: dict[str, str] = field(default_factory=lambda: dict.fromkeys(_NEEDS, "waiting"))
    deliveries: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_NEEDS, 0))
    ended: str | None = None
    step: int = -1


class StoreMachine(RuleBasedStateMachine):
    """Drives a store and the model side by side."""

    url = ""

    def __init__(self):
        super().__init__()
        self.client = redis.Redis.from_url(self.url)
        self.client.flushall()
        self.rows: list[Row] = []
        self.claims = []  # (claim, its rows); `valid` holds the leases that are
        self.valid: set[str] = set()
        self.over: set[str] = set()
        self.ended: dict[str, int] = {}
        self.acked = dict.fromkeys(_NEEDS, 0)
        self.sequence, self.value, self.redelivered, self.durable = 0, 0, 0, -1

    @initialize(
        a=st.sampled_from(["row", "group", "chunk"]),
        b=st.sampled_from(["row", "group"]),
        end=st.sampled_from(["row", "group", "batch"]),
    )
    def open(self, a, b, end):
        self.scope = {"a": a, "b": b, "end": end, "recorder": "row"}
        stages = tuple(
            Stage(name, needs, self.scope[name], 600.0, _MAX_DELIVERIES, ended=name == "recorder")
            for name, needs in _NEEDS.items()
        )
        self.store = RedisStore(self.client, run_id="model", worker="w0")
        self.store.open([Table("train", _COLUMNS, stages)])

    # -- the model -------------------------------------------------------------------------------------------

    def unit(self, row, stage):
        """Rows that the stage claims together with `row`."""
        scope = self.scope[stage]
        if scope in ("row", "batch"):
            return [row]
        siblings = [r for r in self.rows if r.chunk == row.chunk]
        return siblings if scope == "chunk" else [r for r in siblings if r.group == row.group]

    def settle(self):
        for stage in _ORDINARY:
            missing = [
                r for r in self.rows
                if r.stages[stage] == "waiting" and not r.ended and not set(_NEEDS[stage]) <= set(r.columns)
            ]  # fmt: skip
            for row in self.rows:
                waits = row.stages[stage] == "waiting" and not row.ended
                if waits and not any(other in missing for other in self.unit(row, stage)):
                    row.stages[stage] = "ready"

    def end(self, row, label, step, actor):
        if row.ended:
            return
        row.ended, row.step = label.split("(")[0], step
        self.ended[label] = self.ended.get(label, 0) + 1
        for stage in _ORDINARY:
            if row.stages[stage] in ("waiting", "ready", "leased"):
                row.stages[stage] = "acked" if stage == actor else "skipped"
                self.acked[stage] += stage == actor
        row.stages["recorder"] = "ready"

    def ack_rows(self, claim, rows):
        for row in rows:
            if row.stages[claim.stage] == "leased":
                row.stages[claim.stage] = "acked"
                self.acked[claim.stage] += 1
            if claim.stage != "recorder" and all(row.stages[s] == "acked" for s in _ORDINARY):
                self.end(row, "done", -1, None)

    def give_back(self, claim, rows, counted, label):
        for row in rows:
            if row.stages[claim.stage] != "leased":
                continue
            if counted and claim.stage != "recorder" and row.deliveries[claim.stage] >= _MAX_DELIVERIES:
                self.end(row, label, -1, None)
                continue
            row.stages[claim.stage] = "ready"
            if counted:
                self.redelivered += 1
            else:
                row.deliveries[claim.stage] -= 1

    def held(self, row):
        durable = row.ended != "trained" or row.step <= self.durable
        return not (row.ended and durable and row.stages["recorder"] == "acked")

    def tidy(self):
        self.settle()
        kept = {r.chunk for r in self.rows if self.held(r)}
        self.rows = [r for r in self.rows if r.chunk in kept]

    def expected_claim(self, stage, most, least):
        """Rows that a claim must bring; `UsageError` when the first group is too large."""
        ready = [r for r in self.rows if r.stages[stage] == "ready"]
        if self.scope[stage] == "batch":
            least = most
        if not ready or len(ready) < least:
            return []
        if self.scope[stage] == "chunk":
            return [r for r in ready if r.chunk == ready[0].chunk]
        if self.scope[stage] != "group":
            return ready[:most]
        taken = []
        for row in ready:
            if row in taken:
                continue
            members = [r for r in self.unit(row, stage) if r in ready]
            if len(taken) + len(members) > most:
                if not taken:
                    return UsageError
                break
            taken += members
        return taken if len(taken) >= least else []

    # -- verbs -----------------------------------------------------------------------------------------------

    @rule(groups=st.integers(1, 3), size=st.integers(1, 4), early=st.booleans())
    def put(self, groups, size, early):
        count = groups * size
        batch = {"x": [self.value + k for k in range(count)]}
        if early:
            batch["y"] = [self.value + 500 + k for k in range(count)]
        self.value += 1000
        rows = pa.record_batch({name: pa.array(values, pa.int64()) for name, values in batch.items()})
        assert self.store.put("train", rows, producer="p", sequence=self.sequence, group_size=size)
        assert not self.store.put("train", rows, producer="p", sequence=self.sequence, group_size=size)
        for k in range(count):
            columns = {name: values[k] for name, values in batch.items()}
            self.rows.append(Row(f"p.{self.sequence}", k, k // size, columns))
        self.sequence += 1
        self.tidy()

    @rule(stage=st.sampled_from(list(_NEEDS)), most=st.integers(1, 7), least=st.integers(1, 7))
    def claim(self, stage, most, least):
        least = min(most, least)
        expected = self.expected_claim(stage, most, least)
        if expected is UsageError:
            with pytest.raises(UsageError):
                self.store.claim("train", stage, max_rows=most, min_rows=least)
            return
        claim = self.store.claim("train", stage, max_rows=most, min_rows=least)
        print(f"claim {stage} {most} {least}: {claim and claim.ranges}")
        if claim is None:
            assert expected == []
            return
        named = [(r.chunk, k, r.delivery) for r in claim.ranges for k in range(r.first, r.first + r.count)]
        assert named == [(r.chunk, r.index, min(r.deliveries[stage] + 1, 40)) for r in expected]
        assert claim.rows.to_pylist() == [{c.name: r.columns.get(c.name) for c in _COLUMNS} for r in expected]
        for row in expected:
            row.stages[stage] = "leased"
            row.deliveries[stage] += 1
        self.claims.append((claim, expected))
        self.valid.add(claim.lease)

    @rule(stage=st.sampled_from(["a", "b", "recorder"]), most=st.integers(1, 20))
    def work(self, stage, most):
        """What a healthy worker does: claim, write all that it writes, ack."""
        before = len(self.claims)
        self.claim(stage, most, 1)
        if len(self.claims) == before:
            return
        if stage == "recorder":
            self.end_claim(before, "ack")
        else:
            self.write(before, ("y", "y2") if stage == "a" else ("z",), True)

    @rule(most=st.integers(1, 20), step=st.integers(0, 5))
    def train(self, most, step):
        """What a healthy trainer does."""
        before = len(self.claims)
        self.claim("end", most, 1)
        if len(self.claims) > before:
            self.finish(before, "trained", None, step)

    def some_claim(self, which):
        return self.claims[which % len(self.claims)]

    def fenced_unless_valid(self, claim, action):
        """Run the action; True when the model must follow."""
        if claim.lease in self.valid:
            action()
            return True
        with pytest.raises(Fenced):
            action()
        return False

    @precondition(lambda self: self.claims)
    @rule(which=_INDEX, names=st.sampled_from([("y", "y2"), ("y2",), ("y",), ("z",)]), ack=st.booleans())
    def write(self, which, names, ack):
        claim, rows = self.some_claim(which)
        values = {name: [self.value + 10 * k for k in range(claim.count)] for name in names}
        self.value += 1000
        batch = pa.record_batch({name: pa.array(v, pa.int64()) for name, v in values.items()})
        if self.fenced_unless_valid(claim, lambda: self.store.write(claim, batch, ack=ack)):
            for k, row in enumerate(rows):
                row.columns.update({name: values[name][k] for name in names})
            self.settle()
            if ack:
                self.ack_rows(claim, rows)
                self.valid.discard(claim.lease)
            self.tidy()

    @precondition(lambda self: self.claims)
    @rule(which=_INDEX, verb=st.sampled_from(["ack", "nack", "release", "extend"]))
    def end_claim(self, which, verb):
        claim, rows = self.some_claim(which)
        if claim.lease in self.over and verb != "extend":
            self.store.ack(claim)
            return
        action = {"nack": lambda: self.store.nack(claim, "bad")}.get(verb, lambda: getattr(self.store, verb)(claim))
        if self.fenced_unless_valid(claim, action) and verb != "extend":
            self.valid.discard(claim.lease)
            if verb == "ack":
                self.ack_rows(claim, rows)
            else:
                self.give_back(claim, rows, verb == "nack", "dead(bad)")
            self.tidy()

    @precondition(lambda self: self.claims)
    @rule(
        which=_INDEX,
        state=st.sampled_from(["trained", "filtered", "done"]),
        some=st.none() | st.sets(st.integers(0, 6), min_size=1),
        step=st.integers(0, 5),
    )
    def finish(self, which, state, some, step):
        claim, rows = self.some_claim(which)
        indices = None if some is None else sorted({k % claim.count for k in some})
        step = step if state == "trained" else -1

        def action():
            self.store.finish(claim, state, rows=indices, step=step)

        if claim.lease in self.over:
            action()
        elif self.fenced_unless_valid(claim, action):
            for row in rows if indices is None else [rows[k] for k in indices]:
                if row.stages[claim.stage] == "leased":
                    if claim.stage == "recorder":
                        self.ack_rows(claim, [row])
                    else:
                        self.end(row, state, step, claim.stage)
            if all(row.stages[claim.stage] != "leased" for row in rows):
                self.valid.discard(claim.lease)
                self.over.add(claim.lease)
            self.tidy()

    @precondition(lambda self: self.valid)
    @rule(which=_INDEX)
    def expire(self, which):
        lease = sorted(self.valid)[which % len(self.valid)]
        claim, rows = next(entry for entry in self.claims if entry[0].lease == lease)
        self.client.zadd(table_prefix("model", "train") + TABLE_SUFFIXES["deadlines"], {lease: 0})
        assert self.store.expire() == 1
        self.valid.discard(lease)
        self.give_back(claim, rows, True, "dead(lease expired)")
        self.tidy()

    @rule(step=st.integers(0, 5))
    def advance(self, step):
        self.store.advance(step)
        self.durable = max(self.durable, step)
        self.tidy()

    @precondition(lambda self: self.rows)
    @rule(which=_INDEX, count=st.integers(1, 4), step=st.integers(0, 5))
    def finish_logged(self, which, count, step):
        start = self.rows[which % len(self.rows)]
        rows = [r for r in self.rows if r.chunk == start.chunk and start.index <= r.index < start.index + count]
        ranges = [RowRange(start.chunk, start.index, len(rows))]
        if any(row.ended not in (None, "trained") for row in rows):
            with pytest.raises(IntegrityError):
                self.store.finish_logged("train", "end", ranges, step=step)
            return
        self.store.finish_logged("train", "end", ranges, step=step)
        for row in rows:
            self.end(row, "trained", step, "end")
        self.tidy()

    # -- what must agree at every moment ---------------------------------------------------------------------

    @invariant()
    def counters_agree(self):
        if not hasattr(self, "store"):
            return
        counts = self.store.counts("train")
        live = [r for r in self.rows if not r.ended]
        assert (counts.live, counts.redelivered, counts.ended) == (len(live), self.redelivered, self.ended)
        for stage in _NEEDS:
            assert counts.ready[stage] == sum(r.stages[stage] == "ready" for r in self.rows), stage
            assert counts.acked[stage] == self.acked[stage], stage
            assert counts.leased[stage] == sum(r.stages[stage] == "leased" for r in self.rows), stage

    @invariant()
    def only_held_chunks_have_keys(self):
        names = [key.decode() for key in self.client.keys("*")]
        chunks = {name.split(":chunk:")[1] for name in names if ":chunk:" in name}
        assert chunks == {r.chunk for r in self.rows}
        assert {name.split(":payload:")[1].split("/")[0] for name in names if ":payload:" in name} == chunks

    @invariant()
    def payload_bytes_agree(self):
        if hasattr(self, "store"):
            sizes = [self.client.strlen(key) for key in self.client.keys("*:payload:*")]
            assert self.store.counts("train").payload_bytes == sum(sizes)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
        self.client.close()


def _walk(machine, rng, steps):
    """Weighted random verbs: goes deeper than hypothesis does in the same time, without shrinking."""
    machine.open(
        a=rng.choice(["row", "row", "group", "chunk"]),
        b=rng.choice(["row", "group", "group"]),
        end=rng.choice(["row", "group", "batch"]),
    )
    names = [("y", "y2"), ("y2",), ("y",), ("z",)]
    any_claim = {
        "write": lambda k: machine.write(k, rng.choice(names), rng.random() < 0.5),
        "end": lambda k: machine.end_claim(k, rng.choice(["ack", "nack", "nack", "release", "extend"])),
        "finish": lambda k: machine.finish(
            k,
            rng.choice(["trained", "filtered", "done"]),
            rng.choice([None, {rng.randrange(7) for _ in range(2)}]),
            rng.randrange(6),
        ),
    }
    verbs = {
        lambda: machine.put(rng.randint(1, 3), rng.randint(1, 4), rng.random() < 0.2): 3,
        lambda: machine.claim(rng.choice(list(_NEEDS)), rng.randint(1, 7), rng.randint(1, 7)): 6,
        lambda: machine.work(rng.choice(["a", "b", "recorder"]), rng.randint(1, 20)): 6,
        lambda: machine.train(rng.randint(1, 20), max(0, machine.durable + rng.randint(0, 2))): 3,
        lambda: machine.claims and any_claim[rng.choice(list(any_claim))](-rng.randint(1, 4)): 8,
        lambda: machine.valid and machine.expire(rng.randrange(1000)): 1,
        lambda: machine.advance(max(0, machine.durable + rng.randint(-1, 1))): 1,
        lambda: machine.rows and machine.finish_logged(rng.randrange(1000), rng.randint(1, 4), rng.randrange(6)): 1,
    }
    for _ in range(steps):
        rng.choices(list(verbs), list(verbs.values()))[0]()
        machine.counters_agree()
        machine.only_held_chunks_have_keys()
        machine.payload_bytes_agree()


@pytest.mark.parametrize("seed", range(24))
def test_a_long_random_walk_agrees_with_the_model(redis_url, seed):
    StoreMachine.url = redis_url
    machine = StoreMachine()
    try:
        _walk(machine, random.Random(seed), 120)
    finally:
        machine.teardown()


def test_random_verbs_agree_with_the_model(redis_url):
    StoreMachine.url = redis_url
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=30, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
