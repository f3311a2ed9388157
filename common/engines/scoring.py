"""The training engine for a model that scores responses: a transformers sequence classifier with one label."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import MicroBatch, PolicyOutput
from rlmq.common.models import load_scoring_model


class ScoringEngine(TorchEngine):
    """Its forward gives one score a row, at the row's last token."""

    def _forward(self, batch: MicroBatch) -> PolicyOutput:
        model: Any = self.model
        body = getattr(model, model.base_model_prefix)
        hidden = body(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
        )[0]
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        places = torch.arange(hidden.shape[1], device=hidden.device)
        last = (batch.attention_mask * places).argmax(dim=1)
        scores = model.score(hidden[rows, last])[:, 0].float()
        nothing = torch.zeros_like(batch.response_mask)
        return PolicyOutput(nothing, nothing, scores)


def load_scorer(folder: str | Path, *, pad_id: int, seed: int) -> torch.nn.Module:
    """The scorer in a folder, in float32; of a causal language model, with a new head on it.

    The head is drawn from the seed: normal, with variance 1 / (hidden size + 1).

    Raises:
        UsageError: as `load_scoring_model`.
    """
    model: Any
    model, fresh = load_scoring_model(folder, torch.float32)
    model.config.pad_token_id = pad_id
    if fresh:
        weight = model.score.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            weight.normal_(0.0, 1.0 / math.sqrt(weight.shape[1] + 1), generator=generator)
    found: torch.nn.Module = model
    return found


def scorer_config(model: Any) -> dict[str, Any]:
    """What a checkpoint's `config.json` says beside the first model's, so that the scorer can be loaded again."""
    return {
        "architectures": [type(model).__name__],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
        "pad_token_id": model.config.pad_token_id,
    }
