"""The critic role: values of response tokens, trained on the same logged batches as the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlmq.buffer.batch_log import BatchEntry, Update
from rlmq.buffer.store import ExperienceStore
from rlmq.buffer.tables import TRAIN
from rlmq.common.algorithms import algorithm_of
from rlmq.common.algorithms.algorithm import Floats
from rlmq.common.columns import critic_columns
from rlmq.common.engines.training import MicroBatch
from rlmq.common.engines.value_trainer import ValueEngine
from rlmq.common.models import load_model
from rlmq.common.worker import WorkerContext
from rlmq.consumers.batch import Batch
from rlmq.consumers.logged_trainer import LoggedTrainer
from rlmq.consumers.trainer import Work

_TOLD = {"grad_norm": "critic_grad_norm", "lr": "critic_lr"}


class CriticRole(LoggedTrainer[ValueEngine]):
    """A critic, whose values are those of the state before each token."""

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        recipe, folder = context.recipe, context.run.critic_checkpoints
        columns = critic_columns(algorithm_of(recipe).critics)
        super().__init__(context, store, recipe.critic.model or recipe.model, folder, (TRAIN,), columns)

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

    def _scores(self, batch: MicroBatch) -> Mapping[str, Any]:
        return self._engine.values(batch)

    def _updates(self, entry: BatchEntry) -> tuple[Update, ...]:
        return entry.critic_updates

    def _work_on(self, batch: Batch, updates: Sequence[Update]) -> list[list[Work]]:
        columns: dict[str, Sequence[Any]] = {}
        for head in self._algorithm.critics:
            columns[f"old_{head}"], columns[f"returns_{head}"] = batch.columns[head], batch.estimates.returns[head]
        learn = partial(self._engine.accumulate_values, loss=self._algorithm.value_loss)
        shares = self._micro_batches(batch, columns, updates)
        return [[partial(learn, micro) for micro in share] for share in shares]

    def _described(self, batch: Batch, figures: Mapping[str, float]) -> dict[str, float]:
        """Of each head also: the mean of its values, and the share of the returns' variance that they explain."""
        told = {_TOLD.get(name, name): value for name, value in figures.items()}
        masks = [np.array(mask, dtype=np.bool_) for mask in batch.loss_masks]
        for head, returns in batch.estimates.returns.items():
            wanted = np.concatenate([row[mask] for row, mask in zip(returns, masks, strict=True)])
            values = [np.array(row, dtype=np.float64) for row in batch.columns[head]]
            old = np.concatenate([row[mask] for row, mask in zip(values, masks, strict=True)])
            told[f"{head.removesuffix('s')}_mean"] = float(old.mean()) if old.size else 0.0
            told[f"{head.removesuffix('values')}explained_variance"] = explained_variance(old, wanted)
        return told


def explained_variance(values: Floats, returns: Floats) -> float:
    """`1 - var(returns - values) / var(returns)`: 1 is perfect, 0 as good as the mean; 0 where nothing varies."""
    variance = float(returns.var()) if returns.size else 0.0
    return 1.0 - float((returns - values).var()) / variance if variance > 0 else 0.0
