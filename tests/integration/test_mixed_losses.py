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


def test_the_gradient_is_the_weighted_sum_of_each_losses_own(cli: Any) -> None:
    done = cli.run("up", RECIPES / "mixed_losses.yaml", "train.steps=2", "train.mini_batches=1")
    assert done.code == 0, done.text
    run = cli.newest_run("mixed_losses")
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
    norm = math.sqrt(sum(float(weight.grad.square().sum()) for weight in model.parameters()))

    line = cli.metrics("mixed_losses")[0]
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert line["answers_loss"] == pytest.approx(sft.item(), rel=1e-5)
    assert line["pairs_loss"] == pytest.approx(dpo.item(), rel=1e-4)
    assert line["pairs_pairs"] == 3
