"""A small valid recipe that tests vary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import Recipe

BASE = """\
run: {name: b, seed: 7}
model: ./m
data: {train: t.jsonl}
reward: [{function: "r.py:score"}]
train: {steps: 3}
"""

Read = Callable[..., Recipe]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """`read(text, *overrides)`: the recipe from this YAML; None is the base recipe."""

    def read(text: str | None = None, *overrides: str) -> Recipe:
        path = tmp_path / "b.yaml"
        path.write_text(BASE if text is None else text)
        return load_recipe(path, overrides).recipe

    return read


@pytest.fixture
def base() -> str:
    return BASE
