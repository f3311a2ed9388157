"""Whether the answer to a claim is one that the model allows."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from model.invariants import Broken, equal, holds
from model.model import Model, Row

from rlmq.buffer.store import Claim, Stage
from rlmq.common.errors import UsageError

DRAWN = ("uniform", "prioritized")
OVERWHELMING = 1e12  # a rate with which a unit is drawn before all others


@dataclass(frozen=True)
class Ask:
    """The arguments of a claim."""

    stage: str
    most: int
    least: int = 1
    tokens: int | None = None
    version: int | None = None


def judge_claim(model: Model, ask: Ask, claim: Claim | None, refused: UsageError | None) -> list[Row]:
    """The model's rows that the claim brought, when that is right, and right to be refused if it was.

    Raises:
        Broken: an invariant does not hold.
    """
    stage = model.stages[ask.stage]
    if refused is not None:
        large = [unit for unit in first_units(model, stage) if len(unit) > ask.most]
        holds("ready_is_given", bool(large) and stage.scope != "chunk", f"{ask}: {refused}")
        return []
    rows = [] if claim is None else _claimed(model, claim)
    for row in rows:
        state = row.places[stage.name].state
        holds("no_double_lease", state != "leased", f"{row} by {stage.name}")
        holds("only_ready", state == "ready", f"{row} is {state} in {stage.name}, {row.end}")
        fresh = ask.version is None or stage.max_staleness is None or row.version is None
        holds("staleness_bound", fresh or row.version >= ask.version - stage.max_staleness, row)
        holds("uses_bounded", stage.ended or row.uses < model.table.max_uses, f"{row} used {row.uses} times")
    for row in rows:
        split = [r for r in model.unit(row, stage) if r.places[stage.name].state == "ready" and r not in rows]
        holds("group_whole", not split, f"{row} without {split}")
    _judge_choice(model, stage, ask, rows)
    if claim is not None:
        _judge_content(model, stage, claim, rows)
    return rows


def _claimed(model: Model, claim: Claim) -> list[Row]:
    rows = {(row.chunk.name, row.index): row for row in model.rows}
    return [rows[r.chunk, k] for r in claim.ranges for k in range(r.first, r.first + r.count)]


def _judge_content(model: Model, stage: Stage, claim: Claim, rows: list[Row]) -> None:
    told = [(r.delivery, r.use) for r in claim.ranges for _ in range(r.count)]
    true = [(row.places[stage.name].deliveries + 1, row.uses) for row in rows]
    equal("delivery_counted", told, true, f"(delivery, use) of {rows}")
    read = claim.rows.to_pylist()
    equal("payload_intact", read, [{c.name: row.values.get(c.name) for c in model.table.columns} for row in rows])


def _judge_choice(model: Model, stage: Stage, ask: Ask, rows: list[Row]) -> None:
    units = model.ready_units(stage)
    if stage.selector in DRAWN and rows:  # any order is right, so the claim's own
        units.sort(key=lambda unit: unit[0] not in rows)
    if rows:
        _judge_bounds(model, stage, ask, rows, alone=len(rows) == len(units[0]))
    flushed = model.flushed(stage)
    expected = choose(model, stage, ask, units, 1 if flushed else stage.min_batch)
    if rows and not expected:
        raise Broken("claim_bounds", f"{ask}: {rows} against the stage's limits")
    if stage.selector in DRAWN:
        _judge_draw(model, stage, ask, rows, [unit for unit in units if unit[0] not in rows])
        sizes = {(len(unit), _tokens(unit) if ask.tokens else 0) for unit in units}
        if len(sizes) > 1 and not rows:
            return  # whether units of several sizes fill a claim depends on their order
    elif rows:
        equal("fifo_order", rows, expected, f"{ask}:")
    if expected and not rows:
        waived = flushed and stage.min_batch > 1
        raise Broken("flush_flushes" if waived else "ready_is_given", f"{ask}: none of {expected}")


def _judge_draw(model: Model, stage: Stage, ask: Ask, rows: list[Row], left: list[list[Row]]) -> None:
    """A draw ends with a unit that does not fit, and units of overwhelming rate come first."""
    if not rows or not left:
        return
    sure = [unit for unit in left if unit[0].rate == OVERWHELMING and len(unit) <= len(rows)]
    slow = [row for row in rows if row.rate != OVERWHELMING]
    holds("priority_draws", not (sure and slow), f"{ask}: {rows} before {sure}")
    room = min(ask.most, model.allowance(stage))
    ends = any(len(rows) + len(u) > room or _tokens(rows + u) > (ask.tokens or inf) for u in left)
    holds("ready_is_given", ends, f"{ask}: {rows} without {left}")


def _tokens(rows: list[Row]) -> int:
    return sum(row.tokens for row in rows)


def _judge_bounds(model: Model, stage: Stage, ask: Ask, rows: list[Row], *, alone: bool) -> None:
    spent = _tokens(rows)
    holds("claim_bounds", ask.tokens is None or alone or spent <= ask.tokens, f"{ask}: {spent} tokens")
    if stage.scope != "chunk":
        holds("claim_bounds", ask.least <= len(rows) <= ask.most, f"{ask}: {len(rows)} rows")
        holds("claim_bounds", len(rows) <= model.allowance(stage), f"{ask}: {len(rows)} rows")


def first_units(model: Model, stage: Stage) -> list[list[Row]]:
    """Units that may come first."""
    return model.ready_units(stage)[: None if stage.selector in DRAWN else 1]


def choose(model: Model, stage: Stage, ask: Ask, units: list[list[Row]], batch: int) -> list[Row]:
    """The first units that fit; nothing when the stage's limits forbid it, or when those are too few rows."""
    least = ask.most if stage.scope == "batch" else ask.least
    room = min(ask.most, model.allowance(stage))
    if sum(map(len, units)) < max(stage.min_size, batch, least) or model.allowance(stage) < least:
        return []
    if stage.scope == "chunk":
        return units[0] if units else []
    taken: list[Row] = []
    for unit in units:
        tokens = _tokens(taken + unit)
        if len(taken) + len(unit) > room or (taken and ask.tokens is not None and tokens > ask.tokens):
            break
        taken += unit
    return taken if len(taken) >= least else []
