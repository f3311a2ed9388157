"""The engine of a reward model against transformers' own sequence classifier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlmq.common.engines.micro_batches import build_micro_batch
from rlmq.common.engines.scoring import ScoringEngine, load_scorer
from rlmq.common.errors import UsageError
from rlmq.common.recipe.schema import TrainBlock
from tests.unit.common.engines.conftest import PAD, ModelBuilder

PROMPTS, RESPONSES = [[5, 6, 7], [8], [9, 10]], [[1], [2, 3, 4], [5, 6]]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_score_is_that_of_the_classifier_at_the_last_token(
    build_model: ModelBuilder, tmp_path: Path, kind: str
) -> None:
    # given a scorer with a new head on a language model
    build_model(kind).save_pretrained(tmp_path / "base")
    scorer = load_scorer(tmp_path / "base", pad_id=PAD, seed=3)
    scorer.save_pretrained(tmp_path / "scorer")  # type: ignore[operator]
    # when a padded batch goes through the engine, and every row by itself through transformers in float64
    engine = ScoringEngine(scorer, TrainBlock(steps=1))
    scores = engine.logprobs(build_micro_batch(PROMPTS, RESPONSES, pad_id=PAD)).scores
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer", dtype=torch.float64).eval()
    rows = [torch.tensor([p + r]) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    with torch.no_grad():
        expected = [judge(input_ids=row).logits[0, 0].item() for row in rows]
    # then they agree
    assert judge.config.num_labels == 1
    assert scores is not None
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 1e-3


def test_the_head_is_a_function_of_the_seed_and_a_trained_one_is_kept(
    build_model: ModelBuilder, tmp_path: Path
) -> None:
    build_model("llama").save_pretrained(tmp_path / "base")
    heads = [load_scorer(tmp_path / "base", pad_id=PAD, seed=seed).score.weight for seed in (1, 1, 2)]  # type: ignore
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    first = load_scorer(tmp_path / "base", pad_id=PAD, seed=1)
    first.save_pretrained(tmp_path / "scorer")  # type: ignore[operator]
    again = load_scorer(tmp_path / "scorer", pad_id=PAD, seed=2)
    assert torch.equal(again.score.weight, heads[0])  # type: ignore[union-attr, arg-type]


def test_a_folder_that_lacks_more_than_the_head_is_refused(build_model: ModelBuilder, tmp_path: Path) -> None:
    model = build_model("llama")
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    model.save_pretrained(tmp_path / "base", state_dict=state)
    with pytest.raises(UsageError, match="up_proj"):
        load_scorer(tmp_path / "base", pad_id=PAD, seed=0)
