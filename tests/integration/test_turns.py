"""A whole run whose responses have several turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.timeout(240)

CALCULATOR = Path(__file__).resolve().parents[2] / "recipes" / "calculator.yaml"
ALWAYS = """
class Always:
    def answer(self, text, fields):
        return "<" + fields["prompt"][0] + ">"
"""


def test_answers_are_in_the_samples_and_no_samples_of_the_policy(cli: Any) -> None:
    # given an environment that answers every turn that ended by itself
    (cli.folder / "always.py").write_text(ALWAYS)
    environment = f"rollout.environment={cli.folder / 'always.py'}:Always"
    # when a run trains two steps on it
    done = cli.run("up", CALCULATOR, environment, "train.steps=2", "run.name=turns")
    assert done.code == 0, done.text
    # then there are responses of several turns, each in its budget, and answers do not count in the loss
    [file, *_] = sorted((cli.newest_run("turns") / "samples").glob("train-*.parquet"))
    rows = pq.read_table(file).to_pylist()
    several = [row for row in rows if row["turns"] and row["turns"][-1] > 0]
    assert several
    for row in rows:
        assert len(row["response_ids"]) == len(row["turns"]) == len(row["loss_mask"]) <= 24
    for row in several:
        assert f"<{json.loads(row['record'])['prompt'][0]}>" in row["response_text"]
        assert row["loss_mask"].count(False) == 3 * row["turns"][-1]
    # and a wrong name is known before anything starts
    wrong = cli.run("check", CALCULATOR, "rollout.environment=calculator.py:Nix")
    assert wrong.code == 2
    assert "rollout.environment" in wrong.err
