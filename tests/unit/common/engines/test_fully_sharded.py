"""FSDP2 ranks against a float64 model in one process that sees each row alone."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from unit.common.engines.sharded_ranks import ROWS
from unit.common.engines.torch_rows import block, rows_of, tiny_model

RANKS = Path(__file__).with_name("sharded_ranks.py")


def reference(kind: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and gradient norms of three steps of the token-mean loss at ratio 1, `-A` per token, in float64."""
    model, rows, keys = copy.deepcopy(tiny_model(kind)).double().eval().requires_grad_(), rows_of(ROWS), block()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=keys.lr, betas=keys.betas, eps=keys.adam_epsilon, weight_decay=keys.weight_decay
    )
    counted = sum(len(response) for response in rows.responses)
    norms: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        for prompt, response, advantage in zip(rows.prompts, rows.responses, rows.advantages, strict=True):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
            logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
            (-advantage * logprobs[torch.arange(len(response)), torch.tensor(response)].sum() / counted).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return dict(model.state_dict()), norms


def run_ranks(world: int, kind: str, dtype: str, folder: Path) -> list[tuple[dict[str, torch.Tensor], Any]]:
    command = [sys.executable, str(RANKS), str(world), str(folder), kind, dtype]
    env = {**os.environ, "PYTHONPATH": str(RANKS.parents[3]), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(world)]
    assert [process.wait(timeout=200) for process in processes] == [0] * world
    return [
        (load_file(folder / f"{rank}.safetensors"), json.loads((folder / f"{rank}.json").read_text()))
        for rank in range(world)
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "kind"), [(2, "llama"), (3, "gpt2")])
def test_sharded_ranks_train_as_one_float64_process(world: int, kind: str, tmp_path: Path) -> None:
    # given ranks with unequal numbers of micro-batches; when they make three steps, the last from a saved state
    ranks = run_ranks(world, kind, "float32", tmp_path)
    # then norms and weights are the reference's, tied names included, and no rank held the whole model
    weights, norms = reference(kind)
    count = sum(weight.numel() for weight in tiny_model(kind).parameters())
    for found, told in ranks:
        assert told["norms"] == pytest.approx(norms, rel=1e-5)
        assert found.keys() == {name for name in weights if name in found}
        assert {"lm_head.weight"} <= found.keys()
        for name, weight in found.items():
            assert float((weight.double() - weights[name]).abs().max()) < 2e-6, name
        assert told["held"] < count * 1.2 / world
    assert sum(told["held"] for _, told in ranks) == count


@pytest.mark.timeout(240)
def test_sharded_ranks_serve_bf16_and_go_on_from_float32_masters(tmp_path: Path) -> None:
    ranks = run_ranks(2, "llama", "bfloat16", tmp_path)

    weights, norms = reference("llama")
    for found, told in ranks:
        assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
        assert told["norms"] == pytest.approx(norms, rel=0.05)
        for name, weight in found.items():
            scale = float(weights[name].abs().max())
            assert float((weight.double() - weights[name]).abs().max()) < 0.01 * scale, name
