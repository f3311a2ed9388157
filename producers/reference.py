"""The reference role: log-probs of the frozen starting model, for the KL term."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import torch

from rlmq.buffer.store import Claim, ExperienceStore, Facts, Interest
from rlmq.common.columns import REFERENCE_COLUMNS, arrow_schema
from rlmq.common.determinism import require_same_environment
from rlmq.common.engines.micro_batches import build_micro_batch, plan_micro_batches
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.errors import Fenced, Terminated
from rlmq.common.flow import flows_of
from rlmq.common.metrics import ROWS_ACKED, ROWS_WRITTEN
from rlmq.common.models import load_model, load_tokenizer, pad_id, resolve_model
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.worker import CallHandler, Role, WorkerContext
from rlmq.common.worker_loop import raise_if_stopping

_STAGE = "reference"


class ReferenceRole(Role):
    """Computes `ref_logprobs` with the trainer's own forward, so that the KL of equal weights is 0.

    The weights are those of `recipe.model`, in the type that the trainer computes in.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        require_same_environment(context)
        self._context = context
        self._store = store
        recipe = context.recipe
        folder = resolve_model(recipe.model, context.recipe_folder)
        self._pad_id = pad_id(load_tokenizer(folder))
        model = load_model(folder, torch.float32)
        self._engine = TorchEngine(model, recipe.train, temperature=recipe.rollout.temperature)
        group, chunk = recipe.algorithm.group_size, recipe.rollout.batch_size_per_device
        self._max_rows = -(-max(chunk, recipe.stages.reference.min_batch) // group) * group
        nodes = [node for flow in flows_of(recipe) for node in flow if node.name == _STAGE]
        self._tables = [table for node in nodes for table in node.tables]
        self._facts = Facts(tag=f"config {recipe_hash(recipe)}")

    def handlers(self) -> Mapping[str, CallHandler]:
        """None: it only works on rows."""
        return {}

    def work(self) -> bool:
        """Score one claim; False when no row is ready."""
        return any(self._work_on(table) for table in self._tables)

    def _work_on(self, table: str) -> bool:
        claim = self._store.claim(table, _STAGE, max_rows=self._max_rows, columns=("prompt_ids", "response_ids"))
        if claim is None:
            return False
        self._context.activity("scoring")
        try:
            column = pa.array(self._logprobs(claim), type=REFERENCE_COLUMNS[0].type)
            batch = pa.RecordBatch.from_arrays([column], schema=arrow_schema(REFERENCE_COLUMNS))
            self._store.write(claim, batch, ack=True, facts=self._facts)
        except Fenced as error:  # somebody else has the rows now
            self._context.log.warning("reference.lease_lost", error=str(error))
            return True
        except Terminated:
            self._store.release(claim)
            raise
        ROWS_WRITTEN.labels(table, _STAGE).inc(claim.count)
        ROWS_ACKED.labels(table, _STAGE).inc(claim.count)
        self._context.progress()
        self._context.log.info("reference.scored", rows=claim.count)
        return True

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a row may be ready."""
        self._context.waits(f"rows of stage {_STAGE} in table {self._tables[0]}")
        interests = [Interest(table, _STAGE) for table in self._tables]
        self._store.wait(interests, timeout_s=timeout_s, wake_fd=wake_fd)

    def close(self) -> None:
        """The model goes with the process."""

    def _logprobs(self, claim: Claim) -> list[list[float]]:
        """Per row, the log-prob of each response token, at the sampling temperature."""
        prompts = claim.rows.column("prompt_ids").to_pylist()
        responses = claim.rows.column("response_ids").to_pylist()
        lengths = [(len(p), len(r)) for p, r in zip(prompts, responses, strict=True)]
        found: list[list[float]] = [[] for _ in prompts]
        recipe = self._context.recipe
        # Which rows are claimed together depends on timing, and neighbours in a forward change the last bits.
        budget_tokens = 1 if recipe.deterministic else recipe.train.micro_batch_tokens
        (micro_batches,) = plan_micro_batches(lengths, budget_tokens, 1)
        for rows in micro_batches:
            raise_if_stopping(self._context)
            batch = build_micro_batch([prompts[i] for i in rows], [responses[i] for i in rows], pad_id=self._pad_id)
            logprobs = self._engine.logprobs(batch).logprobs.float()
            for place, row in enumerate(rows):
                found[row] = logprobs[place, : lengths[row][1]].tolist()
            self._store.extend(claim)
            self._context.progress()
        return found
