"""The stage `groups`: whole scored groups get the columns of the algorithm that are of a group, or are dropped.

consumes: groups of the table `train` whose rows have a reward or have ended
produces: the algorithm's group columns and `kept`, without which no row is trained on; rows that end as
    `filtered(baseline)`, `filtered(no_baseline)`, or for the algorithm's own reason
waits for: the reward of every row of a group

Rows end between two writes: first the columns, which a redelivered group needs because its greedy row may have
ended, last `kept`, which lets the others go on. A worker may be killed between any two of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rlmq.buffer.store import Claim, ExperienceStore, Facts, Interest
from rlmq.buffer.tables import TRAIN
from rlmq.common.algorithms.algorithm import Algorithm
from rlmq.common.columns import KEPT_COLUMNS, arrow_schema, group_columns, is_greedy
from rlmq.common.errors import Fenced
from rlmq.common.metrics import ROWS_ACKED, ROWS_WRITTEN
from rlmq.common.worker import WorkerContext

STAGE = "groups"
BASELINE = "baseline"


class GroupStage:
    """Row work of the reward role's workers; algorithms that ask for no column of a group have none."""

    def __init__(self, context: WorkerContext, store: ExperienceStore, algorithm: Algorithm, tag: str) -> None:
        self._context = context
        self._store = store
        self._algorithm = algorithm
        self._names = algorithm.group_columns
        self._facts = Facts(tag=tag)
        recipe = context.recipe
        members = recipe.algorithm.group_size + algorithm.greedy_baseline
        self._max_rows = max(1, recipe.rollout.batch_size_per_device // members) * members

    @property
    def interests(self) -> list[Interest]:
        """What there is to wait for."""
        return [Interest(TRAIN, STAGE)] if self._names else []

    def work(self) -> bool:
        """Work on one claim; False when no group is complete."""
        if not self._names:
            return False
        columns = ("sample_id", "group_id", "reward", *self._names)
        claim = self._store.claim(TRAIN, STAGE, max_rows=self._max_rows, columns=columns)
        if claim is None:
            return False
        self._context.activity("scoring")
        try:
            self._pass_on(claim)
        except Fenced as error:  # another worker has the groups: it finds the same
            self._context.log.warning("groups.lease_lost", error=str(error))
            return True
        ROWS_WRITTEN.labels(TRAIN, STAGE).inc(claim.count)
        ROWS_ACKED.labels(TRAIN, STAGE).inc(claim.count)
        self._context.progress()
        return True

    def _pass_on(self, claim: Claim) -> None:
        rows: list[dict[str, Any]] = claim.rows.to_pylist()
        groups: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row["group_id"], []).append(index)
        ends: dict[int, str] = {}
        for members in groups.values():
            ends |= self._judge(members, rows)
        columns = pa.RecordBatch.from_pylist(
            [{name: row[name] for name in self._names} for row in rows],
            schema=arrow_schema(group_columns(self._names)),
        )
        self._store.write(claim, columns, facts=self._facts)
        for reason in sorted(set(ends.values())):
            ended = [index for index, why in ends.items() if why == reason]
            self._store.finish(claim, "filtered", reason, rows=ended)
        if len(ends) < claim.count:
            kept = [{"kept": None if index in ends else True} for index in range(claim.count)]
            batch = pa.RecordBatch.from_pylist(kept, schema=arrow_schema(KEPT_COLUMNS))
            self._store.write(claim, batch, ack=True, facts=self._facts)

    def _judge(self, members: Sequence[int], rows: Sequence[dict[str, Any]]) -> dict[int, str]:
        """Set the columns of a group's rows; which of them end, and why.

        Without its greedy row, a group that has its columns was judged before; else that row had no verdict.
        """
        greedy = [index for index in members if is_greedy(rows[index]["sample_id"])]
        samples = [index for index in members if index not in greedy]
        if not samples:
            return dict.fromkeys(greedy, BASELINE)
        if self._algorithm.greedy_baseline and not greedy:
            judged = rows[samples[0]][self._names[0]] is not None
            return {} if judged else dict.fromkeys(members, "no_baseline")
        rewards = np.array([rows[index]["reward"] for index in samples], dtype=np.float64)
        columns, reason = self._algorithm.group(rewards, rows[greedy[0]]["reward"] if greedy else None)
        for index in members:
            rows[index].update(columns)
        return dict.fromkeys(members, reason) if reason else dict.fromkeys(greedy, BASELINE)
