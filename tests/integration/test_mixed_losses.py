"""One update of several losses, each with rows, weight and denominators of its own."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

pytestmark = pytest.mark.timeout(240)

RECIPES = Path(__file__).parents[2] / "recipes"


def rows_of(run: Path, table: str) -> list[dict[str, Any]]:
    parts = sorted((run / "samples").glob(f"{table}-000001-*.parquet"))
    return sorted((row for part in parts for row in pq.read_table(part).to_pylist()), key=lambda r: r["sample_id"])


def first_model() -> Any:
    """The policy before the first step, by transformers in float64."""
    from transformers import AutoModelForCausalLM

    spec = importlib.util.spec_from_file_location("tiny_model", RECIPES / "tiny_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return AutoModelForCausalLM.from_pretrained(str(module.folder()), dtype=torch.float64).eval()


def logprobs(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """Log-probs of the row's response tokens that count."""
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    start = len(row["prompt_ids"])
    found = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
    own = found.gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]
    return own[torch.tensor(row["loss_mask"])]


@pytest.fixture(scope="module")
def mixed(module_cli: Any) -> Path:
    """A run with losses of data."""
    done = module_cli.run("up", RECIPES / "mixed_losses.yaml", "train.steps=2", "train.mini_batches=1")
    assert done.code == 0, done.text
    folder: Path = module_cli.newest_run("mixed_losses")
    return folder


def norm_of(model: Any) -> float:
    return math.sqrt(sum(float(weight.grad.square().sum()) for weight in model.parameters()))


def test_the_gradient_is_the_weighted_sum_of_each_losses_own(mixed: Path) -> None:
    run = mixed
    first = json.loads((run / "batch_log.jsonl").read_text().splitlines()[0])["entry"]
    samples, answers, pairs = (rows_of(run, table) for table in ("train", "answers", "pairs"))

    # the log names the rows of each table, with denominators of their own
    assert [loss["table"] for loss in first["losses"]] == ["answers", "pairs"]
    for logged, rows in zip([first, *first["losses"]], [samples, answers, pairs], strict=True):
        assert logged["rows"] == [row["sample_id"] for row in rows]
    assert (len(answers), len(pairs)) == (5, 6)

    model = first_model()
    earned = [
        (torch.tensor(row["advantages"], dtype=torch.float64)[row["loss_mask"]] * logprobs(model, row)).sum()
        for row in samples
    ]
    policy = -torch.stack(earned).sum() / sum(sum(row["loss_mask"]) for row in samples)
    written = [logprobs(model, row) for row in answers]
    sft = -torch.cat(written).mean()
    gains = [
        logprobs(model, row).sum() - sum(v for v, m in zip(row["ref_logprobs"], row["loss_mask"], strict=True) if m)
        for row in pairs
    ]
    margins = [0.2 * (chosen - rejected) for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
    dpo = -torch.stack(margins).sigmoid().log().mean()
    (policy + 0.5 * sft + 0.1 * dpo).backward()
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert line["grad_norm"] == pytest.approx(norm_of(model), rel=1e-4)
    assert line["answers_loss"] == pytest.approx(sft.item(), rel=1e-5)
    assert line["pairs_loss"] == pytest.approx(dpo.item(), rel=1e-4)
    assert line["pairs_pairs"] == 3


OLD = """
losses:
- name: old
  algorithm: {name: cispo, old_logprobs: rollout, loss_agg: sequence_mean, clip: [1.0, 0.01]}
  data: RUN/samples
  prompts_per_step: 8
  weight: 0.3
- {name: own, algorithm: {name: sft, loss: "mine.py:squares"}, data: "ROOT/offline_task.py:answered", weight: 0.2}
"""
MINE = """
def squares(output, batch):
    return output.logprobs ** 2
"""


def test_so_it_is_with_a_policy_gradient_of_recorded_groups_and_a_loss_of_the_users(
    cli: Any, mixed: Path, tmp_path: Path
) -> None:
    # given both steps of a recorded run, whose second one another policy generated
    (tmp_path / "mine.py").write_text(MINE)
    text = (RECIPES / "mixed_losses.yaml").read_text().replace("tiny_", f"{RECIPES}/tiny_")
    head, tail = text.split("\nlosses:")[0], "rollout:" + text.split("rollout:")[1]
    recipe = tmp_path / "old.yaml"
    recipe.write_text(head + OLD.replace("RUN", str(mixed)).replace("ROOT", str(RECIPES)) + tail)
    done = cli.run("up", recipe, "train.steps=1", "train.mini_batches=1", "run.name=old")
    assert done.code == 0, done.text
    run = cli.newest_run("old")
    samples, old, answers = (rows_of(run, table) for table in ("train", "old", "own"))
    assert (len(old), len({row["group_id"] for row in old}), len(answers)) == (64, 8, 8)

    # then the gradient is the sum of three, each by its formula over its own rows
    model = first_model()
    earned = [(float(row["advantages"][0]) * logprobs(model, row)).sum() for row in samples]
    policy = -torch.stack(earned).sum() / sum(sum(row["loss_mask"]) for row in samples)
    means = []
    for row in old:
        rewards = [one["reward"] for one in old if one["group_id"] == row["group_id"]]
        spread = torch.tensor(rewards, dtype=torch.float64).std() + 1e-6
        advantage = (row["reward"] - sum(rewards) / len(rewards)) / float(spread)
        new = logprobs(model, row)
        behaviour = torch.tensor(row["rollout_logprobs"], dtype=torch.float64)[torch.tensor(row["loss_mask"])]
        ratio = (new - behaviour).exp().clamp(max=1.01).detach()
        means.append((-ratio * advantage * new).mean())
    assert any(abs(logprobs(model, row)[0].item() - row["rollout_logprobs"][0]) > 0.01 for row in old)
    reused = torch.stack(means).mean()
    squares = torch.cat([logprobs(model, row) ** 2 for row in answers]).mean()
    (policy + 0.3 * reused + 0.2 * squares).backward()
    line = cli.metrics("old")[0]
    assert line["grad_norm"] == pytest.approx(norm_of(model), rel=1e-4)
    assert line["old_loss"] == pytest.approx(reused.item(), rel=1e-4, abs=1e-6)
    assert line["own_loss"] == pytest.approx(squares.item(), rel=1e-5)
