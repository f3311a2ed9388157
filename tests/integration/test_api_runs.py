"""Scripts as whole runs: they train, and go on after their controller was killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["reuse", "delayed", "second_score"])
def test_each_loop_runs(cli: Any, name: str) -> None:
    done = cli.run("up", RECIPES / "loops" / f"{name}.py", timeout_s=280)
    assert done.code == 0, done.text
    lines = cli.metrics("loop")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    if name == "delayed":  # the actor has no update in steps 1 and 3
        assert ["grad_norm" in line for line in lines] == [False, True, False]


@pytest.mark.timeout(500)
def test_ppo_goes_on_after_its_controller_was_killed(cli: Any) -> None:
    # given a run whose controller, and everything with it, is killed within the second step
    up = cli.start("up", RECIPES / "ppo.py", "train.steps=3")

    def one_step() -> bool:
        return any((cli.folder / "runs").glob("ppo-*/metrics.jsonl")) and len(cli.metrics("ppo")) >= 1

    cli.wait_until(one_step, "a step", 200)
    for process in (*psutil.Process(up.pid).children(recursive=True), psutil.Process(up.pid)):
        if process.is_running():
            os.kill(process.pid, signal.SIGKILL)
    up.wait(20)
    cli.wait_until(lambda: not cli.processes(), "all are gone", 30)
    # when
    done = cli.run("up", RECIPES / "ppo.py", "train.steps=3", timeout_s=250)
    # then
    assert done.code == 0, done.text
    assert {line["step"] for line in cli.metrics("ppo")} == {1, 2, 3}
    assert json.loads((cli.newest_run("ppo") / "summary.json").read_text())["steps"] == 3
