"""The recorder role: writes ended rows to Parquet, aggregates evaluations, draws the reward curve."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlmq.buffer.layout import TOLD
from rlmq.buffer.recording import RecordingWriter, place_of
from rlmq.buffer.store import Claim, ExperienceStore, Interest, TableCounts
from rlmq.buffer.tables import EVAL, TRAIN
from rlmq.common.columns import arrow_schema
from rlmq.common.errors import DeadlineExceeded, Fenced
from rlmq.common.flow import flows_of, sample_columns
from rlmq.common.metrics import ROWS_ACKED
from rlmq.common.worker import CallHandler, Role, WorkerContext
from rlmq.common.worker_loop import raise_if_stopping
from rlmq.consumers.reward_figures import reward_figures

_RECORDER = "recorder"
_EVALUATION = "evaluation"
_MAX_ROWS = 1024
_WAIT_S = 1.0
_EXTEND_EVERY_S = 10.0


class RecorderRole(Role):
    """One process per run; the only writer of its recording."""

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        self._context = context
        self._store = store
        recipe = context.recipe
        flow, *others = flows_of(recipe)
        self._schema = pa.schema([*arrow_schema(sample_columns(flow)), *TOLD])
        self._columns = {TRAIN: self._schema.names}
        for other in others:
            self._columns[other[0].tables[0]] = [*(c.name for c in sample_columns(other)), *TOLD.names]
        segment_bytes = recipe.record.segment_mb << 20
        self._recording = RecordingWriter(
            place_of(context.run, recipe), segment_bytes=segment_bytes, mark=f"{context.incarnation:04d}"
        )

    def handlers(self) -> Mapping[str, CallHandler]:
        """`evaluate`, `flush` and `report`."""
        return {"evaluate": self._evaluate, "flush": self._flush, "report": self._report}

    def work(self) -> bool:
        """Write one claim of ended rows, then ack it; False when there is none."""
        return self._record() > 0

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a row ended."""
        self._context.waits(f"rows of stage {_RECORDER} in table {TRAIN}")
        interests = [Interest(table, _RECORDER) for table in self._columns]
        self._store.wait(interests, timeout_s=timeout_s, wake_fd=wake_fd)

    def close(self) -> None:
        """Nothing is held between claims."""

    def _record(self) -> int:
        """Write one claim of each table; how many rows there were."""
        return sum(self._record_of(table) for table in self._columns)

    def _record_of(self, table: str) -> int:
        claim = self._store.claim(table, _RECORDER, max_rows=_MAX_ROWS, columns=self._columns[table])
        if claim is None:
            return 0
        for step, rows in _by_step(pa.Table.from_batches([claim.rows])):
            self._recording.add(table, step, rows)
        try:
            self._store.ack(claim)
        except Fenced as error:  # written twice then; readers de-duplicate by sample_id
            self._context.log.warning("recorder.lease_lost", error=str(error))
        ROWS_ACKED.labels(table, _RECORDER).inc(claim.count)
        self._context.progress()
        return claim.count

    def _flush(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Write until no ended row is left."""
        rows = 0
        while count := self._record():
            rows += count
            raise_if_stopping(self._context)
        return {"rows": rows}

    def _report(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Draw the reward curve; without metrics there is none."""
        from rlmq.consumers.report import draw_reward_curve

        drawn = draw_reward_curve(self._context.run)
        return {"curve": str(self._context.run.curve) if drawn else ""}

    def _evaluate(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for all rows of an evaluation, write them, end them, and return their means.

        Args:
            args: `step`, and `samples`: rows that were admitted for it.

        Returns:
            `reward_mean`, `response_tokens_mean`, `samples`, `no_verdict`, and `sets`: the same per evaluation
            set. A mean over no row is None. `no_verdict` counts rows without a reward, dead ones included.
        """
        step, expected = int(args["step"]), int(args["samples"])
        self._context.activity("evaluating")
        written = any(one.first_step == step for one in self._recording.segments(EVAL))
        known = self._recording.read(EVAL, steps=[step]) if written else None
        claims, rows = self._collect(step, expected if known is None else 0)
        if known is None:
            rows = _ended(rows.sort_by("sample_id"), step)
            self._recording.put(EVAL, step, rows)
        else:
            rows = known  # a crash came between the file and the rows' end states
        for claim in claims:
            self._end(claim)
        return aggregate(rows, expected)

    def _collect(self, step: int, expected: int) -> tuple[list[Claim], pa.Table]:
        """Claim evaluation rows until no live row is left unclaimed."""
        claims: list[Claim] = []
        held = 0
        seen: TableCounts | None = None
        moved_at = extended_at = time.monotonic()
        while True:
            for earlier in claims if self._context.stopping() else ():
                self._store.release(earlier)
            raise_if_stopping(self._context)
            claim = self._store.claim(EVAL, _EVALUATION, max_rows=_MAX_ROWS, columns=self._schema.names)
            now = time.monotonic()
            if claim is not None:
                claims.append(claim)
                held += claim.count
                moved_at = now
                self._context.progress()
                continue
            counts = self._store.counts(EVAL)
            if held >= counts.live:
                break
            if counts != seen:  # upstream rows move on
                seen, moved_at = counts, now
            if now - extended_at >= _EXTEND_EVERY_S:
                claims = [earlier for earlier in claims if self._extended(earlier)]
                held = sum(earlier.count for earlier in claims)
                extended_at = now
            limit_s = self._context.recipe.deadlines.step_s
            if now - moved_at > limit_s:
                waiting = ", ".join(f"{stage}: {count} ready" for stage, count in counts.ready.items() if count)
                raise DeadlineExceeded(
                    f"evaluation of step {step}",
                    got=f"{held} of {expected} rows, none for {limit_s:.0f} s ({waiting or 'none ready anywhere'})",
                    expected="all rows scored",
                    remedy="Read the logs of the rollout and reward workers",
                )
            self._context.waits(f"{expected - held} rows of stage {_EVALUATION} in table {EVAL}")
            self._store.wait([Interest(EVAL, _EVALUATION)], timeout_s=_WAIT_S)
        table = pa.Table.from_batches([claim.rows for claim in claims], schema=self._schema)
        return claims, table.filter(pc.equal(table["step"], step))

    def _extended(self, claim: Claim) -> bool:
        """False when the lease ran out: the rows come back to be claimed anew."""
        try:
            self._store.extend(claim)
        except Fenced as error:
            self._context.log.warning("recorder.lease_lost", error=str(error))
            return False
        return True

    def _end(self, claim: Claim) -> None:
        rewards = claim.rows.column("reward")
        scored = [index for index in range(claim.count) if rewards[index].is_valid]
        unscored = [index for index in range(claim.count) if not rewards[index].is_valid]
        if scored:
            self._store.finish(claim, "done", rows=scored)
        if unscored:
            self._store.finish(claim, "filtered", "no_verdict", rows=unscored)


def aggregate(rows: pa.Table, expected: int) -> dict[str, Any]:
    """Means of an evaluation, overall and per set, independent of the order of the rows.

    Args:
        rows: `source`, `reward` (null: no verdict), `response_ids`, and those that `reward_figures` reads.
        expected: rows that were admitted; those that are missing count as `no_verdict`.
    """
    sources: list[str] = rows["source"].to_pylist()
    rewards: list[float | None] = rows["reward"].to_pylist()
    lengths: list[int | None] = pc.list_value_length(rows["response_ids"]).to_pylist()
    figures = list(zip(sources, rewards, lengths, strict=True))
    sets = {
        name: {
            **_figures([(reward, length) for source, reward, length in figures if source == name]),
            **_parts(rows.filter(pc.equal(rows["source"], name))),
        }
        for name in sorted(set(sources))
    }
    overall = _figures([(reward, length) for _, reward, length in figures])
    overall["no_verdict"] += max(0, expected - len(rewards))
    return {**overall, "sets": sets}


def _parts(rows: pa.Table) -> dict[str, float]:
    """Means of what single scorers gave."""
    return reward_figures({name: rows[name].to_pylist() for name in rows.column_names if name.startswith("reward")})


def _figures(rows: Sequence[tuple[float | None, int | None]]) -> dict[str, Any]:
    rewards = [reward for reward, _ in rows if reward is not None]
    return {
        "reward_mean": _mean(rewards),
        "response_tokens_mean": _mean([length for _, length in rows if length is not None]),
        "samples": len(rewards),
        "no_verdict": len(rows) - len(rewards),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _by_step(rows: pa.Table) -> Iterable[tuple[int, pa.Table]]:
    for step in sorted(set(rows["step"].to_pylist())):
        yield step, rows.filter(pc.equal(rows["step"], step))


def _ended(rows: pa.Table, step: int) -> pa.Table:
    """Rows of an evaluation, which end after they are written, with what `_end` will say of them."""
    scored = pc.is_valid(rows["reward"])
    columns = {
        "end_state": pc.if_else(scored, "done", "filtered"),
        "end_reason": pc.if_else(scored, "", "no_verdict"),
        "end_step": pa.array([step] * rows.num_rows),
    }
    for name, values in columns.items():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), values.cast(rows.schema.field(place).type))
    return rows
