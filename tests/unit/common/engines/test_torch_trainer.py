"""The torch training engine against float64 computations of single, unpadded rows."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from unit.common.engines.torch_rows import ALGORITHM, LOSS, PAD_ID, Rows, block, micro_batches, rows_of, tiny_model

from rlmq.common.engines.micro_batches import build_micro_batch, plan_micro_batches
from rlmq.common.engines.shared_prompts import places_of, sharing_cost
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.errors import IntegrityError

RANKS = Path(__file__).with_name("torch_ranks.py")


def reference_logprobs(model: Any, rows: Rows, temperature: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-prob and entropy per response token: each row alone, without padding, in float64."""
    exact = copy.deepcopy(model).double().eval()
    found = []
    for prompt, response in zip(rows.prompts, rows.responses, strict=True):
        logits = exact(input_ids=torch.tensor([prompt + response])).logits[0] / temperature
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : len(prompt) - 1 + len(response)], dim=-1)
        chosen = logprobs[torch.arange(len(response)), torch.tensor(response, dtype=torch.int64)]
        found.append((chosen, -(logprobs.exp() * logprobs).sum(-1)))
    return found


def reference_gradient(model: Any, rows: Rows, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """Gradient of the token-mean GRPO loss at ratio 1, `-A` per token, in float64."""
    exact = copy.deepcopy(model).double().eval().requires_grad_()
    counted = sum(len(response) for response in rows.responses)
    loss = torch.zeros((), dtype=torch.float64)
    for prompt, response, advantage in zip(rows.prompts, rows.responses, rows.advantages, strict=True):
        if not response:
            continue
        logits = exact(input_ids=torch.tensor([prompt + response])).logits[0] / temperature
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        loss = loss - advantage * logprobs[torch.arange(len(response)), torch.tensor(response)].sum() / counted
    loss.backward()
    return {name: weight.grad for name, weight in exact.named_parameters()}


def denominators(rows: Rows) -> tuple[float, ...]:
    return ALGORITHM.denominators([len(response) for response in rows.responses])


def gradients(engine: TorchEngine, rows: Rows, split: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """What `step` would divide, divided."""
    for batch in micro_batches(rows, split):
        engine.accumulate(batch, LOSS)
    scale = math.prod(denominators(rows))
    return {
        name: weight.grad / scale for name, weight in engine.model.named_parameters() if weight.grad is not None
    }


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Relative to each tensor's greatest value."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max()) + 1e-12
        assert float((found[name].double() - value.double()).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "llama-eager"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_single_rows(kind: str, temperature: float) -> None:
    model, rows = tiny_model(kind), rows_of(11)
    expected = reference_logprobs(model, rows, temperature)
    engine = TorchEngine(model, block(), temperature=temperature)

    (batch,) = micro_batches(rows, [range(11)])
    found = engine.logprobs(batch)

    for row, (logprobs, entropy) in enumerate(expected):
        torch.testing.assert_close(found.logprobs[row, : len(logprobs)].double(), logprobs, atol=2e-5, rtol=0)
        torch.testing.assert_close(found.entropy[row, : len(logprobs)].double(), entropy, atol=2e-5, rtol=0)
        assert found.logprobs[row, len(logprobs) :].count_nonzero() == 0
        assert found.entropy[row, len(logprobs) :].count_nonzero() == 0


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_gradient_is_that_of_single_rows(kind: str) -> None:
    model, rows = tiny_model(kind), rows_of(11)
    expected = reference_gradient(model, rows, 0.7)

    found = gradients(TorchEngine(model, block(), temperature=0.7), rows, [range(11)])

    assert_close(found, expected, 2e-5)


def test_the_least_temperature_that_is_allowed_trains_with_finite_numbers() -> None:
    model, rows = tiny_model(), rows_of(11)
    engine = TorchEngine(model, block(), temperature=1.1e-6)

    (batch,) = micro_batches(rows, [range(11)])
    found = engine.logprobs(batch)
    gradient = gradients(engine, rows, [range(11)])

    assert found.logprobs.isfinite().all() and found.entropy.isfinite().all()
    assert all(value.isfinite().all() for value in gradient.values())
    engine.step(denominators(rows))
    assert all(weight.isfinite().all() for weight in engine.model.parameters())


@pytest.mark.parametrize(
    "split", [[range(11)], [[i] for i in range(11)], [range(7), range(7, 11)], [range(10, -1, -1)]]
)
def test_gradient_does_not_depend_on_the_split_into_micro_batches(split: Sequence[Sequence[int]]) -> None:
    model, rows = tiny_model(), rows_of(11)
    expected = reference_gradient(model, rows)

    assert_close(gradients(TorchEngine(model, block()), rows, split), expected, 2e-5)


def test_prompts_of_a_group_are_computed_once_and_distinct_ones_are_not_packed() -> None:
    cost = sharing_cost(tiny_model())
    group = build_micro_batch([[3, 4, 5, 6]] * 5, [[1, 2]] * 5)
    strangers = build_micro_batch([[3, 4, 5, n] for n in range(5)], [[1, 2]] * 5)

    assert places_of(group, cost).input_ids.shape == (1, 4 + 5)
    assert places_of(strangers, cost).input_ids.shape == (5, 4 + 1)


def test_padding_that_looks_like_a_prompt_is_not_shared_with_it() -> None:
    model = tiny_model()
    rows = Rows([[PAD_ID, PAD_ID, 5], [5], [PAD_ID, PAD_ID, 5], [5]], [[7, 8, 9, 7]] * 4, [1.0] * 4)
    expected = reference_logprobs(model, rows, 1.0)

    (batch,) = micro_batches(rows, [range(4)])
    found = TorchEngine(model, block()).logprobs(batch).logprobs

    for row, (logprobs, _) in enumerate(expected):
        torch.testing.assert_close(found[row].double(), logprobs, atol=2e-5, rtol=0)


def test_long_responses_are_not_packed_where_attention_would_cost_more() -> None:
    batch = build_micro_batch([[3, 4]] * 16, [[1] * 200] * 16)

    assert places_of(batch, sharing_cost(tiny_model())).input_ids.shape == (16, 201)


def test_models_with_another_attention_are_not_packed() -> None:
    assert sharing_cost(tiny_model("gpt2")) is None
    assert sharing_cost(tiny_model("mistral-window")) is None


def adamw(
    weight: torch.Tensor, gradients_of_steps: Sequence[torch.Tensor], train: Any, rates: Sequence[float]
) -> torch.Tensor:
    """Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, in float64."""
    beta1, beta2 = train.betas
    weight, first, second = weight.double(), 0.0, 0.0
    for t, (gradient, rate) in enumerate(zip(gradients_of_steps, rates, strict=True), start=1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        root = (second / (1 - beta2**t)) ** 0.5 + train.adam_epsilon
        weight = weight - rate * train.weight_decay * weight - rate * (first / (1 - beta1**t)) / root
    return weight


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e9])
def test_a_step_is_clipped_adamw_with_decay_and_schedule(clip: float) -> None:
    train = block(
        lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), adam_epsilon=1e-4, grad_clip=clip, lr_schedule="linear"
    )
    model, rows = tiny_model(), rows_of(7)
    before = copy.deepcopy(model)
    gradient = reference_gradient(before, rows)
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
    cut = min(1.0, clip / norm) if clip else 1.0
    engine = TorchEngine(model, train)

    gradients(engine, rows, [range(7)])
    stats = engine.step(denominators(rows))

    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    assert stats.lr == 1e-2
    for name, weight in before.named_parameters():
        expected = adamw(weight.detach(), [gradient[name] * cut], train, [1e-2])
        torch.testing.assert_close(dict(model.named_parameters())[name].double(), expected, atol=2e-5, rtol=0)


def test_the_rate_moves_with_every_optimizer_step_of_a_batch() -> None:
    rows = rows_of(3)
    engine = TorchEngine(tiny_model(), block(steps=4, lr=1.0, lr_schedule="linear", mini_batches=2))

    rates = []
    for _ in range(3):
        gradients(engine, rows, [range(3)])
        rates.append(engine.step(denominators(rows)).lr)

    assert rates == pytest.approx([1.0, 0.875, 0.75])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 7])
