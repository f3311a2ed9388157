"""The reward role: claims rows that have a response, runs the reward functions, writes the weighted sum.

A row's reward is the sum of weight times value over the functions that gave it one, as in TRL: a function that
returned None does not count for that row. Where no function gave a value there is *no verdict*: in `train` the row
ends as `filtered(no_verdict)`; in `eval` it goes on with a null reward, and the evaluation counts it. A row of
`train` for which a function raises, as often as `stages.reward.max_deliveries` says, is a dead letter.

An operator may change weights (`rlmq set reward.NAME.weight=W`); each counts for rows of a step and later ones, so
that a row's reward depends on its step and not on when it was scored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rlmq.buffer.store import Claim, ExperienceStore, Facts, Interest
from rlmq.buffer.tables import EVAL, TRAIN
from rlmq.common.algorithms import algorithm_of
from rlmq.common.columns import LEARNED, arrow_schema, reward_columns, without
from rlmq.common.errors import Fenced, Terminated
from rlmq.common.flow import flow_of, flow_table
from rlmq.common.metrics import ROWS_ACKED, ROWS_WITHOUT_VERDICT, ROWS_WRITTEN
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.recipe.schema import Recipe
from rlmq.common.user_code import is_spec, source_hash
from rlmq.common.worker import CallHandler, Role, WorkerContext
from rlmq.common.worker_loop import raise_if_stopping
from rlmq.producers.groups import GroupStage
from rlmq.producers.process_runner import ProcessRewardRunner
from rlmq.producers.reward_runner import ColumnRunner, RewardRunner, refuse_the_clock, reward_row
from rlmq.producers.reward_values import total
from rlmq.producers.reward_weights import StepWeights, Weights

_STAGE = "reward"
_COLUMNS = ("response_text", "truncated", "prompt_text", "record", "step")
_EXTEND_EVERY_S = 5.0
_TAG_CHARACTERS = 200  # most that the lineage keeps
_REASONS_TOLD = 50  # distinct ones, so that a function with ever new messages does not fill the disk


class RewardRole(Role):
    """Scores rows in the order in which they are claimed.

    Raises:
        UsageError: a reward function that cannot be found, imported or called.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        self._context = context
        self._store = store
        recipe = context.recipe
        self._weights = StepWeights(context)
        self._ensembles = [block.ensemble for block in recipe.reward]
        self._objectives = [block.objective for block in recipe.reward]
        self._penalty = recipe.rollout.truncation_penalty if recipe.rollout.truncated == "penalise" else 0.0
        self._schema = arrow_schema(reward_columns(recipe.reward_names, cost=recipe.has_cost))
        # A generated chunk at once: fewer calls, and a function that compares samples sees whole groups.
        # Where there are several workers, each claims its part of one.
        group, chunk = recipe.algorithm.group_size, recipe.rollout.batch_size_per_device
        part = -(-chunk // recipe.placement.reward.workers)
        self._max_rows = -(-max(part, recipe.stages.reward.min_batch) // group) * group
        specs = [block.source for block in recipe.reward]
        specs += [recipe.reward_controller] if recipe.reward_controller is not None else []
        hashes = [source_hash(spec, context.recipe_folder) for spec in specs if is_spec(spec)]
        self._tag = f"config {recipe_hash(recipe)} functions {' '.join(hashes)}"
        self._groups = GroupStage(context, store, algorithm_of(recipe), f"config {recipe_hash(recipe)}")
        self._columns = (*_COLUMNS, *columns_of_nodes(recipe))
        self._claim: Claim | None = None
        self._extended_at = 0.0
        self._scoring = ""
        self._reasons: set[str] = set()
        self._failed_rows = 0
        self._last_reason = ""
        self._runners: list[RewardRunner] = []
        try:
            for block, name in zip(recipe.reward, recipe.reward_names, strict=True):
                if block.column is not None:
                    self._runners.append(ColumnRunner(name, block.column))
                    continue
                self._runners.append(
                    ProcessRewardRunner(
                        block,
                        name,
                        context.recipe_folder,
                        while_waiting=self._extend,
                        start_s=recipe.deadlines.start_s,
                        most_calls=recipe.stages.reward.max_deliveries,
                    )
                )
        except BaseException:
            self.close()
            raise

    def handlers(self) -> Mapping[str, CallHandler]:
        """`failures`: rows without a verdict so far, and the newest reason."""
        return {"failures": self._failures}

    def work(self) -> bool:
        """Judge groups that are scored, or score one claim; False when no row is ready."""
        if self._groups.work():
            return True
        for table in (TRAIN, EVAL):
            claim = self._store.claim(table, _STAGE, max_rows=self._max_rows, columns=self._columns)
            if claim is not None:
                self._context.activity("scoring")
                try:
                    self._score(claim)
                except Fenced as error:  # somebody else has the rows: their verdict counts
                    self._context.log.warning("reward.lease_lost", table=table, error=str(error))
                except Terminated:
                    self._store.release(claim)
                    raise
                finally:
                    self._claim = None
                return True
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a row may be ready."""
        self._context.waits(f"rows of stage {_STAGE} in table {TRAIN}")
        interests = [*self._groups.interests, *(Interest(table, _STAGE) for table in (TRAIN, EVAL))]
        self._store.wait(interests, timeout_s=timeout_s, wake_fd=wake_fd)

    def close(self) -> None:
        """End the functions' processes."""
        for runner in self._runners:
            runner.close()

    def _failures(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"count": self._failed_rows, "last": self._last_reason}

    def _score(self, claim: Claim) -> None:
        began = time.monotonic()
        recipe = self._context.recipe
        self._claim, self._extended_at = claim, began
        records = claim.rows.to_pylist()
        rows = [reward_row(record, self._columns[len(_COLUMNS) :]) for record in records]
        parts: list[list[float | None]] = []
        raised: dict[int, str] = {}
        fields: list[dict[str, Any]] = [{} for _ in rows]
        for runner, block, name in zip(self._runners, recipe.reward, recipe.reward_names, strict=True):
            self._scoring = f"reward function {name}, at most {block.timeout_s:g} s a call"
            self._context.waits(self._scoring)
            verdicts = runner.score(rows)
            if recipe.deterministic:
                refuse_the_clock(verdicts, f"reward function {name}", block.timeout_s)
            for reason in [verdicts.failure] if verdicts.failure else verdicts.notes:
                self._tell(reason)
            parts.append(verdicts.values)
            raised.update(verdicts.raised)
            for row, own in zip(fields, verdicts.fields, strict=bool(verdicts.fields)):
                row.update({name: own} if own else {})
            self._extend(force=True)
        weights = [self._weights.of(record["step"]) for record in records]
        totals = [
            self._total(weights[index], [part[index] for part in parts], truncated=bool(record["truncated"]))
            for index, record in enumerate(records)
        ]
        costs = [
            self._sum("cost", weights[index], [part[index] for part in parts]) for index in range(len(records))
        ]
        sums = [totals, costs] if recipe.has_cost else [totals]
        texts = [json.dumps(row) if row else None for row in fields]
        self._end_dead(claim, raised)
        self._write(claim, sums, parts, texts, raised, Facts(tag=self._tag_with(weights)))
        self._context.progress()
        self._context.log.info(
            "reward.scored",
            table=claim.table,
            rows=claim.count,
            no_verdict=totals.count(None),
            seconds=round(time.monotonic() - began, 3),
        )

    def _tag_with(self, weights: Sequence[Weights]) -> str:
        """For the lineage: weights that an operator changed, the recipe's hash, the functions' hashes."""
        changed = {one for one in weights if one != self._weights.of_recipe}
        told = "".join(f"weights {' '.join(f'{weight:g}' for weight in one)} " for one in sorted(changed))
        return (told + self._tag)[:_TAG_CHARACTERS]

    def _total(self, weights: Weights, values: Sequence[float | None], *, truncated: bool) -> float | None:
        """The weighted sum over the functions that gave a value, less the penalty of a cut response."""
        value = self._sum("reward", weights, values)
        return None if value is None else value - (self._penalty if truncated else 0.0)

    def _sum(self, objective: str, weights: Weights, values: Sequence[float | None]) -> float | None:
        """The weighted sum over the functions of one objective."""
        pairs = zip(self._objectives, values, strict=True)
        return total(weights, [value if own == objective else None for own, value in pairs], self._ensembles)

    def _end_dead(self, claim: Claim, raised: Mapping[int, str]) -> None:
        """Rows of an evaluation go on without a verdict, which it counts."""
        for row, trace in raised.items() if claim.table == TRAIN else ():
            self._store.finish(claim, "dead", trace, rows=[row])

    def _write(
        self,
        claim: Claim,
        sums: list[list[float | None]],
        parts: list[list[float | None]],
        fields: list[str | None],
        raised: Mapping[int, str],
        facts: Facts,
    ) -> None:
        none = {index for index in range(claim.count) if any(values[index] is None for values in sums)}
        missing = sorted(none | set(raised)) if claim.table == TRAIN else sorted(none)
        if missing:
            self._failed_rows += len(missing)
            ROWS_WITHOUT_VERDICT.labels(claim.table).inc(len(missing))
        ended = (
            missing if flow_table(claim.table) == TRAIN else []
        )  # rows that the recorder may have seen before the write
        arrays = [pa.array(without(values, ended), pa.float64()) for values in (*sums, *parts)]
        arrays.append(pa.array(without(fields, ended), pa.string()))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        if ended:
            # Before the others' columns, so that no stage ever sees such a row as scored.
            self._store.finish(claim, "filtered", "no_verdict", rows=[row for row in ended if row not in raised])
        if len(ended) < claim.count:
            self._store.write(claim, batch, ack=True, facts=facts)
        ROWS_WRITTEN.labels(claim.table, _STAGE).inc(claim.count)
        ROWS_ACKED.labels(claim.table, _STAGE).inc(claim.count)

    def _extend(self, *, force: bool = False) -> None:
        """Keep the lease while a function works: each call has a time limit, so this ends."""
        if not force:
            raise_if_stopping(self._context)
        now = time.monotonic()
        if self._claim is not None and (force or now - self._extended_at >= _EXTEND_EVERY_S):
            self._store.extend(self._claim)
            self._context.progress()
            self._context.waits(self._scoring)
            self._extended_at = now

    def _tell(self, reason: str) -> None:
        self._last_reason = reason
        if reason not in self._reasons and len(self._reasons) < _REASONS_TOLD:
            self._reasons.add(reason)
            self._context.log.warning("reward.no_verdict", reason=reason)


def columns_of_nodes(recipe: Recipe) -> tuple[str, ...]:
    """What nodes and the reward model write that the reward waits for: its functions get it by name."""
    needs = {column for node in flow_of(recipe) if node.name == _STAGE for column in node.needs}
    written = [*(node.writes for node in recipe.nodes), (LEARNED,)]
    return tuple(column for writes in written if needs & set(writes) for column in writes)
