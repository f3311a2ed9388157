"""PPO with processes: a critic beside the actor, one process for each role, that may be killed like any other."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from integration.test_resume import reach_step

pytestmark = pytest.mark.timeout(240)

RECIPE = Path(__file__).parents[2] / "recipes" / "algorithms" / "ppo.yaml"
OPTIONS = ("train.steps=4", "evaluate.every_steps=4", "checkpoint.every_steps=2")


def hashes(run: Path, step: int) -> dict[str, str]:
    """SHA-256 of the weights and the optimizer of actor and critic."""
    folders = [run / name / f"step-{step:06d}" for name in ("checkpoints", "critic_checkpoints")]
    files = [folder / name for folder in folders for name in ("model.safetensors", "optimizer.safetensors")]
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def calm(module_cli: Any) -> Path:
    """A run without any disturbance."""
    done = module_cli.run("up", RECIPE, *OPTIONS, "run.name=calm")
    assert done.code == 0, done.text
    folder: Path = module_cli.newest_run("calm")
    return folder


def test_every_role_is_a_process_and_every_column_is_there(calm: Path) -> None:
    # then each role of the run had one process of its own
    roles = {path.stem for path in (calm / "logs").glob("*.log")}
    assert {f"{role}-0" for role in ("prompts", "rollout", "reward", "critic", "actor", "recorder")} <= roles
    # and every sample has the critic's and the actor's columns, one number for each response token
    tables = [pq.read_table(path) for path in sorted((calm / "samples").glob("train-*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist()]
    assert len(rows) == 4 * 64
    for row in rows:
        for name in ("values", "advantages", "returns"):
            assert len(row[name]) == len(row["response_ids"])
            assert all(map(math.isfinite, row[name]))
    # the head begins at zero and learns
    assert all(value == 0.0 for row in rows if row["step"] == 1 for value in row["values"])
    assert any(value != 0.0 for row in rows if row["step"] == 2 for value in row["values"])


def test_the_step_line_tells_of_the_critic(calm: Path) -> None:
    lines = [json.loads(line) for line in (calm / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == [1, 2, 3, 4]
    for line in train:
        for name in ("loss", "value_loss", "explained_variance", "value_mean", "critic_grad_norm"):
            assert math.isfinite(line[name])
    assert train[0]["value_mean"] == 0.0
    assert train[0]["value_loss"] > 0.0


@pytest.mark.parametrize("after", [1, 3])
def test_a_killed_critic_changes_no_bit_of_either(cli: Any, calm: Path, after: int) -> None:
    # given a run whose critic is killed -9 after some step
    process = cli.start("up", RECIPE, *OPTIONS, "run.name=killed")
    run = reach_step(cli, "killed", after)
    [critic] = [p for p in cli.processes() if _is_critic(p)]
    os.kill(critic.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    # then the run ends well, and all weights are the undisturbed run's
    assert process.returncode == 0, output
    assert hashes(run, 4) == hashes(calm, 4)


def _is_critic(process: psutil.Process) -> bool:
    words = process.cmdline()
    return "worker" in words and words[words.index("worker") + 1] == "critic"
