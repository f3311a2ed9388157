"""`rlmq remap`: a live run goes on with its actor on other ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)


def test_the_actor_goes_from_one_rank_to_two_slices_and_no_step_is_lost(cli: Any) -> None:
    # given a run that is at work
    small = ("data.eval=null", "data.prompts_per_step=2", "rollout.max_response_tokens=8", "run.name=moved")
    first = cli.start("up", cli.tiny, *small, "train.steps=2000", "deterministic=false")
    cli.wait_until(lambda: len(steps(cli)) >= 2, "two steps", 90)
    refused = cli.run("remap", "moved", "actor", "devices=[0,0]")
    assert refused.code == 2 and "each once" in refused.text
    refused = cli.run("remap", "moved", "painter", "devices=[0]")
    assert refused.code == 2 and "expected one of" in refused.text
    # when its actor gets two ranks that hold slices
    second = cli.start("remap", "moved", "actor", "workers=2", "strategy=fsdp", "threads=1")
    assert first.wait(timeout=120) == 0
    ended = len(steps(cli))
    cli.wait_until(lambda: len(steps(cli)) >= ended + 2, "two steps more", 120)
    done = cli.run("drain", "moved", timeout_s=120)
    # then every step was trained once, in order, and the last checkpoint is of two ranks
    assert done.code == 0, done.text
    assert second.wait(timeout=60) == 0
    found = steps(cli)
    assert found == list(range(1, len(found) + 1))
    newest = max((cli.newest_run("moved") / "checkpoints").glob("step-*"))
    assert json.loads((newest / "manifest.json").read_text())["world_size"] == 2


def steps(cli: Any) -> list[int]:
    path = Path(cli.folder) / "runs" / "moved-1" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line)["step"] for line in lines if "grad_norm" in json.loads(line)]
