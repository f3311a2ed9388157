"""The value engine against hidden states in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from unit.common.engines.torch_rows import PAD_ID, block, rows_of, tiny_model

from rlmq.common.engines.micro_batches import build_micro_batch
from rlmq.common.engines.training import LossTerms, MicroBatch
from rlmq.common.engines.value_trainer import ValueEngine
from rlmq.common.errors import IntegrityError

HEADS = ("values", "cost_values")


def _engine(heads: tuple[str, ...] = HEADS) -> ValueEngine:
    engine = ValueEngine(tiny_model(), block(), heads)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head: Any = engine.model.get_output_embeddings()  # type: ignore[operator]
        head.weight.normal_(generator=generator)
    return engine


def test_values_are_those_of_the_state_before_each_token() -> None:
    # given heads with weights, and rows of unequal length
    engine, rows = _engine(), rows_of(6)
    batch = build_micro_batch(rows.prompts, rows.responses, pad_id=PAD_ID)
    # when values are computed in one padded batch
    found = engine.values(batch)
    # then they are hidden state @ weight of each row alone, in float64, at the place that predicts the token
    exact: Any = copy.deepcopy(engine.model).double().eval()
    weight = exact.get_output_embeddings().weight
    for row, (prompt, response) in enumerate(zip(rows.prompts, rows.responses, strict=True)):
        hidden = exact(input_ids=torch.tensor([prompt + response]), output_hidden_states=True).hidden_states[-1][0]
        expected = hidden[len(prompt) - 1 : len(prompt) - 1 + len(response)] @ weight.T
        for place, head in enumerate(HEADS):
            own = found[head][row]
            assert torch.allclose(own[: len(response)].double(), expected[:, place], atol=1e-5, rtol=1e-5)
            assert bool((own[len(response) :] == 0).all())


def test_a_new_head_gives_zero_and_learns_what_it_is_told() -> None:
    engine, rows = ValueEngine(tiny_model(), block(lr=1e-2), ("values",)), rows_of(4)
    batch = build_micro_batch(rows.prompts, rows.responses, pad_id=PAD_ID)
    assert bool((engine.values(batch)["values"] == 0).all())

    def loss(values: Any, batch: MicroBatch) -> LossTerms:
        error = ((values["values"] - 0.5) ** 2 * batch.response_mask).sum()
        return LossTerms(error, {"tokens": batch.response_mask.sum(), "error": error.detach()})

    errors = []
    for _ in range(20):
        errors.append(engine.accumulate_values(batch, loss)["error"])
        engine.step((float(batch.response_mask.sum()),))
    assert errors[-1] < 0.2 * errors[0]


def test_weights_of_other_heads_are_refused() -> None:
    one, two = _engine(("values",)), _engine()
    with pytest.raises(IntegrityError, match="fit"):
        one.load_weights(dict(two.shards()))
    fresh = ValueEngine(tiny_model(), block(), HEADS)
    fresh.load_weights(dict(two.shards()))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(fresh.shards(), two.shards(), strict=True))
