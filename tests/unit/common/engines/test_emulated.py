"""Devices that are clocks: lengths and versions are as told, and time is no more than the formula's by much."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlmq.common.engines.emulated import EmulatedEngine, EmulatedTrainer
from rlmq.common.engines.engine_options import EmulatedOptions, EmulatedTrainingOptions
from rlmq.common.engines.generation import EngineSettings, Request, Sampling
from rlmq.common.engines.lengths import length_of, read_lengths
from rlmq.common.engines.training import LossTerms, TrainingSettings
from rlmq.common.errors import UsageError
from rlmq.common.models import resolve_model
from rlmq.common.recipe.schema import TrainBlock
from rlmq.producers.episodes import Episode

pytestmark = pytest.mark.timeout(120)

RECIPES = Path(__file__).parents[4] / "recipes"
LENGTHS = [3, 90, 4, 7]


@pytest.fixture(scope="module")
def model() -> str:
    return resolve_model("tiny_model.py:folder", RECIPES)


@pytest.fixture
def engine(tmp_path: Path, model: str) -> EmulatedEngine:
    """Two responses at once, a millisecond an iteration, and another one each."""
    (tmp_path / "lengths.json").write_text(json.dumps({"some": LENGTHS}))
    options = EmulatedOptions(lengths="lengths.json#some", prompts=2, members=2, iteration_s=0.001, active_s=0.001)
    settings: dict[str, Any] = {"model": model, "dtype": "float32", "max_batch": 2, "max_tokens": 99}
    made = EmulatedEngine(
        EngineSettings(**settings, eos_ids=(0,), pad_id=1, decode=str, options=options, folder=tmp_path)
    )
    made.serve(4)
    return made


def request(group: int, member: int, budget: int = 200) -> Request:
    return Request(f"train-000001-{group:04d}-{member:02d}", [5, 5], Sampling(max_tokens=budget), seed=1)


def test_each_response_has_its_length_and_no_token_comes_before_its_time(engine: EmulatedEngine) -> None:
    began = time.monotonic()
    engine.submit([request(group, member) for group in range(2) for member in range(2)])
    found = []
    while engine.pending:
        found += engine.step()
    assert {one.id: len(one.token_ids) for one in found} == {
        f"train-000001-{place // 2:04d}-{place % 2:02d}": length for place, length in enumerate(LENGTHS)
    }
    assert [one.id[-2:] for one in found][:2] == ["00", "00"]  # of 3 tokens, then of 4 that took its place
    # then it took the iterations of the longest way, with two responses in each but the last ones
    assert time.monotonic() - began >= 90 * 0.002


def test_a_response_that_is_interrupted_has_its_length_all_the_same(engine: EmulatedEngine) -> None:
    # given a response that is taken from the engine when it has some of its tokens
    episode = Episode(request(0, 1), {})
    engine.submit([episode.next_request()])
    while not (parts := engine.abort([episode.id]))[0].token_ids:
        engine.submit([episode.next_request()])
        engine.step()
    episode.add_part(parts[0])
    # when the rest is generated with another version
    engine.serve(5)
    engine.submit([episode.next_request()])
    found: list[Any] = []
    while not found:
        found = engine.step()
    episode.add(found[0])
    assert len(episode.token_ids) == 90
    assert episode.policy_versions == sorted(episode.policy_versions)
    assert set(episode.policy_versions) <= {4, 5}


def test_training_takes_the_time_of_its_tokens_and_changes_nothing(model: str) -> None:
    from rlmq.common.engines.micro_batches import build_micro_batch

    options = EmulatedTrainingOptions(token_s=0.02, devices=2)
    trainer = EmulatedTrainer(TrainingSettings(model=model, block=TrainBlock(steps=1), options=options))
    before = [weight.clone() for _, weight in trainer.shards()]
    batch = build_micro_batch([[5]], [[6, 7, 8, 9]], [[True] * 4], {}, pad_id=0)
    began = time.monotonic()
    figures = trainer.accumulate(
        batch, lambda output, _: LossTerms(output.logprobs.sum(), {"sum": output.logprobs.sum()})
    )
    assert time.monotonic() - began >= 4 * 0.02 / 2
    assert figures == {"sum": -4.0}
    trainer.step((1.0,))
    assert all(torch.equal(*both) for both in zip(before, [w for _, w in trainer.shards()], strict=True))


def test_steps_take_the_lengths_in_turn_and_a_bad_file_is_named(tmp_path: Path) -> None:
    assert [length_of(f"train-000002-0000-{member:02d}", LENGTHS, 1, 2) for member in (0, 1)] == [4, 7]
    (tmp_path / "bad.json").write_text('{"some": [0]}')
    for file in ("none.json", "bad.json", "bad.json#some", "bad.json#others"):
        with pytest.raises(UsageError, match="lengths"):
            read_lengths(str(tmp_path / file))
