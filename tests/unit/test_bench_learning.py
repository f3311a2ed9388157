"""What the recipes of the algorithms state about learning, and how `rlmq bench learning` judges it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.learning import judged
from rlmq.common.algorithms import ALGORITHMS
from rlmq.common.recipe.load import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes" / "algorithms"
RISES = {"figure": "reward_mean", "at_least": 0.8, "within_steps": 6}
FALLS = {"figure": "loss", "at_most": 0.2, "within_steps": 6}


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"score"}))
def test_every_algorithm_states_what_it_learns_and_what_it_must_not(name: str) -> None:
    path = RECIPES / f"{name}.yaml"
    stated = yaml.safe_load(path.read_text())["x-learning"]
    assert ("at_least" in stated) != ("at_most" in stated)
    recipe = load_recipe(path).recipe
    assert recipe.algorithm.name == name
    assert stated["within_steps"] <= recipe.train.steps
    shuffled = load_recipe(path, stated["shuffled"]).recipe
    assert (shuffled.reward, shuffled.data) != (recipe.reward, recipe.data)


@pytest.mark.parametrize(
    ("stated", "means", "shuffled", "step", "ratios"),
    [
        (RISES, [0.1, 0.7, 0.9, 0.95], 0.2, 5, (5 / 6, 0.25)),
        (RISES, [0.1, 0.7, 0.79, 0.7], 0.79, "never", (10.0, 0.79 / 0.8)),
        (FALLS, [0.9, 0.2, 0.1, 0.1], 0.5, 4, (4 / 6, 0.4)),
        (FALLS, [0.9, 0.8, 0.7, 0.6], 0.1, "never", (10.0, 2.0)),
    ],
)
def test_the_first_step_whose_mean_is_as_stated_counts(
    stated: dict[str, Any], means: list[float], shuffled: float, step: int | str, ratios: tuple[float, float]
) -> None:
    row, found = judged("it", stated, [1], [means], shuffled)
    assert row["seed 1"] == step
    assert tuple(found.values()) == pytest.approx(ratios)
