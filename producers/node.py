"""The role of a user's node: claims rows that have what it reads, runs its function or scorer, writes.

What the function raises, or returns in another form than the recipe says, is the end of the claim: the rows are
delivered again, and after `max_deliveries` they are dead letters with the traceback.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rlmq.buffer.store import Claim, ExperienceStore, Facts, Interest
from rlmq.buffer.tables import EVAL, TRAIN
from rlmq.common.columns import arrow_schema, without
from rlmq.common.errors import DeadlineExceeded, Fenced, Terminated
from rlmq.common.flow_nodes import node_columns
from rlmq.common.metrics import ROWS_ACKED, ROWS_WRITTEN
from rlmq.common.node_function import node_function
from rlmq.common.node_rows import NodeRow, TakenRows, to_columns
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.user_code import is_spec, source_hash
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.common.worker_loop import raise_if_stopping
from rlmq.producers.process_runner import ProcessRewardRunner
from rlmq.producers.reward_runner import refuse_the_clock, reward_row

_SCORED = ("response_text", "prompt_text", "record")
"""What a scorer gets of each row beside the columns that the node reads."""
_EXTEND_S = 1.0
"""A lease is extended no more often."""


class NodeRole:
    """Runs one node's function in this process.

    Raises:
        UsageError: a function that cannot be found or imported, or a flow without this node.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        self._context = context
        self._store = store
        recipe = context.recipe
        self._block = next(block for block in recipe.nodes if block.name == context.role)
        self._schema = arrow_schema(node_columns(self._block))
        group = recipe.algorithm.group_size if self._block.scope == "group" else 1
        self._max_rows = -(-max(self._block.max_rows, self._block.min_batch) // group) * group
        scorer = self._block.scorer
        source = scorer.source if scorer is not None else str(self._block.function)
        told = source_hash(source, context.recipe_folder) if is_spec(source) else source
        self._facts = Facts(tag=f"config {recipe_hash(recipe)} function {told}")
        self._failed_rows = 0
        self._last = ""
        self._extended_at = 0.0
        self._reads = tuple(dict.fromkeys((*self._block.reads, *(_SCORED if scorer is not None else ()))))
        self._claim: Claim | None = None
        self._runner: ProcessRewardRunner | None = None
        if scorer is None:
            self._function, self._model = node_function(self._block, context.recipe_folder)
        else:
            self._runner = ProcessRewardRunner(
                scorer,
                self._block.name,
                context.recipe_folder,
                while_waiting=self._taking,
                start_s=recipe.deadlines.start_s,
                most_calls=self._block.max_deliveries,
            )

    def handlers(self) -> Mapping[str, CallHandler]:
        """`failures`: rows whose call failed so far, and the newest reason."""
        return {"failures": lambda _: {"count": self._failed_rows, "last": self._last}}

    def work(self) -> bool:
        """Work on one claim; False when no row is ready."""
        for table in (EVAL, TRAIN):
            claim = self._store.claim(table, self._block.name, max_rows=self._max_rows, columns=self._reads)
            if claim is not None:
                self._context.activity("scoring")
                try:
                    self._work(claim)
                except Fenced as error:  # somebody else has the rows now
                    self._context.log.warning("node.lease_lost", table=table, error=str(error))
                except Terminated:
                    self._store.release(claim)
                    raise
                return True
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a row may be ready."""
        self._context.waits(f"rows of stage {self._block.name} in table {TRAIN}")
        interests = [Interest(table, self._block.name) for table in (TRAIN, EVAL)]
        self._store.wait(interests, timeout_s=timeout_s, wake_fd=wake_fd)

    def close(self) -> None:
        """The model goes with the process; a scorer has one of its own."""
        if self._runner is not None:
            self._runner.close()

    def _work(self, claim: Claim) -> None:
        began = time.monotonic()
        name, block = self._block.name, self._block
        try:
            dead: list[int] = []
            columns = self._computed(claim) if self._runner is None else self._scored(claim, self._runner, dead)
        except (Terminated, Fenced, DeadlineExceeded):
            raise
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            self._failed_rows += claim.count
            self._last = f"{type(error).__name__}: {error}"
            self._context.log.warning("node.failed", table=claim.table, rows=claim.count, reason=self._last)
            self._store.nack(claim, traceback.format_exc())
            return
        kept = columns[block.keep] if block.keep is not None else [True] * claim.count
        ended = [index for index, one in enumerate(kept) if not one]
        if ended:  # before the column, so that no stage ever sees such a row as kept
            self._store.finish(claim, "filtered", block.reason, rows=ended)
        ended += dead
        if len(ended) < claim.count:
            # Whether the recorder sees an ended row before or after this is a matter of time: it has none of it.
            arrays = [pa.array(without(columns[field.name], ended), field.type) for field in self._schema]
            batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
            self._store.write(claim, batch, ack=True, facts=self._facts)
        ROWS_WRITTEN.labels(claim.table, name).inc(claim.count)
        ROWS_ACKED.labels(claim.table, name).inc(claim.count)
        self._context.progress()
        seconds = round(time.monotonic() - began, 3)
        self._context.log.info(
            "node.done", table=claim.table, rows=claim.count, filtered=len(ended), seconds=seconds
        )

    def _computed(self, claim: Claim) -> dict[str, list[Any]]:
        """What the function returned, checked."""
        block, table = self._block, claim.rows.to_pylist()
        rows = TakenRows(NodeRow(block.name, {name: row[name] for name in block.reads}) for row in table)
        self._claim, rows.taking = claim, self._taking
        returned = self._function(rows) if self._model is None else self._function(self._model, rows)
        return to_columns(returned, block.writes, claim.count, subject=f"node {block.name}")

    def _scored(self, claim: Claim, runner: ProcessRewardRunner, dead: list[int]) -> dict[str, list[Any]]:
        """The scorer's values; null is no verdict. `dead` gets the rows for which it always raises."""
        block, recipe = self._block, self._context.recipe
        assert block.scorer is not None
        self._claim, more = claim, [name for name in block.reads if name not in _SCORED]
        verdicts = runner.score([reward_row(record, more) for record in claim.rows.to_pylist()])
        if recipe.deterministic:
            refuse_the_clock(verdicts, f"scorer of node {block.name}", block.scorer.timeout_s)
        for reason in [verdicts.failure] if verdicts.failure else verdicts.notes:
            self._last = reason
            self._context.log.warning("node.no_verdict", table=claim.table, reason=reason)
        self._failed_rows += verdicts.values.count(None)
        for row, trace in verdicts.raised.items() if claim.table == TRAIN else ():
            self._store.finish(claim, "dead", trace, rows=[row])
            dead.append(row)
        return dict.fromkeys(block.writes, verdicts.values)

    def _taking(self) -> None:
        """Before the function takes up its next row, or while a scorer works: that is progress, and a place to stop
        at. A scorer's calls have a time limit, so this ends."""
        raise_if_stopping(self._context)
        if self._claim is not None and time.monotonic() - self._extended_at >= _EXTEND_S:
            self._extended_at = time.monotonic()
            self._store.extend(self._claim)
            self._context.progress()