def test_any_number_of_ranks_makes_the_same_step(world: int, count: int, tmp_path: Path) -> None:
    """Prime row counts; with two rows and three ranks one rank has none."""
    rows, model = rows_of(count), tiny_model()
    gradient = reference_gradient(model, rows)
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
    expected = {n: adamw(w.detach(), [gradient[n]], block(), [1e-3]) for n, w in model.named_parameters()}

    outs = run_ranks(world, count, tmp_path)

    for weights, stats in outs:
        assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name].double(), value, atol=1e-5, rtol=0)
        assert all(torch.equal(weights[name], outs[0][0][name]) for name in weights)


def test_dividing_by_each_ranks_own_tokens_would_be_noticed() -> None:
    """The reference has the power to tell: with local denominators the gradient is another."""
    rows, model = rows_of(7), tiny_model()
    right = reference_gradient(model, rows)
    (plan_a, plan_b) = plan_micro_batches(rows.lengths, 10_000, 2)
    wrong = {name: torch.zeros_like(value) for name, value in right.items()}
    for share in (plan_a, plan_b):
        for name, value in reference_gradient(model, rows.part([i for micro in share for i in micro])).items():
            wrong[name] += value / 2

    with pytest.raises(AssertionError):
        assert_close(wrong, right, 1e-2)


