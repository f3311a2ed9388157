"""Every shipped recipe is valid, and its task is what its comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlmq.common.recipe.load import dump_recipe, load_recipe
from rlmq.common.user_code import load_function
from rlmq.producers.data import load_rows

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_is_valid_with_its_data_and_rewards(path: Path, tmp_path: Path) -> None:
    loaded = load_recipe(path)
    recipe = loaded.recipe
    sources = {**recipe.training_sets, **recipe.evaluation_sets}
    for key, source in sources.items():
        assert load_rows(source, loaded.folder, subject=key)
    for block in (one for one in recipe.reward if one.function is not None):
        load_function(block.source, loaded.folder, subject="reward")
    load_function(recipe.model, loaded.folder, subject="model")
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml").recipe == recipe


def rows(source: str) -> list[dict[str, Any]]:
    return load_rows(source, RECIPES, subject="data")


def summands(row: dict[str, Any]) -> tuple[int, int]:
    found = re.fullmatch(r"What is (\d+) \+ (\d+)\? Answer with just the number\.", row["prompt"][0]["content"])
    assert found is not None
    return int(found[1]), int(found[2])


def score(function: str, texts: list[str], **columns: Any) -> list[float]:
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    scores: list[float] = load_function(function, RECIPES, subject="reward")(completions=chats, **columns)
    return scores


def test_the_held_out_sums_are_never_trained_on_in_either_order() -> None:
    train = {summands(row) for row in rows("sums.py:train")}
    held_out = {summands(row) for row in rows("sums.py:one_digit")}
    assert (len(train), len(held_out)) == (61, 20)
    assert train | held_out == {(a, b) for a in range(1, 10) for b in range(1, 10)}
    assert not {(b, a) for a, b in held_out} & train


def test_two_digit_sums_are_50_different_ones() -> None:
    sums = [summands(row) for row in rows("sums.py:two_digit")]
    assert len(set(sums)) == 50
    assert all(10 <= a <= 99 and 10 <= b <= 99 for a, b in sums)


@pytest.mark.parametrize("source", ["sums.py:train", "sums.py:one_digit", "sums.py:two_digit"])
def test_answers_are_the_sums_and_shuffled_ones_are_mostly_not(source: str) -> None:
    data = rows(source)
    assert [row["answer"] for row in data] == [a + b for a, b in map(summands, data)]
    assert sorted(row["shuffled_answer"] for row in data) == sorted(row["answer"] for row in data)
    assert sum(row["shuffled_answer"] == row["answer"] for row in data) <= len(data) / 5


def test_a_sum_is_right_when_its_last_number_is() -> None:
    texts = ["12", "5 + 7 = 12.", "The answer is 12", "12 or 13", "twelve", "", "-12", "012"]
    right = score("sums.py:correct", texts, answer=[12] * 8, shuffled_answer=[13] * 8, prompts=None)
    assert right == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert score("sums.py:shuffled", texts, answer=[12] * 8, shuffled_answer=[13] * 8)[3] == 1.0


def test_letters_is_the_share_of_lower_case_letters() -> None:
    letters = load_function("tiny_task.py:letters", RECIPES, subject="reward")
    assert letters(completions=["abcd", "ab12", "AB", "", "aé"], prompts=None) == [1.0, 0.5, 0.0, 0.0, 0.5]


def test_held_out_things_of_the_tiny_task_are_not_trained_on() -> None:
    train = {row["prompt"] for row in rows("tiny_task.py:train")}
    held_out = {row["prompt"] for row in rows("tiny_task.py:held_out")}
    assert (len(train), len(held_out), len(train & held_out)) == (24, 8, 0)
