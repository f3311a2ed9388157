"""Prompts by measured pass rate, in a whole run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from integration.test_resume import reach_step

pytestmark = pytest.mark.timeout(240)

OPTIONS = (
    "run.name=measured",
    "train.steps=6",
    "data.eval=null",
    "data.difficulty.window=[0.2, 0.6]",
    "data.difficulty.pass_reward=0.1",
    "data.difficulty.outside=0.0",
)


def steps_of(run: Path) -> list[dict[str, float]]:
    """Of each step, the pass rate of every prompt that it trained on, in the order of admission."""
    found = []
    for step in range(1, 7):
        parts = sorted((run / "samples").glob(f"train-{step:06d}-*.parquet"))
        rows = {row["sample_id"]: row for part in parts for row in pq.read_table(part).to_pylist()}
        passed: dict[str, list[bool]] = {}
        for name in sorted(rows):
            passed.setdefault(rows[name]["prompt_text"], []).append(rows[name]["reward"] >= 0.1)
        found.append({prompt: sum(each) / len(each) for prompt, each in passed.items()})
    return found


def test_a_run_takes_the_prompts_that_its_recorded_rewards_say_though_their_process_is_killed(cli: Any) -> None:
    process = cli.start("up", cli.tiny, *OPTIONS)
    run = reach_step(cli, "measured", 2)
    [prompts] = [p for p in cli.processes() if "worker" in p.cmdline() and "prompts" in p.cmdline()]
    os.kill(prompts.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output

    steps = steps_of(run)
    assert all(len(step) == 8 for step in steps)
    rates: dict[str, float] = {}
    left_out = 0
    for step in steps:
        fitting = [name for name in step if name not in rates or 0.2 <= rates[name] <= 0.6]
        known = {name for name, rate in rates.items() if 0.2 <= rate <= 0.6} | (set(step) - rates.keys())
        # a prompt outside the window is taken only where the data have no other one left
        assert len(fitting) == len(step) or len(known) < 8
        left_out += sum(not 0.2 <= rate <= 0.6 for name, rate in rates.items() if name not in step)
        rates |= step
    assert left_out > 0