def test_a_rank_that_dies_ends_the_others_with_restart(tmp_path: Path) -> None:
    outcome = run_ranks(2, 3, tmp_path, dies=1)

    assert outcome == [75, -9]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_continues_bit_for_bit(dtype: str) -> None:
    rows = rows_of(5)
    train = block(dtype=dtype, lr_schedule="cosine", steps=5)

    def train_once(engine: TorchEngine) -> None:
        gradients(engine, rows, [range(3), range(3, 5)])
        engine.step(denominators(rows))

    undisturbed = TorchEngine(tiny_model(), train)
    train_once(undisturbed)
    train_once(undisturbed)
    saved_weights = {name: t.clone() for name, t in undisturbed.model.state_dict().items()}
    saved_state = {name: t.clone() for name, t in undisturbed.state().items()}
    train_once(undisturbed)

    fresh = tiny_model()
    fresh.load_state_dict(saved_weights)
    resumed = TorchEngine(fresh, train)
    resumed.load_state(saved_state)
    train_once(resumed)

    for (name, found), expected in zip(resumed.shards(), undisturbed.model.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    own, other = resumed.state(), undisturbed.state()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_state_of_another_model_or_type_is_refused() -> None:
    engine = TorchEngine(tiny_model(), block())

    with pytest.raises(IntegrityError, match="optimizer state"):
        engine.load_state(TorchEngine(tiny_model(), block(dtype="bfloat16")).state())


def test_bf16_serves_rounded_master_weights_and_keeps_small_updates() -> None:
    """One update of 1e-5 is below bf16's resolution of a weight; a hundred are not."""
    model, rows = tiny_model(), rows_of(5)
    start = {name: w.detach().clone() for name, w in model.named_parameters()}
    engine = TorchEngine(model, block(dtype="bfloat16", lr=1e-5, grad_clip=0.0))

    for _ in range(40):
        gradients(engine, rows, [range(5)])
        engine.step(denominators(rows))

    state = engine.state()
    for name, weight in model.named_parameters():
        master = state[f"master.{name}"]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, master.bfloat16())
        assert float((master - start[name]).abs().max()) > 2e-4


