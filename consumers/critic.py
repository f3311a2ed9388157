"""The critic role: values of response tokens, trained on the same logged batches as the policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.buffer.store import Claim, ExperienceStore, Facts, Interest
from rlmq.buffer.tables import TRAIN
from rlmq.common.algorithms.algorithm import Floats
from rlmq.common.columns import arrow_schema, critic_columns
from rlmq.common.engines.micro_batches import build_micro_batch, plan_micro_batches
from rlmq.common.engines.value_trainer import ValueEngine
from rlmq.common.errors import Fenced, IntegrityError, RestartRequired, Terminated
from rlmq.common.metrics import ROWS_ACKED, ROWS_WRITTEN
from rlmq.common.models import load_model
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.common.worker_loop import raise_if_stopping
from rlmq.consumers.batch import Batch
from rlmq.consumers.file_checkpoints import FileCheckpoints
from rlmq.consumers.trainer import Found, Trainer

_STAGE = "critic"
_TOLD = {"grad_norm": "critic_grad_norm", "lr": "critic_lr"}


class CriticRole(Trainer[ValueEngine]):
    """One trainer rank of the critic; each claims rows, and all train together.

    In deterministic mode the rows of a step get values of the weights that the step before it made: at its start
    the critic redoes every logged step, and `train` of a step comes before the rows of the next one.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        recipe = context.recipe
        super().__init__(context, store, recipe.critic.model or recipe.model, context.run.critic_checkpoints)
        self._too_early = False
        group, chunk = recipe.algorithm.group_size, recipe.rollout.batch_size_per_device
        self._max_rows = -(-chunk // group) * group
        self._schema = arrow_schema(critic_columns(self._algorithm.critics))
        self._facts = Facts(tag=f"config {recipe_hash(recipe)}")
        if context.rank == 0:
            self._log.server_is_another()
            self._checkpoints.forget(self._logged)
        self._catch_up(self._logged)

    def _newest(self) -> int:
        """The last logged step that stays: later ones lost rows, and the actor takes them back."""
        last = max(FileCheckpoints(self._context.run.checkpoints).steps(), default=0)
        for entry in FileBatchLog(self._context.run.batch_log).entries(last):
            if not self._log.held(entry):
                break
            last = entry.step
        self._logged = int(self._mesh.broadcast(str(last).encode()))
        return self._logged

    def _build(self, checkpoint: Path | None) -> ValueEngine:
        engine = ValueEngine(
            load_model(self._model_folder, torch.float32),
            self._recipe.critic.training(self._recipe.train),
            self._algorithm.critics,
            group=self._mesh.group,
        )
        if checkpoint is not None:
            engine.load_weights(self._checkpoints.weights(checkpoint))
        return engine

    def handlers(self) -> Mapping[str, CallHandler]:
        """`train`, `checkpoint`, `settle`."""
        return {"train": self._train, "checkpoint": self._checkpoint, "settle": self._settle}

    # -- row work ------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Score one claim; False when no row is ready."""
        if self._too_early:
            return False
        claim = self._store.claim(
            TRAIN, _STAGE, max_rows=self._max_rows, columns=("prompt_ids", "response_ids", "step")
        )
        if claim is None:
            return False
        try:
            if not self._fits(min(claim.rows.column("step").to_pylist())):
                self._too_early = True
                self._store.release(claim)
                return False
            self._context.activity("scoring")
            values = self._values(claim)
            batch = pa.RecordBatch.from_pydict(values, schema=self._schema)
            self._store.write(claim, batch, ack=True, facts=self._facts)
        except Fenced as error:  # somebody else has the rows now
            self._context.log.warning("critic.lease_lost", error=str(error))
            return True
        except (Terminated, RestartRequired):
            self._store.release(claim)
            raise
        ROWS_WRITTEN.labels(TRAIN, _STAGE).inc(claim.count)
        ROWS_ACKED.labels(TRAIN, _STAGE).inc(claim.count)
        self._context.progress()
        self._context.log.info("critic.scored", rows=claim.count, trained=self._trained)
        return True

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a row may be ready, or a call comes."""
        if self._too_early:
            super().wait(timeout_s, wake_fd)
            return
        self._saved.settle()
        self._context.waits(f"rows of stage {_STAGE} in table {TRAIN}")
        self._store.wait([Interest(TRAIN, _STAGE)], timeout_s=timeout_s, wake_fd=wake_fd)

    def _fits(self, step: int) -> bool:
        """Whether rows of this step may be scored with the weights at hand.

        Raises:
            RestartRequired: the step is made again, and its rows need the weights before it.
        """
        if not self._recipe.deterministic or self._trained == step - 1:
            return True
        if self._trained >= step:
            raise RestartRequired("critic", got=f"rows of step {step} after its training: the server lost them")
        return False

    def _values(self, claim: Claim) -> dict[str, list[list[float]]]:
        """Per head and row, the value of each response token: that of the state before it."""
        prompts = claim.rows.column("prompt_ids").to_pylist()
        responses = claim.rows.column("response_ids").to_pylist()
        lengths = [(len(p), len(r)) for p, r in zip(prompts, responses, strict=True)]
        found: dict[str, list[list[float]]] = {head: [[] for _ in prompts] for head in self._algorithm.critics}
        # Which rows are claimed together depends on timing, and neighbours in a forward change the last bits.
        budget_tokens = 1 if self._recipe.deterministic else self._recipe.train.micro_batch_tokens
        (micro_batches,) = plan_micro_batches(lengths, budget_tokens, 1)
        for rows in micro_batches:
            raise_if_stopping(self._context)
            batch = build_micro_batch([prompts[i] for i in rows], [responses[i] for i in rows], pad_id=self._pad_id)
            for head, values in self._engine.values(batch).items():
                for place, row in enumerate(rows):
                    found[head][row] = values[place, : lengths[row][1]].tolist()
            self._store.extend(claim)
            self._context.progress()
        return found

    # -- training ------------------------------------------------------------------------------------------

    def _train(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Train on a logged step.

        Returns:
            Figures; or `again`: the log does not have the step (any more), the actor must form it first.
        """
        step = int(args["step"])
        self._saved.settle()
        if self._context.rank == 0 and self._log.server_is_another():
            self._save()  # rows that a redo would need may be gone
        self._catch_up(step - 1)
        if self._trained < step and not self._advance(step):
            return {"again": True}
        self._too_early = False
        return dict(self._metrics)

    def _advance(self, step: int, *, redo: bool = False) -> bool:
        """See `Trainer._advance`; what the values shall become is computed from the rows, as the actor does."""
        self._context.activity("training")
        began = time.monotonic()
        found = self._on_every_rank(self._found(step, redo=redo) if self._context.rank == 0 else None)
        if found is None:
            return False
        entry, batch = found
        columns: dict[str, Sequence[Any]] = {}
        for head in self._algorithm.critics:
            columns[f"old_{head}"], columns[f"returns_{head}"] = batch.columns[head], batch.estimates.returns[head]
        updates = self._for_this_mesh(entry.critic_updates, step)
        learn = partial(self._engine.accumulate_values, loss=self._algorithm.value_loss)
        shares = self._micro_batches(batch, columns, updates)
        figures = self._update_all(updates, [[partial(learn, micro) for micro in share] for share in shares])
        self._trained = step
        told = {_TOLD.get(name, name): value for name, value in figures.items()}
        self._metrics = {**told, **_described(batch), "critic_train_s": round(time.monotonic() - began, 4)}
        return True

    def _found(self, step: int, *, redo: bool) -> Found | None:
        entry = self._log.find(step)
        if entry is not None and (redo or self._log.held(entry)):
            return self._with_rows(entry)
        if redo:
            raise IntegrityError(f"batch log {self._context.run.batch_log}", got=f"no entry of step {step}")
        return None


def _described(batch: Batch) -> dict[str, float]:
    """Of each head: the mean of its values, and the share of the returns' variance that they explain."""
    figures: dict[str, float] = {}
    masks = [np.array(mask, dtype=np.bool_) for mask in batch.loss_masks]
    for head, returns in batch.estimates.returns.items():
        wanted = np.concatenate([row[mask] for row, mask in zip(returns, masks, strict=True)])
        old = np.concatenate(
            [np.array(row, dtype=np.float64)[mask] for row, mask in zip(batch.columns[head], masks, strict=True)]
        )
        figures[f"{head.removesuffix('s')}_mean"] = float(old.mean()) if old.size else 0.0
        figures[f"{head.removesuffix('values')}explained_variance"] = explained_variance(old, wanted)
    return figures


def explained_variance(values: Floats, returns: Floats) -> float:
    """`1 - var(returns - values) / var(returns)`: 1 is perfect, 0 as good as the mean; 0 where nothing varies."""
    variance = float(returns.var()) if returns.size else 0.0
    return 1.0 - float((returns - values).var()) / variance if variance > 0 else 0.0
