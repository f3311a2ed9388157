"""The actor cut over ranks (`strategy: 3d`): hybrid ranks that die, and a run continued from its checkpoint."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(900)

STEPS = 3
CUT = (
    f"train.steps={STEPS}",
    "evaluate.every_steps=0",
    "checkpoint.every_steps=1",
    "placement.actor.strategy=3d",
    "placement.actor.workers=2",
    "placement.actor.tp=2",
    "placement.actor.threads=1",
)
HYBRID = (*CUT, "placement.actor.hybrid=true", "placement.actor.generation.tp=1")


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


def test_a_hybrid_rank_that_dies_changes_no_bit_of_what_rollout_workers_lead_to(cli: Any) -> None:
    # given a run whose actor is two tensor ranks that send their weights to a rollout worker
    done = cli.run("up", cli.tiny, *CUT, "run.name=apart", timeout_s=400)
    assert done.code == 0, done.text
    apart = cli.newest_run("apart")
    assert (apart / "logs" / "rollout-0.log").exists()
    # when the ranks generate in place instead, each the whole model, and one of them is killed after its first step
    process = cli.start("up", cli.tiny, *HYBRID, "run.name=hybrid")
    run = reach_step(cli, "hybrid", 1)
    [victim] = [p for p in cli.processes() if {"worker", "actor", "1"} <= set(p.cmdline())]
    os.kill(victim.pid, signal.SIGKILL)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    assert not (run / "logs" / "rollout-0.log").exists()
    assert "rollout.generated" in "".join((run / "logs" / f"actor-{i}.log").read_text() for i in (0, 1))
    # then the last step's weights are the same to the last bit, and a model of transformers
    assert weights(run) == weights(apart)
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"step-{STEPS:06d}")
    with torch.no_grad():
        assert bool(model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all())