def test_bf16_gradient_is_near_the_exact_one_and_summed_in_fp32() -> None:
    model, rows = tiny_model(), rows_of(11)
    expected = reference_gradient(model, rows)
    engine = TorchEngine(model, block(dtype="bfloat16", lr=0.0))
    for batch in micro_batches(rows, [[i] for i in range(11)]):
        engine.accumulate(batch, LOSS)

    norm = engine.step(denominators(rows)).grad_norm

    assert norm == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in expected.values())), rel=0.05)


def test_bf16_logprobs_are_normalised_in_fp32() -> None:
    engine = TorchEngine(tiny_model(), block(dtype="bfloat16"))
    every_token = Rows([[3, 4]] * 64, [[token] for token in range(64)], [0.0] * 64)

    (batch,) = micro_batches(every_token, [range(64)])
    found = engine.logprobs(batch).logprobs

    assert found.dtype == torch.float32
    assert float(found.double().exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_activation_checkpointing_gives_the_same_gradient() -> None:
    rows = rows_of(7)
    plain = gradients(TorchEngine(tiny_model(), block()), rows, [range(7)])

    engine = TorchEngine(tiny_model(), block(activation_checkpointing=True))
    calls = count_calls(engine.model.model.layers[0].mlp)
    recomputed = gradients(engine, rows, [range(7)])

    assert_close(recomputed, plain, 1e-6)
    assert calls() == 2


def count_calls(module: torch.nn.Module) -> Callable[[], int]:
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return lambda: len(calls)


@pytest.mark.parametrize("split", [[range(3)], [[0], [1], [2]]])
def test_empty_responses_are_fine(split: Sequence[Sequence[int]]) -> None:
    rows = Rows([[3, 4], [5], [3, 4]], [[], [6, 7], []], [1.0, -1.0, 1.0])
    model = tiny_model()
    expected = reference_gradient(model, rows)

    assert_close(gradients(TorchEngine(model, block()), rows, split), expected, 2e-5)


def test_a_step_without_any_token_changes_nothing() -> None:
    engine = TorchEngine(tiny_model(), block())
    before = {name: t.clone() for name, t in engine.shards()}
    rows = Rows([[3]], [[]], [1.0])

    gradients(engine, rows, [[0]])
    stats = engine.step(denominators(rows))

    assert stats.grad_norm == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.shards())


def test_a_gradient_that_is_not_finite_stops_before_the_update() -> None:
    engine, rows = TorchEngine(tiny_model(), block()), rows_of(3)
    before = {name: t.clone() for name, t in engine.shards()}
    gradients(engine, Rows(rows.prompts, rows.responses, [math.nan] * 3), [range(3)])

    with pytest.raises(IntegrityError, match="gradient norm of optimizer step 1"):
        engine.step(denominators(rows))

    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.shards())


def test_layout_is_that_of_the_shards_with_tied_aliases() -> None:
    engine = TorchEngine(tiny_model(), block(dtype="bfloat16"))

    names = [spec.name for spec in engine.layout().tensors]

    assert names == [name for name, _ in engine.shards()] == list(engine.model.state_dict())
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(names)
    assert {spec.dtype for spec in engine.layout().tensors} == {"BF16"}


def run_ranks(world: int, count: int, folder: Path, dies: int = -1) -> Any:
    """Real processes; weights and statistics by rank, or exit codes when one is to die."""
    command = [sys.executable, str(RANKS), str(world), str(count), str(folder), str(dies)]
    env = {**os.environ, "PYTHONPATH": str(RANKS.parents[3]), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(world)]
    codes = [process.wait(timeout=90) for process in processes]
    if dies >= 0:
        return codes
    assert codes == [0] * world
    return [
        (load_file(folder / f"{rank}.safetensors"), json.loads((folder / f"{rank}.json").read_text()))
        for rank in range(world)
    ]
