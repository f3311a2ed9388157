"""Interrupted runs go on with the same command, to the same weights."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)

STEPS = "train.steps=6"


def weights(run: Path, step: int) -> str:
    """SHA-256 of a checkpoint's weights."""
    return hashlib.sha256((run / "checkpoints" / f"step-{step:06d}" / "model.safetensors").read_bytes()).hexdigest()


def trained_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return max((line["step"] for line in lines if line["kind"] == "train"), default=0)


def reach_step(cli: Any, name: str, step: int) -> Path:
    """Wait until the newest run has trained `step`; its folder."""

    def reached() -> bool:
        folders = list((cli.folder / "runs").glob(f"{name}*/metrics.jsonl"))
        return bool(folders) and trained_steps(folders[-1].parent) >= step

    cli.wait_until(reached, f"step {step} of {name}", 90.0)
    folder: Path = cli.newest_run(name)
    return folder


@pytest.fixture(scope="module")
def undisturbed(module_cli: Any) -> str:
    """The weights after six steps without any disturbance."""
    done = module_cli.run("up", module_cli.tiny, STEPS, "run.name=calm")
    assert done.code == 0, done.text
    return weights(module_cli.newest_run("calm"), 6)


def test_ctrl_c_saves_and_the_same_command_goes_on(cli: Any, undisturbed: str) -> None:
    # given a run that is interrupted after its second step
    process = cli.start("up", cli.tiny, STEPS, "run.name=cut")
    run = reach_step(cli, "cut", 2)
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    # then everything is gone in time, the exit code says so, and what was trained has a checkpoint
    assert time.monotonic() - pressed < 10.0
    assert process.returncode == 130
    assert not cli.processes()
    done = trained_steps(run)
    saved = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert saved
    assert saved[-1] >= done
    assert json.loads((run / "summary.json").read_text())["exit"] == 130
    # when the same command is given again, then it ends with the undisturbed run's weights
    again = cli.run("up", cli.tiny, STEPS, "run.name=cut")
    assert again.code == 0, again.text
    assert weights(run, 6) == undisturbed
    assert [line["step"] for line in cli.metrics("cut")] == [1, 2, 3, 4, 5, 6]


def test_kill_9_of_up_leaves_no_orphan_and_the_same_command_goes_on(cli: Any, undisturbed: str) -> None:
    process = cli.start("up", cli.tiny, STEPS, "run.name=shot")
    run = reach_step(cli, "shot", 2)
    process.kill()
    process.communicate(timeout=10)
    cli.wait_until(lambda: not cli.processes(), "no orphan is left", 10.0)
    again = cli.run("up", cli.tiny, STEPS, "run.name=shot")
    assert again.code == 0, again.text
    assert weights(run, 6) == undisturbed


@pytest.mark.parametrize("role", ["rollout", "reward", "actor", "prompts", "recorder", "controller"])
def test_a_process_that_is_killed_is_replaced_and_nothing_is_lost(cli: Any, undisturbed: str, role: str) -> None:
    # given a run in its second step
    name = f"kill-{role}"
    process = cli.start("up", cli.tiny, STEPS, f"run.name={name}")
    run = reach_step(cli, name, 2)
    # when one of its processes is killed -9
    words = ["controller"] if role == "controller" else ["worker", role]
    [victim] = [p for p in cli.processes() if all(word in p.cmdline() for word in words) and p.pid != process.pid]
    os.kill(victim.pid, signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    # then the run ends well, with the undisturbed run's weights
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    assert weights(run, 6) == undisturbed


def test_three_steps_and_three_more_are_six(cli: Any, undisturbed: str) -> None:
    for steps in (3, 6):
        done = cli.run("up", cli.tiny, f"train.steps={steps}", "run.name=halves")
        assert done.code == 0, done.text
    assert weights(cli.newest_run("halves"), 6) == undisturbed


def test_a_changed_learning_rate_is_shown_and_refused(cli: Any) -> None:
    # given a finished run
    done = cli.run("up", cli.tiny, "train.steps=2", "run.name=rate", "train.lr_schedule=cosine", "train.lr_steps=6")
    assert done.code == 0, done.text
    before = (cli.newest_run("rate") / "metrics.jsonl").read_bytes()
    # when it is continued with another learning rate
    changed = ["train.steps=4", "train.lr=1e-3", "train.lr_schedule=cosine", "train.lr_steps=6"]
    refused = cli.run("up", cli.tiny, "run.name=rate", *changed)
    # then both values are shown and nothing has happened
    assert refused.code == 2
    assert "train.lr" in refused.text
    assert "0.005" in refused.text
    assert "0.001" in refused.text
    assert "Traceback" not in refused.text
    assert (cli.newest_run("rate") / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_says_so(cli: Any) -> None:
    assert cli.run("up", cli.tiny, "train.steps=1", "run.name=short").code == 0
    again = cli.run("up", cli.tiny, "train.steps=1", "run.name=short")
    assert again.code == 0
    assert "--fresh" in again.text
    fresh = cli.run("up", cli.tiny, "train.steps=1", "run.name=short", "--fresh")
    assert fresh.code == 0
    assert len(list((cli.folder / "runs").glob("short-*/summary.json"))) == 2


@pytest.mark.parametrize("role", ["rollout", "actor", "controller"])
def test_a_process_that_is_killed_while_it_starts_is_replaced(cli: Any, undisturbed: str, role: str) -> None:
    # given a run none of whose workers is ready yet
    name = f"early-{role}"
    process = cli.start("up", cli.tiny, STEPS, f"run.name={name}")
    words = ["controller"] if role == "controller" else ["worker", role]

    def victims() -> list[int]:
        return [p.pid for p in cli.processes() if all(w in p.cmdline() for w in words) and p.pid != process.pid]

    cli.wait_until(lambda: bool(victims()), f"{role} has started")
    # when one of them is killed -9
    os.kill(victims()[0], signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    # then the run ends well, with the undisturbed run's weights
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    assert weights(cli.newest_run(name), 6) == undisturbed


def test_a_damaged_newest_checkpoint_is_named_and_nothing_is_thrown_away(cli: Any) -> None:
    # given a finished run whose newest checkpoint was damaged since
    assert cli.run("up", cli.tiny, "train.steps=4", "run.name=rot", "checkpoint.every_steps=2").code == 0
    run = cli.newest_run("rot")
    file = run / "checkpoints" / "step-000004" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    log = (run / "batch_log.jsonl").read_bytes()
    # when it goes on, then it is refused, the step is named, and the batch log is as it was
    more = ["train.steps=6", "run.name=rot", "checkpoint.every_steps=2"]
    refused = cli.run("up", cli.tiny, *more)
    assert refused.code == 6, refused.text
    assert "expected that of step 4" in refused.text
    assert "Traceback" not in refused.text
    assert (run / "batch_log.jsonl").read_bytes() == log
    # when the file is restored, then it goes on
    file.write_bytes(whole)
    again = cli.run("up", cli.tiny, *more)
    assert again.code == 0, again.text
    assert [line["step"] for line in cli.metrics("rot")] == [1, 2, 3, 4, 5, 6]
