"""What every training engine does, whoever wrote it, on 1, 2 and 4 processes: one suite over all of them.

Three steps on 7, 11 and 13 rows, the last by a second engine that goes on from what the first one saved, against
float64 in one process that sees each row alone. All ranks are forked from one process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.training_ranks import HERE, KEYS, ROWS, SEED
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from unit.common.engines.torch_rows import block, micro_batches, rows_of, tiny_model

from rlmq.common.engines.adapters import Adapters, short
from rlmq.common.engines.registry import TRAINING
from rlmq.common.errors import UsageError
from rlmq.common.recipe.lora_block import LoraBlock

pytestmark = pytest.mark.timeout(300)

# 30 tokens: several micro-batches, and not as many on each rank; 1: one for each row; 4000: one in all.
THERE = importlib.util.find_spec("deepspeed") is not None
ZERO = {stage: {"stage": stage} for stage in (1, 2, 3)}
FLOAT32: dict[str, dict[str, Any]] = {
    "torch": {"engine": "torch", "dp": 1, "tokens": 30},
    "torch-rows": {"engine": "torch", "dp": 1, "tokens": 1},
    "torch-whole": {"engine": "torch", "dp": 1, "tokens": 4000, "train": {"activation_checkpointing": True}},
    "torch-2": {"engine": "torch", "dp": 2, "tokens": 30},
    "torch-4": {"engine": "torch", "dp": 4, "tokens": 1},
    "torch-gpt2": {"engine": "torch", "dp": 2, "tokens": 30, "model": "gpt2"},
    "fsdp-1": {"engine": "fsdp", "dp": 1, "tokens": 30},
    "fsdp-2": {"engine": "fsdp", "dp": 2, "tokens": 30},
    "fsdp-3-gpt2": {"engine": "fsdp", "dp": 3, "tokens": 30, "model": "gpt2"},
    "fsdp-4": {"engine": "fsdp", "dp": 4, "tokens": 4000, "train": {"activation_checkpointing": True}},
    "3d-1": {"engine": "3d", "dp": 1, "tokens": 30},
    "3d-2": {"engine": "3d", "dp": 1, "tp": 2, "tokens": 30},
    "3d-4": {"engine": "3d", "dp": 2, "pp": 2, "tokens": 1},
    "deepspeed-1": {"engine": "deepspeed", "dp": 1, "tokens": 30, "options": ZERO[1]},
    "deepspeed-zero1-2": {"engine": "deepspeed", "dp": 2, "tokens": 30, "options": ZERO[1]},
    "deepspeed-zero2-2": {"engine": "deepspeed", "dp": 2, "tokens": 1, "options": ZERO[2]},
    "deepspeed-zero3-2": {"engine": "deepspeed", "dp": 2, "tokens": 30, "options": ZERO[3]},
    "deepspeed-zero3-3-gpt2": {
        "engine": "deepspeed",
        "dp": 3,
        "tokens": 30,
        "options": ZERO[3],
        "model": "gpt2",
    },
    "plain-1": {"engine": "plain", "dp": 1, "tokens": 30},
    "plain-2": {"engine": "plain", "dp": 2, "tokens": 4000},
}
PLACES, ALPHA = ("q_proj", "down_proj"), 6.0
ADAPTED = {
    f"lora-{name}": {**FLOAT32[name], "train": {"lora": {"r": 3, "alpha": ALPHA, "targets": PLACES}}}
    for name in ("torch-whole", "torch-2", "fsdp-2")
}
BFLOAT16 = {
    f"bf16-{name}": {**FLOAT32[name], "train": {"dtype": "bfloat16"}} for name in ("torch-2", "fsdp-2", "3d-2")
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in ("llama", "gpt2")}
    for kind, folder in found.items():
        tiny_model(kind).save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def trained(
    models: dict[str, Path], third_party: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of every engine and mesh told, and rank 0's weights."""
    out = tmp_path_factory.mktemp("ranks")
    tasks = [
        {**task, "name": name, "model": str(models[task.get("model", "llama")])}
        for name, task in (FLOAT32 | BFLOAT16 | ADAPTED).items()
        if task["engine"] != "deepspeed" or THERE
    ]
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "contract.training_ranks", str(out), *map(json.dumps, tasks)]
    subprocess.run(command, env=env, timeout=250, check=False)
    return {
        task["name"]: [
            json.loads(path.read_text()) | {"folder": path.parent}
            for path in sorted((out / task["name"]).glob("[0-9].json"))
        ]
        for task in tasks
    }


