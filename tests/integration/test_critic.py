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


def hashes(run: Path, step: int, critic: str = "critic") -> dict[str, str]:
    """SHA-256 of the weights and the optimizer of actor and critic."""
    folders = {"actor": run / "checkpoints", "critic": run / f"{critic}_checkpoints"}
    names = ("model.safetensors", "optimizer.safetensors")
    files = {f"{who}/{name}": f / f"step-{step:06d}" / name for who, f in folders.items() for name in names}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


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


def test_a_killed_critic_changes_no_bit_of_either(cli: Any, calm: Path) -> None:
    # given a run whose critic is killed -9 after some step
    process = cli.start("up", RECIPE, *OPTIONS, "run.name=killed")
    run = reach_step(cli, "killed", 3)
    [critic] = [p for p in cli.processes() if _is("critic", p)]
    os.kill(critic.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    # then the run ends well, and all weights are the undisturbed run's
    assert process.returncode == 0, output
    assert hashes(run, 4) == hashes(calm, 4)


CLASS = """
from pathlib import Path

from rlmq.consumers.critic import CriticRole


class Mine(CriticRole):
    def loss(self, values, batch):
        Path(__file__).with_name("asked").touch()
        return super().loss(values, batch)
"""


CRITICS = """
critics:
- {name: first, lr: 1.0e-2, role: "rlmq.consumers.critic:CriticRole"}
- {name: second, lr: 1.0e-2, role: "mine.py:Mine"}
"""


def test_two_critics_of_the_same_values_are_roles_of_their_own_and_one_is_the_users(
    cli: Any, calm: Path, tmp_path: Path
) -> None:
    # given a run where two roles give the values, the class of one of them a file's, which is killed -9 on the way
    (tmp_path / "mine.py").write_text(CLASS)
    recipe = tmp_path / "two.yaml"
    recipe.write_text(RECIPE.read_text().replace("../", f"{RECIPE.parents[1]}/") + CRITICS)
    process = cli.start("up", recipe, *OPTIONS, "run.name=two")
    run = reach_step(cli, "two", 1)
    [critic] = [p for p in cli.processes() if _is("second", p)]
    os.kill(critic.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (tmp_path / "asked").is_file()
    # then each has its column, process and checkpoints; that of two equal ones is one critic's mean, bit for bit
    assert {"first-0", "second-0"} <= {path.stem for path in (run / "logs").glob("*.log")}
    assert not (run / "logs" / "critic-0.log").exists()
    rows = pq.read_table(next((run / "samples").glob("train-000003-*.parquet"))).to_pylist()
    assert all(row["values.first"] == row["values.second"] and any(row["values.first"]) for row in rows)
    assert hashes(run, 4, critic="first") == hashes(calm, 4) == hashes(run, 4, critic="second")


def _is(role: str, process: psutil.Process) -> bool:
    words = process.cmdline()
    return "worker" in words and words[words.index("worker") + 1] == role
