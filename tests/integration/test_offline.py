"""Whole runs of the algorithms that learn from rows with their responses."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(240)

RECIPES = Path(__file__).parents[2] / "recipes"
ALGORITHMS = RECIPES / "algorithms"


def weights(run: Path, step: int) -> str:
    """SHA-256 of a checkpoint's weights."""
    return hashlib.sha256((run / "checkpoints" / f"step-{step:06d}" / "model.safetensors").read_bytes()).hexdigest()


def base_folder() -> str:
    spec = importlib.util.spec_from_file_location("tiny_model", RECIPES / "tiny_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.folder())


def first_rows(run: Path) -> list[dict[str, Any]]:
    """The recorded rows of step 1."""
    import pyarrow.parquet as pq

    parts = sorted((run / "samples").glob("train-000001-*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def sequence_logprobs(rows: list[dict[str, Any]]) -> list[float]:
    """Sum of the log-probs of each row's response, by transformers in float64, a row at a time, from its texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for row in rows:
        prompt = tokenizer.encode(row["prompt_text"], add_special_tokens=False)
        response = tokenizer.encode(row["response_text"] + "<|end|>", add_special_tokens=False)
        ids = torch.tensor([prompt + response])
        labels = torch.tensor([[-100] * len(prompt) + response])
        with torch.no_grad():
            found.append(-float(model(input_ids=ids, labels=labels).loss) * len(response))
    return found


def response_tokens(rows: list[dict[str, Any]]) -> int:
    return sum(len(row["response_text"].encode()) + 1 for row in rows)  # a token a byte, and the end of text


def test_sft_learns_what_the_data_say(cli: Any) -> None:
    done = cli.run("up", ALGORITHMS / "sft.yaml", "train.steps=4")
    assert done.code == 0, done.text
    run = cli.newest_run("sft")
    lines = cli.metrics("sft")
    # the first loss is transformers' own, and the loss falls
    rows = first_rows(run)
    assert len(rows) == 8
    assert lines[0]["loss"] == pytest.approx(-sum(sequence_logprobs(rows)) / response_tokens(rows), rel=1e-5)
    losses = [line["loss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.5
    assert lines[0]["trained_tokens"] == response_tokens(rows)
    assert "reward_mean" not in lines[0]
    # the roles are those of the flow: nobody generates or scores
    logs = {path.name.rsplit("-", 1)[0] for path in (run / "logs").glob("*-*.log")}
    assert {"prompts", "actor", "recorder"} <= logs
    assert not {"rollout", "reward", "reference"} & logs


def test_dpo_begins_at_log_2_and_two_ranks_train_as_one(cli: Any) -> None:
    for ranks in (1, 2):
        more = ["train.steps=3", f"placement.actor.workers={ranks}", f"run.name=dpo{ranks}"]
        done = cli.run("up", ALGORITHMS / "dpo.yaml", *more, "data.prompts_per_step=7")
        assert done.code == 0, done.text
    one, two = cli.metrics("dpo1"), cli.metrics("dpo2")
    assert one[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert one[0]["accuracy"] == pytest.approx(0.5, abs=0.5)
    assert one[-1]["loss"] < one[0]["loss"] - 0.05
    assert [line["pairs"] for line in one] == [7.0] * 3
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    # what the reference wrote is what transformers says of the same texts
    rows = [row for row in first_rows(cli.newest_run("dpo1")) if not row["prompt_text"].startswith("<|user|>")]
    sums = [sum(row["ref_logprobs"]) for row in rows]
    assert sums == pytest.approx(sequence_logprobs(rows), rel=1e-5)
    assert {row["sample_id"].rsplit("-", 1)[1] for row in rows} == {"chosen", "rejected"}


def test_a_reward_model_is_a_classifier_that_prefers_what_was_chosen(cli: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    done = cli.run("up", ALGORITHMS / "reward_model.yaml")
    assert done.code == 0, done.text
    lines = cli.metrics("reward_model")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    assert lines[-1]["accuracy"] > 0.8
    # the checkpoint is what transformers loads as a classifier with one label, and it scores as it was trained to
    folder = cli.newest_run("reward_model") / "checkpoints" / "step-000008"
    judge, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert judge.config.num_labels == 1
    rows = first_rows(cli.newest_run("reward_model"))
    scores: dict[str, dict[str, float]] = {}
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        kind = row["sample_id"].rsplit("-", 1)[1]
        with torch.no_grad():
            scores.setdefault(row["group_id"], {})[kind] = float(judge(input_ids=ids).logits)
    right = sum(pair["chosen"] > pair["rejected"] for pair in scores.values())
    assert right / len(scores) > 0.8


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_an_actor_that_is_killed_changes_nothing(cli: Any, name: str) -> None:
    # given the weights of an undisturbed run
    steps = 24
    often = [f"train.steps={steps}", "checkpoint.every_steps=5"]
    done = cli.run("up", ALGORITHMS / f"{name}.yaml", *often, "run.name=calm")
    assert done.code == 0, done.text
    calm = weights(cli.newest_run("calm"), steps)
    # when the actor of another run is killed -9 after some steps
    process = cli.start("up", ALGORITHMS / f"{name}.yaml", *often, "run.name=cut")

    def trained() -> int:
        files = list((cli.folder / "runs").glob("cut*/metrics.jsonl"))
        text = files[0].read_text() if files else ""
        return max((json.loads(line)["step"] for line in text.splitlines() if line.endswith("}")), default=0)

    cli.wait_until(lambda: trained() >= 2, "step 2", 90.0)
    victims = [p for p in cli.processes() if "worker" in p.cmdline() and "actor" in p.cmdline()]
    os.kill(victims[0].pid, signal.SIGKILL)
    assert trained() < steps
    out, err = process.communicate(timeout=150)
    # then it ends with the same weights
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    assert weights(cli.newest_run("cut"), steps) == calm


def test_a_recording_is_trained_on_in_its_own_tokens(cli: Any) -> None:
    # given a recorded run
    assert cli.run("up", cli.tiny, "train.steps=1", "data.eval=null").code == 0
    samples = cli.newest_run("tiny") / "samples"
    # when sft learns its better samples, and dpo the best and worst of each group
    done = cli.run("up", ALGORITHMS / "sft.yaml", f"data.train={samples}", "data.min_reward=0.2", "train.steps=2")
    assert done.code == 0, done.text
    rows = first_rows(cli.newest_run("sft"))
    assert min(json.loads(row["record"])["response"]["reward"] for row in rows) >= 0.2
    assert all(json.loads(row["record"])["response"]["ids"] == row["response_ids"] for row in rows)
    done = cli.run(
        "up", ALGORITHMS / "dpo.yaml", f"data.train={samples}", "train.steps=1", "data.prompts_per_step=4"
    )
    assert done.code == 0, done.text
    assert cli.metrics("dpo")[0]["pairs"] == 4.0