@pytest.fixture(scope="module")
def reference(models: dict[str, Path]) -> Callable[[str], tuple[list[tuple[float, float]], Any]]:
    """Loss and gradient norm of each step of the token-mean loss at ratio 1, `-A` per token, and the model."""
    made: dict[str, Any] = {}

    def of(kind: str) -> tuple[list[tuple[float, float]], Any]:
        if kind not in made:
            made[kind] = _trained_in_float64(models[kind])
        found: tuple[list[tuple[float, float]], Any] = made[kind]
        return found

    return of


def _trained_in_float64(
    folder: Path, adapt: Callable[[Any], list[torch.nn.Parameter]] | None = None
) -> tuple[list[tuple[float, float]], Any]:
    """All weights are trained, or those that `adapt` puts into the model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    parameters = list(model.parameters()) if adapt is None else adapt(model)
    keys, told = block(**KEYS), []
    optimizer = torch.optim.AdamW(
        parameters, lr=keys.lr, betas=keys.betas, eps=keys.adam_epsilon, weight_decay=keys.weight_decay
    )
    for count in ROWS:
        rows, total = rows_of(count), 0.0
        counted = sum(len(response) for response in rows.responses)
        optimizer.zero_grad()
        for prompt, response, advantage in zip(rows.prompts, rows.responses, rows.advantages, strict=True):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
            logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
            own = logprobs[torch.arange(len(response)), torch.tensor(response)].sum() * -advantage / counted
            own.backward()
            total -= advantage * len(response) / counted  # the ratio to itself is 1
        told.append((total, float(torch.nn.utils.clip_grad_norm_(parameters, keys.grad_clip))))
        optimizer.step()
    return told, model


def _steps(ranks: list[dict[str, Any]] | None) -> list[tuple[float, float]]:
    """Loss over all ranks, and the gradient's norm, which all tell alike."""
    if not ranks:
        pytest.skip("deepspeed is not installed")
    assert not [rank["error"] for rank in ranks if "error" in rank]
    assert all(rank["steps"][i][1] == ranks[0]["steps"][i][1] for rank in ranks for i in range(3))
    return [(sum(rank["steps"][i][0] for rank in ranks), ranks[0]["steps"][i][1]) for i in range(3)]


@pytest.mark.parametrize("name", FLOAT32)
def test_three_steps_are_those_of_one_float64_process(
    name: str, trained: Mapping[str, Any], reference: Callable[[str], Any]
) -> None:
    task, ranks = FLOAT32[name], trained.get(name)
    steps = _steps(ranks)
    assert len(ranks) == task["dp"] * task.get("tp", 1) * task.get("pp", 1)
    expected, model = reference(task.get("model", "llama"))
    for (loss, norm), (own_loss, own_norm) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(own_loss, abs=2e-6)
        assert norm == pytest.approx(own_norm, rel=1e-5)
    weights = load_file(ranks[0]["folder"] / "whole" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    for key, weight in weights.items():
        assert float((weight.double() - model.state_dict()[key]).abs().max()) < 3e-6, key


@pytest.mark.parametrize("name", [name for name, task in FLOAT32.items() if task.get("pp", 1) == 1])
def test_logprobs_are_those_of_the_weights_that_it_tells(name: str, trained: Mapping[str, Any]) -> None:
    if name not in trained:
        pytest.skip("deepspeed is not installed")
    rows, folder = rows_of(3), trained[name][0]["folder"] / "whole"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    told = torch.tensor(trained[name][-1]["logprobs"], dtype=torch.float64)
    assert told.shape == micro_batches(rows, [range(3)])[0].response_mask.shape
    for row, (prompt, response) in enumerate(zip(rows.prompts, rows.responses, strict=True)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(told[row, : len(response)], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["fsdp-2", "fsdp-3-gpt2", "fsdp-4", "3d-2", "3d-4"])
def test_no_rank_of_a_sharded_model_holds_all_of_it(name: str, trained: Mapping[str, Any]) -> None:
    model = tiny_model(FLOAT32[name].get("model", "llama"))
    count = sum(weight.numel() for weight in model.parameters())
    ranks = trained[name]
    assert max(rank["held"] for rank in ranks) < (0.8 if name.startswith("3d") else 1.2 / len(ranks)) * count
    assert sum(rank["held"] for rank in ranks) >= count


@pytest.mark.parametrize("name", BFLOAT16)
def test_bf16_is_served_from_float32_masters(
    name: str, trained: Mapping[str, Any], reference: Callable[[str], Any]
) -> None:
    expected, model = reference("llama")
    for (_, norm), (_, own_norm) in zip(_steps(trained.get(name)), expected, strict=True):
        assert norm == pytest.approx(own_norm, rel=0.05)
    folder = trained[name][0]["folder"] / "whole"
    weights, state = load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    masters = {key.removeprefix("master."): value for key, value in state.items() if key.startswith("master.")}
    beginning = tiny_model().state_dict()
    for key, master in masters.items():
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), weights[key])
        moved, wanted = master - beginning[key], model.state_dict()[key].float() - beginning[key]
        assert float((moved - wanted).norm()) < 0.1 * float(wanted.norm()), key


