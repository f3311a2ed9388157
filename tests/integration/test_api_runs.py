"""Scripts as whole runs: they train, and go on after their controller was killed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PPO = RECIPES.parent / "docs" / "tutorials" / "ppo.py"
LATE = """
import rlmq

run = rlmq.Run("late", seed=7)
actor = run.actor("{recipes}/tiny_model.py:folder")
reward = run.reward(["{recipes}/tiny_task.py:letters"])
prompts = run.prompts("{recipes}/tiny_task.py:train", per_step=4, max_tokens=32)


def loop() -> None:
    for _ in run.steps(1000):
        batch = actor.generate(prompts.next(), max_tokens=16)
        actor.update(reward.score(batch), loss="grpo").wait(timeout_s=5)
        actor.publish()


if __name__ == "__main__":
    run.main(loop)
"""


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
    up = cli.start("up", PPO, "train.steps=3")

    def one_step() -> bool:
        return any((cli.folder / "runs").glob("ppo-*/metrics.jsonl")) and len(cli.metrics("ppo")) >= 1

    cli.wait_until(one_step, "a step", 200)
    for process in (*psutil.Process(up.pid).children(recursive=True), psutil.Process(up.pid)):
        if process.is_running():
            os.kill(process.pid, signal.SIGKILL)
    up.wait(20)
    cli.wait_until(lambda: not cli.processes(), "all are gone", 30)
    # when
    done = cli.run("up", PPO, "train.steps=3", timeout_s=250)
    # then
    assert done.code == 0, done.text
    assert {line["step"] for line in cli.metrics("ppo")} == {1, 2, 3}
    assert json.loads((cli.newest_run("ppo") / "summary.json").read_text())["steps"] == 3


@pytest.mark.timeout(300)
def test_a_future_that_is_late_names_who_it_waits_for(cli: Any) -> None:
    # given a script that trains, and waits with a limit
    script = cli.folder / "late.py"
    script.write_text(LATE.format(recipes=RECIPES))
    up = cli.start("up", script, "deadlines.drain_s=2")
    runs = cli.folder / "runs"
    cli.wait_until(lambda: any(runs.glob("late-*/metrics.jsonl")) and bool(cli.metrics("late")), "a step", 200)
    # when the worker that generates stands still
    [pid] = [p.pid for p in cli.processes() if "rollout" in p.cmdline()]
    os.kill(pid, signal.SIGSTOP)
    out, err = up.communicate(timeout=120)
    # then the run ends with the deadline's exit code, and says who has the rows
    assert up.returncode == 5, out + err
    [error] = [line for line in err.splitlines() if "at stage reward: got 32 not done after 5 s" in line]
    assert re.search(r"rollout-0 holds 32 rows of stage rollout|32 rows of stage rollout .* by rollout", error)
