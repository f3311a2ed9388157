"""The critic role: values of response tokens, trained on the same logged batches as the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlmq.buffer.batch_log import Update
from rlmq.buffer.store import ExperienceStore
from rlmq.buffer.tables import TRAIN
from rlmq.common.algorithms import algorithm_of
from rlmq.common.algorithms.algorithm import Floats
from rlmq.common.columns import critic_columns
from rlmq.common.critics import critic_heads
from rlmq.common.engines.training import LossTerms, MicroBatch
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
        recipe = context.recipe
        block = recipe.own_critic(context.role) or recipe.critic
        self._block = block.training(recipe.train)
        self._heads_of = critic_heads(recipe, algorithm_of(recipe).critics)[context.role]
        columns = critic_columns(self._heads_of, context.role)
        super().__init__(context, store, block.model or recipe.model, (TRAIN,), columns)

    def _build(self, checkpoint: Path | None) -> ValueEngine:
        engine = ValueEngine(
            load_model(self._model_folder, torch.float32),
            self._block,
            tuple(self._heads_of),
            group=self._mesh.group,
        )
        if checkpoint is not None:
            engine.load_weights(self._checkpoints.weights(checkpoint))
        return engine

    def _scores(self, batch: MicroBatch) -> Mapping[str, Any]:
        return self._engine.values(batch)

    def _work_on(self, batch: Batch, updates: Sequence[Update]) -> list[list[Work]]:
        columns: dict[str, Sequence[Any]] = {}
        for name, head in self._heads_of.items():
            columns[f"old_{name}"], columns[f"returns_{name}"] = batch.columns[name], batch.estimates.returns[head]
        learn = partial(self._engine.accumulate_values, loss=self.loss)
        shares = self._micro_batches(batch, columns, updates)
        return [[partial(learn, micro) for micro in share] for share in shares]

    def loss(self, values: Mapping[str, torch.Tensor], batch: MicroBatch) -> LossTerms:
        """See `Algorithm.value_loss`; a role of your own may have another one."""
        return self._algorithm.value_loss(values, batch)

    def _described(self, batch: Batch, figures: Mapping[str, float]) -> dict[str, float]:
        """Of each head also: the mean of its values, and the share of the returns' variance that they explain."""
        own = self._recipe.own_critic(self._context.role) is not None
        told = dict(figures) if own else {_TOLD.get(name, name): value for name, value in figures.items()}
        masks = [np.array(mask, dtype=np.bool_) for mask in batch.loss_masks]
        for name, head in self._heads_of.items():
            returns = batch.estimates.returns[head]
            wanted = np.concatenate([row[mask] for row, mask in zip(returns, masks, strict=True)])
            values = [np.array(row, dtype=np.float64) for row in batch.columns[name]]
            old = np.concatenate([row[mask] for row, mask in zip(values, masks, strict=True)])
            told[f"{head.removesuffix('s')}_mean"] = float(old.mean()) if old.size else 0.0
            told[f"{head.removesuffix('values')}explained_variance"] = explained_variance(old, wanted)
        return {f"{self._context.role}_{name}": value for name, value in told.items()} if own else told


def explained_variance(values: Floats, returns: Floats) -> float:
    """`1 - var(returns - values) / var(returns)`: 1 is perfect, 0 as good as the mean; 0 where nothing varies."""
    variance = float(returns.var()) if returns.size else 0.0
    return 1.0 - float((returns - values).var()) / variance if variance > 0 else 0.0
