"""What `rlmq check` knows about rewards and their weights before a process of the run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmq.cli_check import find_problems
from rlmq.common.recipe.load import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SOURCE = """
def f(completions): return [1.0 for _ in completions]
def neither(x, y): return 1
class Needs:
    def __init__(self, must): pass
    def __call__(self, completions, **_): return [1.0]
def unknown(step): return {"f": 1.0} if step < 3 else {"g": 1.0}
def text(step): return {"f": "heavy"}
def nothing(step): return None
"""


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "reward.0.function",
            "neither",
            "got a function with the parameters (x, y), expected f(prompts, completions",
        ),
        ("reward.0.function", "Needs", "missing 1 required positional argument: 'must'"),
        ("reward.0.arguments.colour", "1", "arguments: got colour, expected one of its parameters (completions)"),
        ("reward_controller", "unknown", "step 3: got 'g', expected weights by name, of f"),
        ("reward_controller", "text", "step 1: got f: 'heavy', expected a finite number"),
        ("reward_controller", "nothing", "step 1: got None, expected weights by name, of f"),
    ],
)
def test_rewards_and_weights_that_cannot_be_are_named(tmp_path: Path, key: str, value: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    spec = value if value == "1" else f"{tmp_path}/mine.py:{value}"
    given = [f"reward.0.function={tmp_path}/mine.py:f", "reward.0.name=f", f"{key}={spec}"]

    (problem,) = find_problems(load_recipe(RECIPES / "tiny.yaml", given))

    assert told in str(problem)
