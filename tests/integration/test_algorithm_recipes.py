"""Every recipe of `recipes/algorithms/` runs two steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes" / "algorithms").glob("*.yaml"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_runs_two_steps(recipe: Path, cli: Any) -> None:
    done = cli.run("up", recipe, "--fresh", "train.steps=2", "run.name=two_steps")

    assert done.code == 0, done.text
    lines = [json.loads(line) for line in (cli.newest_run("two_steps") / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == [1, 2]
    assert all(math.isfinite(value) for line in train for value in line.values() if isinstance(value, float))
    assert all(line["grad_norm"] > 0 for line in train)
