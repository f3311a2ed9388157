"""The files of docs/tutorials run, and its page shows them as they are."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.timeout(200)

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
PAGE = (FOLDER / "README.md").read_text()


def difference(before: str, after: str) -> list[str]:
    """Lines that change, by what they are in a diff."""
    texts = [(FOLDER / name).read_text().splitlines() for name in (before, after)]
    return [
        line for line in difflib.unified_diff(*texts, n=0, lineterm="") if not line.startswith(("---", "+++", "@@"))
    ]


def python(script: str, *words: str, cwd: Path) -> str:
    argv = [sys.executable, str(FOLDER / script), *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def samples(run: Path, table: str = "train") -> list[dict[str, Any]]:
    files = sorted((run / "samples").glob(f"{table}-*.parquet"))
    rows = {row["sample_id"]: row for file in files for row in pq.read_table(file).to_pylist()}
    return list(rows.values())


def test_the_page_shows_each_difference_and_names_each_file() -> None:
    shown = re.findall(r"^<!-- (\S+) (\S+) -->\n```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert [pair[:2] for pair in shown] == [("ppo.py", "safe_rlhf.py"), ("safe_rlhf.py", "remax.py")]
    for before, after, text in shown:
        assert text.splitlines() == difference(before, after)
    assert set(re.findall(r"\]\((\w+\.(?:py|yaml))\)", PAGE)) == {one.name for one in FOLDER.glob("*.[py]*")}


def test_the_trainer_is_20_lines() -> None:
    assert len((FOLDER / "trainer.py").read_text().strip().splitlines()) <= 20


@pytest.mark.parametrize(
    ("name", "figures", "columns"),
    [
        ("ppo", {"value_loss", "ref_kl"}, {"values", "ref_logprobs"}),
        ("safe_rlhf", {"value_loss", "multiplier", "cost_mean"}, {"cost", "cost_values", "reward.early_letters"}),
        ("remax", {"ref_kl"}, {"baseline", "ref_logprobs"}),
    ],
)
def test_one_pipeline_is_three_algorithms(cli: Any, name: str, figures: set[str], columns: set[str]) -> None:
    python(f"{name}.py", "--fresh", "train.steps=1", cwd=cli.folder)
    [line] = cli.metrics(name.replace("_", "-"))
    assert figures <= set(line)
    trained = [row for row in samples(cli.newest_run()) if row["advantages"] is not None]
    assert len(trained) == 32
    assert all(row[column] is not None for row in trained for column in columns)


def test_the_curriculum_mixes_its_sets_by_step(cli: Any) -> None:
    done = cli.run("up", FOLDER / "curriculum.yaml", "train.steps=3", timeout_s=180)
    assert done.code == 0, done.text
    rows = samples(cli.newest_run("curriculum"))
    prompts = {(row["step"], row["group_id"]): row["source"] for row in rows}
    long = [
        sum(one == (step, "long") for one in ((s, source) for (s, _), source in prompts.items()))
        for step in (1, 2, 3)
    ]
    assert long == [0, 4, 6]


def test_weights_change_while_the_run_goes_on(cli: Any) -> None:
    # given a run whose weights are a function of the step
    up = cli.start(
        "up", FOLDER / "weights.yaml", "reward_controller=weights.py:by_step", "checkpoint.every_steps=0"
    )
    cli.wait_until(lambda: any((cli.folder / "runs").glob("*/metrics.jsonl")), "the run has begun", 120)
    cli.wait_until(lambda: cli.metrics("weights") != [], "a step", 60)
    # when an operator sets one
    done = cli.run("set", "reward.weights.early=0.5")
    assert done.code == 0, done.text
    told = re.search(r"reward\.early\.weight=0\.5 from step (\d+) on", done.out)
    assert told is not None, done.out
    first = int(told[1])
    cli.wait_until(lambda: cli.metrics("weights")[-1]["step"] >= first, "a step with it", 60)
    assert cli.run("stop", "weights").code == 0
    assert up.wait(60) == 0
    # then it counts from the step that was told, and the function's before
    rows = [row for row in samples(cli.newest_run("weights")) if row["reward"] is not None]
    assert {row["step"] >= first for row in rows} == {True, False}
    for row in rows:
        weight = 0.5 if row["step"] >= first else 0.0 if row["step"] <= 10 else -1.0
        assert row["reward"] == row["reward.letters"] + weight * row["reward.early"]


def test_a_trainer_makes_two_steps(cli: Any) -> None:
    python("trainer.py", "--fresh", "train.steps=2", cwd=cli.folder)
    assert len(cli.metrics("trainer")) == 2
    printed = (cli.newest_run("trainer") / "logs" / "controller-0.log").read_text()
    assert len(re.findall(r"^step \d: reward 0\.\d{3}$", printed, re.MULTILINE)) == 2


def test_a_trainer_of_grpo_makes_a_step(cli: Any) -> None:
    # given the same script with GRPO's trainer, which has no critic
    text = (FOLDER / "trainer.py").read_text().replace("../../recipes", str(FOLDER.parents[1] / "recipes"))
    text = re.sub(r" *critic=.*\n", "", text.replace("PPOTrainer", "GRPOTrainer"))
    for old, new in (("actor=", "model="), ("reward_model=", "reward=")):
        text = text.replace(old, new)
    (cli.folder / "grpo.py").write_text(text)
    # when it is run, then it trains and prints
    done = subprocess.run(
        [sys.executable, "grpo.py", "--fresh", "train.steps=1"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=cli.folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in cli.metrics("grpo")] == [1]


def test_only_the_rewards(tmp_path: Path) -> None:
    assert f"$ python docs/tutorials/rewards_only.py\n{python('rewards_only.py', cwd=tmp_path)}```" in PAGE
