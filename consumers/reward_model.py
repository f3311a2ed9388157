"""The reward model role: scores of responses, learned in the run from another reward of the same rows.

Source of the loss of pairs: Bradley and Terry; InstructGPT (arXiv 2203.02155, eq. 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlmq.buffer.batch_log import Update
from rlmq.buffer.store import ExperienceStore
from rlmq.common.algorithms.reward_model import RewardModel
from rlmq.common.columns import LEARNED, LEARNED_COLUMNS
from rlmq.common.engines.scoring import ScoringEngine, load_scorer, scorer_config
from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput
from rlmq.common.flow import BOTH
from rlmq.common.worker import WorkerContext
from rlmq.consumers.batch import Batch
from rlmq.consumers.labels import TARGET, label_columns, learned_units, targets
from rlmq.consumers.logged_trainer import LoggedTrainer
from rlmq.consumers.trainer import Work


class RewardModelRole(LoggedTrainer[ScoringEngine]):
    """A language model with a head of one number, read at the last token of prompt and response."""

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        recipe = context.recipe
        self._block = recipe.reward_model
        super().__init__(context, store, self._block.model or recipe.model, BOTH, LEARNED_COLUMNS)

    def _build(self, checkpoint: Path | None) -> ScoringEngine:
        model = load_scorer(checkpoint or self._model_folder, pad_id=self._pad_id, seed=self._recipe.run.seed)
        self._config = scorer_config(model)
        return ScoringEngine(model, self._block.training(self._recipe.train), group=self._mesh.group)

    def _scores(self, batch: MicroBatch) -> Mapping[str, Any]:
        return {LEARNED: self._engine.logprobs(batch).scores}

    def _work_on(self, batch: Batch, updates: Sequence[Update]) -> list[list[Work]]:
        pairs = self._block.loss == "pairs"
        loss = partial(RewardModel(self._recipe).loss, state={}) if pairs else squared_error
        learned = learned_units(batch.groups, batch.responses, batch.columns, self._recipe)
        per_row = targets(learned, batch.columns[label_columns(self._recipe)[0]])
        columns = {TARGET: [[per_row.get(row, 0.0)] * len(ids) for row, ids in enumerate(batch.responses)]}
        learn = partial(self._engine.accumulate, loss=loss)
        shares = self._micro_batches(batch, columns, updates)
        return [[partial(learn, micro) for micro in share] for share in shares]

    def _described(self, batch: Batch, figures: Mapping[str, float]) -> dict[str, float]:
        return {f"reward_model_{name}": value for name, value in figures.items()}


def squared_error(output: PolicyOutput, batch: MicroBatch) -> LossTerms:
    """`(score - value)^2` summed over rows, with the values in the column `advantages`."""
    assert output.scores is not None
    errors = (output.scores - batch.columns[TARGET][:, 0]).square()
    mask = batch.response_mask > 0
    return LossTerms(errors.sum(), {"tokens": mask.sum(), "loss": errors.detach().sum()})
