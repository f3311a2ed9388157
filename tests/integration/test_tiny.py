"""The tiny recipe as a user runs it: it learns, and leaves behind what it promises."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmq.common.control import Snapshot
from rlmq.controller.control_files import read_control_log
from rlmq.controller.events import Lost
from rlmq.controller.plan import replay


@pytest.fixture(scope="module")
def finished(module_cli: Any) -> Path:
    """The folder of a short finished run."""
    done = module_cli.run("up", module_cli.tiny, "train.steps=4", "checkpoint.every_steps=2")
    assert done.code == 0, done.text
    folder: Path = module_cli.newest_run("tiny")
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns(cli: Any, seed: int) -> None:
    # when the recipe runs as shipped, with another seed
    done = cli.run("up", cli.tiny, f"run.seed={seed}", timeout_s=280)
    # then the reward, which lies between 0 and 1, rises by at least 0.3
    assert done.code == 0, done.text
    rewards = [line["reward_mean"] for line in cli.metrics("tiny")]
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) >= 0.3, rewards


def test_a_run_leaves_what_it_promises(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["exit"] == 0
    assert summary["steps"] == summary["policy_version"] == 4
    metrics = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in metrics if line["kind"] == "train"]
    assert [line["step"] for line in train] == [1, 2, 3, 4]
    for key in (
        "reward_mean",
        "reward_std",
        "kl_k3",
        "entropy",
        "clip_high",
        "response_tokens_mean",
        "truncated_ratio",
        "grad_norm",
        "ratio",
        "tokens_per_s",
        "staleness_mean",
    ):
        assert all(math.isfinite(line[key]) for line in train), key
    assert all(set(line["time_shares"]) == {"generating", "scoring", "training", "syncing"} for line in train)
    assert all(line["staleness_mean"] == 0 for line in train), "synchronous: every row is of the newest policy"
    assert summary["samples"] == sum(line["samples"] for line in train)
    assert (finished / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (finished / "recipe.yaml").is_file()
    logs = {path.stem for path in (finished / "logs").glob("*.log")}
    assert {"controller-0", "prompts-0", "rollout-0", "reward-0", "actor-0", "recorder-0"} <= logs


def test_the_control_log_replays_and_no_process_was_lost(finished: Path) -> None:
    lines = list(read_control_log(finished / "control_log.jsonl"))
    state = replay(lines)
    assert (state.step, state.phase, dict(state.calls)) == (4, "stop", {})
    assert not [line for line in lines if any(isinstance(command, Lost) for command in line.commands)]
    snapshot = msgspec.json.decode((finished / "control.json").read_bytes(), type=Snapshot)
    assert (snapshot.ended, snapshot.step, snapshot.policy_version) == (0, 4, 4)


def test_every_trained_sample_is_in_the_parquet_files_once(finished: Path) -> None:
    rows = [row for path in finished.glob("samples/train-*.parquet") for row in pq.read_table(path).to_pylist()]
    ids = [row["sample_id"] for row in rows]
    logged = [
        json.loads(line.split(" ", 1)[-1] if not line.startswith("{") else line)
        for line in (finished / "batch_log.jsonl").read_text().splitlines()
    ]
    summary = json.loads((finished / "summary.json").read_text())
    assert len(ids) == len(set(ids)) == summary["samples"]
    assert sorted(ids) == sorted(i for entry in logged for i in _rows(entry))
    for row in rows:
        assert len(row["advantages"]) == len(row["rollout_logprobs"]) == len(row["response_ids"])
        assert set(row["policy_versions"]) <= {row["step"] - 1}


def _rows(entry: dict[str, Any]) -> list[str]:
    found: list[str] = entry["rows"] if "rows" in entry else entry["entry"]["rows"]
    return found


def test_the_checkpoint_is_a_model_of_transformers_with_the_reward_that_the_summary_claims(
    finished: Path,
) -> None:
    # given the last checkpoint and the prompts of the evaluation
    summary = json.loads((finished / "summary.json").read_text())
    checkpoint = finished / "checkpoints" / "step-000004"
    assert Path(summary["checkpoint"]).samefile(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    [path] = finished.glob("samples/eval-000004*.parquet")
    rows = pq.read_table(path).to_pylist()
    # when transformers alone generates greedily
    responses = []
    for row in rows:
        prompt = torch.tensor([row["prompt_ids"]])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=len(row["response_ids"])
        )
        responses.append(out[0, prompt.shape[1] :].tolist())
    # then the tokens, and with them the rewards, are those of the run
    assert responses == [row["response_ids"] for row in rows]
    assert [tokenizer.decode(r, skip_special_tokens=True) for r in responses] == [r["response_text"] for r in rows]
    claimed = summary["eval_after"]
    for name, mean in claimed.items():
        assert mean == pytest.approx(fmean(r["reward"] for r in rows if r["source"] == name), abs=1e-12)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(cli: Any) -> None:
    rewards = []
    for seed in (5, 5, 6):
        done = cli.run("up", cli.tiny, "train.steps=2", f"run.seed={seed}", "deterministic=true", "--fresh")
        assert done.code == 0, done.text
        weights = (cli.newest_run("tiny") / "checkpoints" / "step-000002" / "model.safetensors").read_bytes()
        rewards.append((weights, [line["reward_mean"] for line in cli.metrics("tiny")]))
    assert rewards[0] == rewards[1]
    assert rewards[0][1] != rewards[2][1]


def test_samples_can_be_read_in_the_terminal(finished: Path, cli: Any) -> None:
    folder = finished.parents[1]
    done = cli.run("samples", "--step", "4", "--best", "1", "--worst", "1", "--random", "0", "--json", cwd=folder)
    assert done.code == 0, done.text
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert len(rows) == 2
    assert rows[0]["reward"] >= rows[1]["reward"]
    readable = cli.run("samples", cwd=folder)
    assert readable.code == 0
    assert "reward" in readable.out


def test_workers_and_trainer_ranks_can_be_several(cli: Any) -> None:
    # given two trainer ranks and two workers of each kind
    wide = [f"placement.{role}.workers=2" for role in ("actor", "rollout", "reward")]
    common = ("train.steps=2", "rollout.batch_size_per_device=16", "deterministic=true")
    # when the same training runs wide and narrow
    done = cli.run("up", cli.tiny, *common, *wide)
    assert done.code == 0, done.text
    wide_lines = cli.metrics("tiny")
    done = cli.run("up", cli.tiny, *common, "--fresh")
    assert done.code == 0, done.text
    # then it is the same training: generation to the bit, the gradient within float32's rounding
    for wide_line, line in zip(wide_lines, cli.metrics("tiny"), strict=True):
        assert wide_line["reward_mean"] == line["reward_mean"]
        assert wide_line["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)
