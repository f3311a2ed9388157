"""Trainer ranks: one dies in a step, and a run is continued with another number of them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

STEPS = 6
TWO_RANKS = (
    f"train.steps={STEPS}",
    "evaluate.every_steps=0",
    "placement.actor.workers=2",
    "placement.actor.threads=1",
)


def weights(run: Path) -> str:
    """SHA-256 of the last step's weights."""
    path = run / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def reach_step(cli: Any, name: str, step: int) -> Path:
    """Wait until the newest run has trained `step`; its folder."""

    def reached() -> bool:
        found = list((cli.folder / "runs").glob(f"{name}*/metrics.jsonl"))
        return bool(found) and found[-1].read_text().count('"kind": "train"') >= step

    cli.wait_until(reached, f"step {step} of {name}", 200.0)
    folder: Path = cli.newest_run(name)
    return folder


def kill(cli: Any, *words: str) -> None:
    [victim] = [p for p in cli.processes() if all(word in p.cmdline() for word in words)]
    os.kill(victim.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(module_cli: Any) -> str:
    """The weights of two ranks without any disturbance."""
    done = module_cli.run("up", module_cli.tiny, *TWO_RANKS, "run.name=calm", timeout_s=280)
    assert done.code == 0, done.text
    return weights(module_cli.newest_run("calm"))


def test_a_replay_has_as_many_ranks_and_is_the_run_to_the_bit(module_cli: Any, undisturbed: str) -> None:
    assert undisturbed
    done = module_cli.run("replay", "calm", "--json")
    assert done.code == 0, done.text
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [(line["step"], line["verdict"]) for line in lines] == [(step, "equal") for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_dies_ends_the_others_and_all_meet_anew(cli: Any, undisturbed: str, rank: str) -> None:
    process = cli.start("up", cli.tiny, *TWO_RANKS, "run.name=mesh")
    run = reach_step(cli, "mesh", 2)
    kill(cli, "worker", "actor", "--index", rank)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    assert weights(run) == undisturbed


def test_logged_steps_are_redone_by_another_number_of_ranks(cli: Any) -> None:
    # given a run of two ranks, killed with all its processes after its third step, without a checkpoint
    options = (*TWO_RANKS, "deterministic=false", "checkpoint.every_steps=0", "run.name=fewer")
    process = cli.start("up", cli.tiny, *options)
    run = reach_step(cli, "fewer", 3)
    process.kill()
    process.communicate(timeout=10)
    cli.wait_until(lambda: not cli.processes(), "no orphan is left", 15.0)
    # when it is continued with one rank
    again = cli.run("up", cli.tiny, *options, "placement.actor.workers=1", timeout_s=280)
    # then that one redoes what both had logged, and goes on
    assert again.code == 0, again.text
    assert "[info] redo" in (run / "logs" / "actor-0.log").read_text()
    assert [line["step"] for line in cli.metrics("fewer")] == list(range(1, STEPS + 1))


def test_deterministic_mode_refuses_another_number_of_ranks_before_anything_starts(cli: Any) -> None:
    done = cli.run("up", cli.tiny, "train.steps=1", "evaluate.every_steps=0", "run.name=exact", timeout_s=280)
    assert done.code == 0, done.text
    refused = cli.run("up", cli.tiny, "train.steps=2", "placement.actor.workers=2", "run.name=exact")
    assert refused.code == 2
    assert "placement.actor.workers: 1 -> 2" in refused.text
