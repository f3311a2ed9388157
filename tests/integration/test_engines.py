"""Whole runs with other generation engines than the deterministic `hf`, and engines that cannot be had."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from contract.bench import build_model
from transformers import AutoTokenizer

from rlmq.common.models import resolve_model

OWN = Path(__file__).parents[1] / "contract" / "plain_engine.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["hf", str(OWN) + ":PlainEngine", "vllm"], ids=["hf", "own-file", "vllm"])
def test_a_run_with_an_engine_whose_logprobs_are_the_trainers(cli: Any, engine: str, tmp_path: Path) -> None:
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    # given heads of a size that vLLM has, chunks of two groups, so that slots are refilled, and an alert that
    # everything but equality sets off
    model = tmp_path / "model"
    build_model(seed=0, tied=True).save_pretrained(model)
    AutoTokenizer.from_pretrained(resolve_model("tiny_model.py:folder", cli.tiny.parent)).save_pretrained(model)
    done = cli.run(
        *("up", cli.tiny, f"model={model}", "train.steps=2", "deterministic=false", f"rollout.engine={engine}"),
        *("rollout.batch_size_per_device=16", "rollout.max_response_tokens=12", "rollout.mismatch_alert=1e-12"),
        timeout_s=280,
    )
    assert done.code == 0, done.text
    steps = [line for line in cli.metrics("tiny") if line["kind"] == "train"]
    assert [line["step"] for line in steps] == [1, 2]
    # then the first step's tokens have the trainer's log-probs, and so have the second's, after a weight sync
    for line in steps:
        assert 0 < line["logprob_mismatch"] <= line["logprob_mismatch_max"] < 1e-4, line
        assert abs(line["logprob_mismatch_kl"]) < 1e-6
    assert "rollout and trainer disagree" in done.text + _logs(cli.newest_run("tiny"))


def _logs(run: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in run.rglob("*.log"))