class Sum(torch.nn.Module):
    """`W + alpha / r B A`, by hand."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + ALPHA / 3 * self.b @ self.a


def adapted(model: Any) -> list[torch.nn.Parameter]:
    """A is drawn as the engine draws it; the rest is written here."""
    drawn = tiny_model()
    Adapters(drawn, LoraBlock(r=3, alpha=ALPHA, targets=PLACES), SEED)
    first = {short(name): weight.detach() for name, weight in drawn.named_parameters()}
    model.requires_grad_(False)
    found: list[torch.nn.Parameter] = []
    for name, layer in list(model.named_modules()):
        if name.endswith(PLACES):
            a = first[f"{name}.lora_A.weight"].double()
            assert float(a.abs().sum()) > 0 and not first[f"{name}.lora_B.weight"].any()
            added = Sum(a, torch.zeros(layer.out_features, 3, dtype=torch.float64))
            torch.nn.utils.parametrize.register_parametrization(layer, "weight", added)
            found += [added.a, added.b]
    return found


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train_as_by_hand_and_are_told_merged(
    name: str, trained: Mapping[str, Any], models: dict[str, Path]
) -> None:
    ranks = trained[name]
    expected, model = _trained_in_float64(models["llama"], adapted)
    for (loss, norm), (own_loss, own_norm) in zip(_steps(ranks), expected, strict=True):
        assert loss == pytest.approx(own_loss, abs=2e-6)
        assert norm == pytest.approx(own_norm, rel=1e-5)
    weights, beginning = load_file(ranks[0]["folder"] / "whole" / "model.safetensors"), tiny_model().state_dict()
    assert weights.keys() == beginning.keys()
    layers = {f"{name}.weight": layer for name, layer in model.named_modules() if name.endswith(PLACES)}
    assert len(layers) == 4
    for key, weight in weights.items():
        if key in layers:
            assert float((weight.double() - layers[key].weight).abs().max()) < 3e-6, key
            assert float((weight - beginning[key]).abs().max()) > 1e-4, key
        else:
            assert torch.equal(weight, beginning[key]), key


def test_a_third_party_s_engine_is_found_and_its_options_are_its_own(third_party: None) -> None:
    assert "plain" in TRAINING.names()
    assert TRAINING.check("plain", {"momentum": False}, HERE, deterministic=True).momentum is False
    with pytest.raises(UsageError, match=r"placement.actor.strategy_options.speed: .* Options of plain: momentum"):
        TRAINING.check("plain", {"speed": 3}, HERE, deterministic=False)
    with pytest.raises(UsageError, match=r"got 'fsdpp', expected one of torch, fsdp, 3d.*Did you mean 'fsdp'"):
        TRAINING.check("fsdpp", {}, HERE, deterministic=False)
    with pytest.raises(UsageError, match=r"entry point group rlmq\.training_engines"):
        TRAINING.check("megatron", {}, HERE, deterministic=False)
