"""Cases D8 and D9 in whole runs: steps, data, checkpoints and the learning rate that do not divide."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def recipe(cli: Any, tmp_path: Path) -> Path:
    """12 prompts, two samples each, a few tokens."""
    rows = [{"prompt": f"Say {number}: ", "answer": str(number)} for number in range(12)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def vowels(completions, **_):\n    return [float(sum(c.count(v) for v in 'aeiou')) for c in completions]\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
run: {{name: own, seed: 7}}
model: {cli.root}/recipes/tiny_model.py:folder
data: {{train: train.jsonl, max_prompt_tokens: 64}}
algorithm: {{name: grpo, group_size: 2}}
rollout: {{max_response_tokens: 8}}
reward: [{{function: "rewards.py:vowels"}}]
train: {{steps: 10, lr: 1.0e-3}}
deterministic: true
"""
    )
    return path


def prompts_of_steps(run: Path) -> dict[int, list[str]]:
    """Prompt texts by step, each group once."""
    found: dict[int, dict[str, str]] = {}
    for path in sorted(run.glob("samples/train-*.parquet")):
        for row in pq.read_table(path, columns=["step", "group_id", "prompt_text"]).to_pylist():
            found.setdefault(row["step"], {})[row["group_id"]] = row["prompt_text"]
    return {step: list(groups.values()) for step, groups in sorted(found.items())}


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step-*"))


def test_steps_go_on_into_the_next_pass(cli: Any, recipe: Path) -> None:
    done = cli.run("up", recipe, "data.prompts_per_step=5", "checkpoint.every_steps=4", "checkpoint.keep=9")
    assert done.code == 0, done.text
    run = cli.newest_run("own")
    steps = prompts_of_steps(run)
    assert [len(prompts) for prompts in steps.values()] == [5] * 10
    order = [prompt for prompts in steps.values() for prompt in prompts]
    for first in range(0, 48, 12):
        assert set(Counter(order[first : first + 12]).values()) == {1}, "each prompt once per pass"
    assert saved_steps(run) == [4, 8, 10], "the last trained step has a checkpoint"
    assert cli.summary("own")["checkpoint"].endswith("step-000010")


def test_one_pass_ends_after_the_data_and_says_so(cli: Any, recipe: Path) -> None:
    done = cli.run("up", recipe, "data.prompts_per_step=5", "data.passes=1")
    assert done.code == 0, done.text
    run = cli.newest_run("own")
    steps = prompts_of_steps(run)
    assert [len(prompts) for prompts in steps.values()] == [5, 5, 2]
    assert len({prompt for prompts in steps.values() for prompt in prompts}) == 12
    assert saved_steps(run) == [3]
    summary = cli.summary("own")
    assert (summary["steps"], summary["steps_wanted"]) == (3, 3)
    assert "data" in done.text
    assert "3" in done.text


def test_more_prompts_per_step_than_there_are(cli: Any, recipe: Path) -> None:
    done = cli.run("up", recipe, "data.prompts_per_step=32", "train.steps=2")
    assert done.code == 0, done.text
    steps = prompts_of_steps(cli.newest_run("own"))
    assert [len(prompts) for prompts in steps.values()] == [32, 32]
    assert saved_steps(cli.newest_run("own")) == [2]


def test_the_learning_rate_is_the_formula_across_a_resume(cli: Any, recipe: Path) -> None:
    # given cosine decay over 6 steps, interrupted by an end at step 3
    schedule = ["train.lr_schedule=cosine", "train.lr_steps=6", "data.prompts_per_step=2"]
    for steps in (3, 6):
        done = cli.run("up", recipe, f"train.steps={steps}", *schedule)
        assert done.code == 0, done.text
    # then each step's rate is the closed formula at that step
    rates = [line["lr"] for line in cli.metrics("own")]
    assert rates == pytest.approx([1e-3 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)], rel=1e-12)


