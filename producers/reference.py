"""The reference role: log-probs of the frozen starting model, for the KL term."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlmq.buffer.response_scoring import ResponseScoring
from rlmq.buffer.store import ExperienceStore, Facts
from rlmq.common.columns import REFERENCE_COLUMNS
from rlmq.common.determinism import require_same_environment
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import MicroBatch
from rlmq.common.flow import flows_of
from rlmq.common.models import load_model, load_tokenizer, pad_id, resolve_model
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.worker import CallHandler, Role, WorkerContext

_STAGE = "reference"


class ReferenceRole(Role):
    """Computes `ref_logprobs` with the trainer's own forward, so that the KL of equal weights is 0.

    The weights are those of `recipe.model`, in the type that the trainer computes in.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        require_same_environment(context)
        recipe = context.recipe
        folder = resolve_model(recipe.model, context.recipe_folder)
        model = load_model(folder, torch.float32)
        self._engine = TorchEngine(model, recipe.train, temperature=recipe.rollout.temperature)
        nodes = [node for flow in flows_of(recipe) for node in flow if node.name == _STAGE]
        facts = Facts(tag=f"config {recipe_hash(recipe)}")
        self._scoring = ResponseScoring(
            context,
            store,
            _STAGE,
            [table for node in nodes for table in node.tables],
            REFERENCE_COLUMNS,
            self._logprobs,
            pad_id=pad_id(load_tokenizer(folder)),
            facts=lambda: facts,
            min_batch=recipe.stages.reference.min_batch,
        )

    def handlers(self) -> Mapping[str, CallHandler]:
        """None: it only works on rows."""
        return {}

    def work(self) -> bool:
        """Score one claim; False when no row is ready."""
        return self._scoring.work()

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a row may be ready."""
        self._scoring.wait(timeout_s, wake_fd)

    def close(self) -> None:
        """The model goes with the process."""

    def _logprobs(self, batch: MicroBatch) -> Mapping[str, torch.Tensor]:
        """Of each response token, at the sampling temperature."""
        return {"ref_logprobs": self._engine.logprobs(batch).logprobs}
