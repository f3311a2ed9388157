"""A user's own advantage, loss and loop: used when they are right, named when they are not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlmq.cli_check import find_problems
from rlmq.common.algorithms import algorithm_of
from rlmq.common.algorithms.algorithm import Algorithm
from rlmq.common.algorithms.own_functions import OwnFunctions
from rlmq.common.algorithms.trial import trial_batch, trial_rows
from rlmq.common.errors import UsageError
from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.load import code_hash, load_recipe
from rlmq.common.recipe.schema import RolloutBlock

RECIPES = Path(__file__).resolve().parents[4] / "recipes"
COMPARING = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "dapo", "gspo", "cispo", "decoupled_ppo")
GOOD = """
import torch

def half(batch):
    return batch.rewards / 2

def by_token(batch):
    return [[float(i) for i in range(len(mask))] for mask in batch.masks]

def plain(output, batch):
    return -output.logprobs * batch.columns["advantages"]

def twice(run):
    for step in run.steps():
        run.train(step)
"""


def own(folder: Path, code: str = GOOD, name: str = "grpo", **keys: str) -> tuple[Algorithm, Any]:
    (folder / "mine.py").write_text(code)
    block = AlgorithmBlock(name=name, group_size=2, **{key: f"mine.py:{value}" for key, value in keys.items()})  # type: ignore[arg-type]
    recipe = SimpleNamespace(algorithm=block, rollout=RolloutBlock())
    return algorithm_of(recipe, folder), recipe  # type: ignore[arg-type]


def test_an_advantage_of_ones_own_is_used(tmp_path: Path) -> None:
    algorithm, recipe = own(tmp_path, advantage="half")
    batch = trial_rows(algorithm, recipe)

    found = algorithm.estimate(batch)

    for row, reward, mask in zip(found.advantages, batch.rewards, batch.masks, strict=True):
        assert row.tolist() == [reward / 2] * len(mask)


def test_an_advantage_may_be_one_number_a_token_and_the_critic_learns_as_before(tmp_path: Path) -> None:
    algorithm, recipe = own(tmp_path, name="ppo", advantage="by_token")
    batch = trial_rows(algorithm, recipe)

    found = algorithm.estimate(batch)

    assert [row.tolist() for row in found.advantages] == [[float(i) for i in range(len(m))] for m in batch.masks]
    plain = algorithm_of(recipe).estimate(batch)
    for one, other in zip(found.returns["values"], plain.returns["values"], strict=True):
        assert np.array_equal(one, other)


def test_a_loss_of_ones_own_is_summed_over_counted_tokens(tmp_path: Path) -> None:
    algorithm, _ = own(tmp_path, loss="plain")
    output, batch = trial_batch(algorithm)

    terms = algorithm.loss(output, batch, {})
    terms.loss_sum.backward()

    expected = torch.where(batch.response_mask > 0, -batch.columns["advantages"], 0.0)
    torch.testing.assert_close(output.logprobs.grad, expected)
    assert float(terms.metric_sums["loss"]) == float(terms.loss_sum.detach())
    assert float(terms.metric_sums["tokens"]) == float(batch.response_mask.sum())


def test_a_loop_of_ones_own_is_followed(tmp_path: Path) -> None:
    algorithm, _ = own(tmp_path, loop="twice")
    trained: list[int] = []

    algorithm.loop(SimpleNamespace(steps=lambda: iter([3, 4]), train=trained.append))

    assert trained == [3, 4]


def test_nothing_is_imported_without_the_folder(tmp_path: Path) -> None:
    _, recipe = own(tmp_path, code="raise SystemExit(3)", advantage="half")

    assert not isinstance(algorithm_of(recipe), OwnFunctions)


BAD_ADVANTAGES = {
    "return 1.0": "a float",
    "return batch.rewards[:-1]": "3 items",
    "return [float('nan')] * len(batch.masks)": "NaN or infinity",
    "return [[1.0] * 77 for _ in batch.masks]": "an array of shape (77,)",
    "return ['x' for _ in batch.masks]": "'x'",
    "return 1 / 0": "ZeroDivisionError at",
}
BAD_LOSSES = {
    "return 1.0": "a float",
    "return output.logprobs.sum()": "torch.float32 of shape ()",
    "return output.logprobs[:, :-1]": "of shape (4, 3)",
    "return output.logprobs / 0": "NaN or infinity",
    "return output.logprobs.detach()": "without gradient",
    "return output.nothing": "AttributeError at",
}


@pytest.mark.parametrize(
    ("key", "body", "told"),
    [("advantage", *one) for one in BAD_ADVANTAGES.items()] + [("loss", *one) for one in BAD_LOSSES.items()],
)
def test_what_is_wrong_is_named_before_a_run(tmp_path: Path, key: str, body: str, told: str) -> None:
    arguments = "batch" if key == "advantage" else "output, batch"
    (tmp_path / "mine.py").write_text(f"def wrong({arguments}):\n    {body}\n")
    path = _recipe(tmp_path, f"{key}: mine.py:wrong")

    (problem,) = find_problems(load_recipe(path))

    assert isinstance(problem, UsageError)
    assert f"algorithm.{key} (mine.py:wrong)" in str(problem) and told in str(problem), str(problem)


@pytest.mark.parametrize("key", ["advantage", "loss", "loop"])
def test_a_function_of_other_arguments_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "mine.py").write_text("def wrong(): ...\n")

    (problem,) = find_problems(load_recipe(_recipe(tmp_path, f"{key}: mine.py:wrong")))

    assert f"algorithm.{key}" in str(problem) and "wrong(" in str(problem)


def test_ones_own_functions_are_part_of_the_codes_hash(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    loaded = load_recipe(_recipe(tmp_path, "advantage: mine.py:half"))
    assert list(find_problems(loaded)) == []
    before = code_hash(loaded.recipe, loaded.folder)

    (tmp_path / "mine.py").write_text(GOOD + "\n# changed\n")

    assert code_hash(loaded.recipe, loaded.folder) != before


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("kl_target: 0.1", "kl_coef above 0"),
        ("importance: truncated, old_logprobs: rollout", "old_logprobs: trainer"),
        ("gamma: 0.9", "not gamma"),
        ("name: cispo, ratio: sequence", "not ratio"),
        *((f"name: {name}, group_size: 1", f"group_size of at least 2 for {name}") for name in COMPARING),
    ],
)
def test_keys_without_effect_are_refused(tmp_path: Path, keys: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load_recipe(_recipe(tmp_path, keys))


def test_one_sample_a_prompt_will_do_where_none_are_compared(tmp_path: Path) -> None:
    for keys in ("name: remax", "name: ppo", "name: reinforce_pp", "name: grpo, advantage: mine.py:half"):
        assert load_recipe(_recipe(tmp_path, f"{keys}, group_size: 1")).recipe.algorithm.group_size == 1


def test_a_penalty_longer_than_the_response_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"max_response_tokens of at least algorithm.overlong_tokens \(99\)"):
        load_recipe(_recipe(tmp_path, "name: dapo, overlong_tokens: 99"))


def _recipe(folder: Path, keys: str) -> Path:
    path = folder / "recipe.yaml"
    text = (RECIPES / "tiny.yaml").read_text().replace("tiny_", f"{RECIPES}/tiny_")
    old = "algorithm: {name: grpo, group_size: 8}"
    assert old in text
    name = "" if "name:" in keys else "name: grpo, "
    size = "" if "group_size:" in keys else "group_size: 2, "
    path.write_text(text.replace(old, f"algorithm: {{{name}{size}{keys}}}"))
    return path