@pytest.mark.parametrize("policy", ["train", "mask", "penalise"])
def test_truncated_responses(cli: Any, recipe: Path, policy: str) -> None:
    penalty = ["rollout.truncation_penalty=5"] if policy == "penalise" else []
    done = cli.run(
        "up", recipe, "train.steps=2", "data.prompts_per_step=6", f"rollout.truncated={policy}", *penalty
    )
    assert done.code == 0, done.text
    run = cli.newest_run("own")
    rows = [row for path in run.glob("samples/train-*.parquet") for row in pq.read_table(path).to_pylist()]
    cut = [row for row in rows if row["truncated"]]
    assert cut, "the limit of 8 tokens cuts most responses of a random model"
    assert all(all(row["loss_mask"]) is (policy != "mask") for row in cut)
    taken = 5.0 if policy == "penalise" else 0.0
    assert all(row["reward"] == row["reward.vowels"] - taken for row in cut)
    for line in cli.metrics("own"):
        assert line["truncated_ratio"] > 0
        if policy == "mask":
            assert line["trained_tokens"] < line["generated_tokens"]
        else:
            assert line["trained_tokens"] == line["generated_tokens"]


@pytest.mark.parametrize("policy", ["skip", "cut_left"])
def test_long_prompts_are_counted(cli: Any, recipe: Path, tmp_path: Path, policy: str) -> None:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "x" * 70, "answer": "x"}) + "\n")
    done = cli.run("up", recipe, "train.steps=1", f"data.long_prompts={policy}")
    assert done.code == 0, done.text
    summary = cli.summary("own")
    assert (summary["prompts_skipped"], summary["prompts_cut"]) == ((1, 0) if policy == "skip" else (0, 1))


def test_a_kl_coefficient_starts_a_reference_and_reports_its_kl(cli: Any, recipe: Path) -> None:
    done = cli.run("up", recipe, "train.steps=3", "algorithm.kl_coef=0.1")
    assert done.code == 0, done.text
    lines = cli.metrics("own")
    # the first step's policy is the reference itself, the later ones are not
    assert lines[0]["ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines[2]["ref_kl"] > 1e-6
    assert (cli.newest_run("own") / "logs" / "reference-0.log").is_file()


def test_several_updates_per_batch_move_the_ratio_off_one(cli: Any, recipe: Path) -> None:
    done = cli.run("up", recipe, "train.steps=2", "train.epochs=2", "train.mini_batches=2", "train.lr=1e-2")
    assert done.code == 0, done.text
    assert all(line["ratio_max"] > 1.001 for line in cli.metrics("own"))


def test_bfloat16_and_activation_checkpointing(cli: Any, recipe: Path) -> None:
    done = cli.run("up", recipe, "train.steps=2", "train.dtype=bfloat16", "train.activation_checkpointing=true")
    assert done.code == 0, done.text
    assert all(math.isfinite(line["grad_norm"]) for line in cli.metrics("own"))


def test_verls_columns_and_signature_work_unchanged_from_parquet(cli: Any, recipe: Path, tmp_path: Path) -> None:
    # given verl's column convention in a Parquet file, with a gap in a nested field, and its scorer's signature
    rows = [
        {
            "data_source": "sums" if k % 2 else "words",
            "prompt": [{"role": "user", "content": f"What is {k}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(k)},
            "extra_info": {"index": k, "hint": None if k % 2 else "h"},
        }
        for k in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "verl.parquet")
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert type(extra_info['index']) is int and extra_info['hint'] in (None, 'h')\n"
        "    if data_source == 'words': return int(ground_truth)\n"
        "    given = {'score': int(ground_truth) + 100, 'pred': solution_str[:3]}\n"
        "    return {**given, 'acc': ground_truth == '3'} if ground_truth != '1' else given\n"
    )
    # when it runs
    done = cli.run(
        "up",
        recipe,
        "data.train=verl.parquet",
        "data.prompts_per_step=8",
        "train.steps=1",
        "reward.0.function=score.py:compute_score",
    )
    # then every row has its own score
    assert done.code == 0, done.text
    run = cli.newest_run("own")
    found = [row for path in run.glob("samples/train-*.parquet") for row in pq.read_table(path).to_pylist()]
    assert len(found) == 16
    for row in found:
        record = json.loads(row["record"])
        k = int(record["reward_model"]["ground_truth"])
        assert row["reward"] == k + (100 if k % 2 else 0)
        assert row["prompt_text"].count("What is") == 1
        # and what was beside a score is kept, null where there was nothing
        kept = {"pred": row["response_text"][:3], **({"acc": k == 3} if k > 1 else {})}
        assert json.loads(row["reward_fields"] or "{}") == ({"compute_score": kept} if k % 2 else {})
    [line] = cli.metrics("own")
    assert line["reward.compute_score.acc"] == pytest.approx(1 / 3)
