"""Row work of roles whose model reads responses: claim, forward, write, acknowledge.

In deterministic mode each row has a forward of its own: which rows are claimed together depends on timing, and
neighbours in a forward change the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rlmq.buffer.store import Claim, ExperienceStore, Facts, Interest
from rlmq.common.columns import Column, arrow_schema, is_greedy
from rlmq.common.engines.micro_batches import build_micro_batch, plan_micro_batches
from rlmq.common.errors import Fenced, RestartRequired, Terminated
from rlmq.common.metrics import ROWS_ACKED, ROWS_WRITTEN
from rlmq.common.worker import WorkerContext
from rlmq.common.worker_loop import raise_if_stopping

if TYPE_CHECKING:
    import torch

    from rlmq.common.engines.training import MicroBatch

_COLUMNS = ("sample_id", "prompt_ids", "response_ids", "step")

Forward = Callable[["MicroBatch"], Mapping[str, "torch.Tensor"]]
"""By column: a number per response token [rows, R], or one a row [rows]."""


class ResponseScoring:
    """One stage's work in each of its tables.

    Args:
        stage: of the tables; its worker's role.
        tables: the first ones come first.
        columns: what it writes.
        forward: the model.
        pad_id: of the model's tokenizer.
        min_batch: of the stage.
        facts: what the lineage is told.
        fits: whether rows of this table and of this step or later ones may be scored now; if not, they are given
            back.
    """

    def __init__(
        self,
        context: WorkerContext,
        store: ExperienceStore,
        stage: str,
        tables: Sequence[str],
        columns: Sequence[Column],
        forward: Forward,
        *,
        pad_id: int,
        facts: Callable[[], Facts],
        min_batch: int = 1,
        fits: Callable[[str, int], bool] = lambda _table, _step: True,
    ) -> None:
        self._context = context
        self._store = store
        self._stage = stage
        self._tables = tuple(tables)
        self._schema = arrow_schema(columns)
        self._forward = forward
        self._pad_id = pad_id
        self._facts = facts
        self._fits = fits
        recipe = context.recipe
        group, chunk = recipe.algorithm.group_size, recipe.rollout.batch_size_per_device
        self._max_rows = -(-max(chunk, min_batch) // group) * group
        self._budget_tokens = 1 if recipe.deterministic else recipe.train.micro_batch_tokens

    def work(self) -> bool:
        """Score one claim; False when no row is ready."""
        return any(self._work_on(table) for table in self._tables)

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a row may be ready, or a call comes."""
        self._context.waits(f"rows of stage {self._stage} in table {self._tables[0]}")
        interests = [Interest(table, self._stage) for table in self._tables]
        self._store.wait(interests, timeout_s=timeout_s, wake_fd=wake_fd)

    def _work_on(self, table: str) -> bool:
        claim = self._store.claim(table, self._stage, max_rows=self._max_rows, columns=_COLUMNS)
        if claim is None:
            return False
        try:
            if not self._fits(table, min(claim.rows.column("step").to_pylist())):
                self._store.release(claim)
                return False
            self._context.activity("scoring")
            batch = pa.RecordBatch.from_pydict(self._values(claim), schema=self._schema)
            self._store.write(claim, batch, ack=True, facts=self._facts())
        except Fenced as error:  # somebody else has the rows now
            self._context.log.warning(f"{self._stage}.lease_lost", error=str(error))
            return True
        except (Terminated, RestartRequired):
            self._store.release(claim)
            raise
        ROWS_WRITTEN.labels(table, self._stage).inc(claim.count)
        ROWS_ACKED.labels(table, self._stage).inc(claim.count)
        self._context.progress()
        self._context.log.info(f"{self._stage}.scored", table=table, rows=claim.count)
        return True

    def _values(self, claim: Claim) -> dict[str, list[Any]]:
        """Per column and row, a number for each response token, or one; null for a greedy row."""
        asked = [row for row, own in enumerate(claim.rows.column("sample_id").to_pylist()) if not is_greedy(own)]
        prompts = claim.rows.column("prompt_ids").to_pylist()
        responses = claim.rows.column("response_ids").to_pylist()
        lengths = [(len(p), len(r)) for p, r in zip(prompts, responses, strict=True)]
        found: dict[str, list[Any]] = {name: [None] * len(prompts) for name in self._schema.names}
        (micro_batches,) = plan_micro_batches([lengths[row] for row in asked], self._budget_tokens, 1)
        for places in micro_batches:
            raise_if_stopping(self._context)
            rows = [asked[place] for place in places]
            batch = build_micro_batch([prompts[i] for i in rows], [responses[i] for i in rows], pad_id=self._pad_id)
            for name, values in self._forward(batch).items():
                for place, row in enumerate(rows):
                    own = values[place].float()
                    found[name][row] = own[: lengths[row][1]].tolist() if own.dim() else float(own)
            self._store.extend(claim)
            self._context.progress()
        return found
