"""A run that trains adapters: one model is policy and reference, and the end does not depend on what is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(400)

SMALL = (
    "data.prompts_per_step=2",
    "algorithm.group_size=4",
    "algorithm.kl_coef=0.1",
    "rollout.max_response_tokens=8",
    "data.eval=null",
    "train.lora.r=4",
)


def test_adapters_are_resumed_to_the_same_bits_whatever_is_sent(module_cli: Any) -> None:
    # given a run of three steps that sends adapters, and one that sends merged weights and ends after two
    cli = module_cli
    for name, sync, steps in (("alone", "adapters", 3), ("merged", "merged", 2), ("merged", "merged", 3)):
        more = (f"run.name={name}", f"train.lora.sync={sync}", f"train.steps={steps}")
        done = cli.run("up", cli.tiny, *SMALL, *more, timeout_s=200)  # the last goes on where the second ended
        assert done.code == 0, done.text
    # then both have the same weights and adapters, and no process held the reference
    one, other = (cli.newest_run(name) for name in ("alone", "merged"))
    path = Path("checkpoints") / "step-000003"
    for file in (path / "model.safetensors", path / "adapter" / "adapter_model.safetensors"):
        found, same = load_file(one / file), load_file(other / file)
        assert found.keys() == same.keys() and all(torch.equal(found[key], same[key]) for key in found), file
    assert not list((one / "logs").glob("reference*"))
    steps = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    kl = [step["ref_kl"] for step in steps if "ref_kl" in step]
    assert len(kl) == 3 and kl[0] == 0 and kl[2] > 0
