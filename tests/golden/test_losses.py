"""Every loss against the paper's formula in plain Python float64, gradients by differences, and denominators."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmq.common.algorithms import ALGORITHMS, algorithm_of
from rlmq.common.algorithms.algorithm import Algorithm
from rlmq.common.engines.training import MicroBatch, PolicyOutput
from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.schema import RolloutBlock

MOST_TOKENS = 11
ONLINE = sorted(name for name, spec in ALGORITHMS.items() if spec.online and "clip" in spec.keys)
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")
T, F = True, False
MASKS = [[T, T, F, T], [T], [T, F, F, T, T, T, T], [F, T, T], [F, F], [T, T, F, T, T], []]  # 7 rows, 15 tokens
Rows = list[list[float]]


def made(name: str, **knobs: object) -> Algorithm:
    recipe = SimpleNamespace(
        algorithm=AlgorithmBlock(name=name, **knobs),  # type: ignore[arg-type]
        rollout=RolloutBlock(max_response_tokens=MOST_TOKENS),
    )
    return algorithm_of(recipe)  # type: ignore[arg-type]


def rows(seed: int = 0, spread: float = 0.4) -> tuple[PolicyOutput, MicroBatch]:
    """Float64 tensors; what is padded or masked is NaN and must never count."""
    draw = random.Random(seed)
    width = max(map(len, MASKS))
    mask = torch.tensor([[float(t < len(m) and m[t]) for t in range(width)] for m in MASKS], dtype=torch.float64)

    def tokens(middle: float, spread: float) -> torch.Tensor:
        drawn = [[draw.gauss(middle, spread) for _ in range(width)] for _ in MASKS]
        return torch.where(mask > 0, torch.tensor(drawn, dtype=torch.float64), torch.nan)

    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
    columns = {name: tokens(-1.0, spread) for name in names} | {"advantages": tokens(0.0, 1.0)}
    columns |= {
        f"{kind}_{head}": tokens(0.0, 1.0) for kind in ("old", "returns") for head in ("values", "cost_values")
    }
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    output = PolicyOutput(tokens(-1.0, spread).requires_grad_(), tokens(1.0, 0.2).requires_grad_())
    return output, MicroBatch(ids, ids, ids, mask, columns)


def cut(output: PolicyOutput, batch: MicroBatch, chosen: list[int]) -> tuple[PolicyOutput, MicroBatch]:
    ids = batch.input_ids[chosen]
    columns = {name: value[chosen] for name, value in batch.columns.items()}
    return PolicyOutput(output.logprobs[chosen], output.entropy[chosen]), MicroBatch(
        ids, ids, ids, batch.response_mask[chosen], columns
    )


def value_of(algorithm: Algorithm, output: PolicyOutput, batch: MicroBatch, **state: float) -> torch.Tensor:
    lengths = [int(n) for n in batch.response_mask.sum(dim=1)]
    return algorithm.loss(output, batch, state).loss_sum / math.prod(algorithm.denominators(lengths))


def formula(
    name: str, new: Rows, entropy: Rows, batch: MicroBatch, *, agg: str, weights: Rows | None = None, **knobs: Any
) -> float:
    """The loss from the papers. `weights`: CISPO's, which have no gradient."""
    column = {key: value.tolist() for key, value in batch.columns.items()}
    low, high = 1 - knobs["clip"][0], 1 + knobs["clip"][1]
    losses: Rows = []
    for i, mask in enumerate(MASKS):
        places = [t for t, counts in enumerate(mask) if counts]
        logs = {t: new[i][t] - column["old_logprobs"][i][t] for t in places}
        if name == "gspo":  # the geometric mean over the response
            logs = dict.fromkeys(places, sum(logs.values()) / max(1, len(places)))
        row = []
        for t in places:
            ratio, advantage = math.exp(logs[t]), column["advantages"][i][t]
            loss = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
            if name == "cispo":
                weight = min(max(ratio, low), high) if weights is None else weights[i][t]
                loss = -weight * advantage * new[i][t]
            importance = math.exp(column["old_logprobs"][i][t] - column["rollout_logprobs"][i][t])
            cap = knobs["importance_cap"]
            kinds = {"none": 1.0, "full": importance, "truncated": min(importance, cap)}
            loss *= kinds.get(knobs["importance"], importance if importance <= cap else 0.0)
            x = new[i][t] - column["ref_logprobs"][i][t]
            kl = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[knobs["kl_estimator"]]
            row.append(loss + knobs["kl_coef"] * kl - knobs["entropy_coef"] * entropy[i][t])
        losses.append(row)
    tokens, samples = sum(map(len, losses)), sum(1 for row in losses if row)
    if agg == "token_mean":
        return sum(map(sum, losses)) / tokens
    if agg == "sequence_mean":
        return sum(sum(row) / len(row) for row in losses if row) / samples
    return sum(map(sum, losses)) / MOST_TOKENS / samples


def knobs_of(name: str, **others: object) -> dict[str, Any]:
    """What the algorithm is set to, with every term of the loss switched on."""
    wanted = {"kl_coef": 0.07, "kl_in": "loss", "entropy_coef": 0.01, "importance_cap": 1.2, "clip": (0.1, 0.25)}
    block = AlgorithmBlock(name=name, **wanted | others)  # type: ignore[arg-type]
    keys = (*wanted, "kl_estimator", "importance", "loss_agg")
    return {key: getattr(block, key) for key in keys}


def expected_value(
    name: str, new: Rows, entropy: Rows, batch: MicroBatch, knobs: dict[str, Any], **more: Any
) -> float:
    given = {key: value for key, value in knobs.items() if key not in ("loss_agg", "kl_in")}
    return formula(name, new, entropy, batch, agg=knobs["loss_agg"], **given, **more)


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("importance", ["none", "full", "truncated", "masked"])
def test_losses_are_the_papers_formulas(name: str, agg: str, importance: str) -> None:
    output, batch = rows()
    knobs = knobs_of(name, loss_agg=agg, importance=importance)

    found = value_of(made(name, **knobs), output, batch)

    expected = expected_value(name, output.logprobs.tolist(), output.entropy.tolist(), batch, knobs)
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_is_estimated_as_the_recipe_says(estimator: str) -> None:
    output, batch = rows()
    knobs = knobs_of("grpo", kl_estimator=estimator)

    found = value_of(made("grpo", **knobs), output, batch)

    expected = expected_value("grpo", output.logprobs.tolist(), output.entropy.tolist(), batch, knobs)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_a_steered_coefficient_is_the_one_of_the_step() -> None:
    output, batch = rows()
    steered = value_of(made("grpo", kl_coef=9.0, kl_target=0.1), output, batch, kl_coef=0.3, next_kl_coef=0.5)

    assert steered.item() == value_of(made("grpo", kl_coef=0.3), output, batch).item()


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_gradients_are_difference_quotients(name: str, agg: str) -> None:
    output, batch = rows(seed=1)
    knobs = knobs_of(name, loss_agg=agg)
    value_of(made(name, **knobs), output, batch).backward()
    new, entropy, step = output.logprobs.tolist(), output.entropy.tolist(), 1e-6
    ratio = (output.logprobs.detach() - batch.columns["old_logprobs"]).exp()
    weights = ratio.clamp(1 - knobs["clip"][0], 1 + knobs["clip"][1]).tolist()

    for values, tensor in ((new, output.logprobs), (entropy, output.entropy)):
        assert tensor.grad is not None
        for i, mask in enumerate(MASKS):
            for t, counts in enumerate(mask):
                if not counts:
                    assert tensor.grad[i, t] == 0
                    continue
                around, middle = [], values[i][t]
                for sign in (1, -1):
                    values[i][t] = middle + sign * step
                    around.append(expected_value(name, new, entropy, batch, knobs, weights=weights))
                values[i][t] = middle
                assert float(tensor.grad[i, t]) == pytest.approx((around[0] - around[1]) / (2 * step), abs=1e-8)


def gradient(algorithm: Algorithm, shares: list[list[list[int]]], *, local: bool = False) -> torch.Tensor:
    """As ranks make it: sums over all, divided once. `local`: the mutant divides each micro-batch by its own."""
    output, batch = rows(seed=2)
    lengths = [int(n) for n in batch.response_mask.sum(dim=1)]
    whole = math.prod(algorithm.denominators(lengths))
    parts = sum(len(share) for share in shares)
    for share in shares:
        for chosen in share:
            own = math.prod(algorithm.denominators([lengths[i] for i in chosen])) * parts
            part = algorithm.loss(*cut(output, batch, chosen), {}).loss_sum
            (part / (own if local else whole)).backward()
    assert output.logprobs.grad is not None
    return output.logprobs.grad


SPLITS = [
    [[[0, 1, 2, 3, 4, 5, 6]]],
    [[[0, 1, 2]], [[3, 4, 5, 6]]],
    [[[6], [2, 0]], [[4]], [[1, 3], [5]]],
    [[[i] for i in range(7)]],
]


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_ranks_or_micro_batches(name: str, agg: str) -> None:
    algorithm = made(name, **knobs_of(name, loss_agg=agg))
    whole = gradient(algorithm, SPLITS[0])

    for split in SPLITS[1:]:
        torch.testing.assert_close(gradient(algorithm, split), whole, rtol=1e-12, atol=1e-15)
        with pytest.raises(AssertionError):  # the mutant is seen
            torch.testing.assert_close(gradient(algorithm, split, local=True), whole, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("jump", [1e4, -1e4])
def test_absurd_ratios_stay_finite_in_float32(name: str, jump: float) -> None:
    output, batch = rows()
    new = output.logprobs.detach().float()
    new[0, 0] += jump
    new.requires_grad_()
    narrow = MicroBatch(
        batch.input_ids,
        batch.input_ids,
        batch.input_ids,
        batch.response_mask.float(),
        {key: value.float() for key, value in batch.columns.items()},
    )

    terms = made(name, **knobs_of(name, kl_estimator="k3")).loss(
        PolicyOutput(new, output.entropy.detach().float()), narrow, {}
    )
    terms.loss_sum.backward()

    assert new.grad is not None and bool(new.grad.isfinite().all())
    assert all(math.isfinite(float(x)) for x in terms.metric_sums.values())


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
def test_nothing_that_counts_is_a_loss_of_zero(name: str, shape: tuple[int, int]) -> None:
    empty = torch.full(shape, math.nan, dtype=torch.float64)
    ids = torch.zeros(shape, dtype=torch.int64)
    columns = dict.fromkeys(("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages"), empty)
    algorithm = made(name, **knobs_of(name))

    terms = algorithm.loss(PolicyOutput(empty, empty), MicroBatch(ids, ids, ids, torch.zeros(shape), columns), {})

    assert float(terms.loss_sum) == 0.0
    assert math.prod(algorithm.denominators([0] * shape[0])) > 0


@pytest.mark.parametrize("name", ["ppo", "safe_rlhf"])
@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss_and_its_gradient(name: str, clip: float | None) -> None:
    _, batch = rows(seed=3)
    algorithm = made(name, value_clip=clip)
    draw = torch.Generator().manual_seed(4)
    values = {
        head: torch.randn(batch.response_mask.shape, generator=draw, dtype=torch.float64).requires_grad_()
        for head in algorithm.critics
    }

    def expected(head: str, i: int, t: int, value: float) -> float:
        old, returns = (float(batch.columns[f"{kind}_{head}"][i, t]) for kind in ("old", "returns"))
        held = value if clip is None else min(max(value, old - clip), old + clip)
        return max((value - returns) ** 2, (held - returns) ** 2) / 2

    terms = algorithm.value_loss(values, batch)
    terms.loss_sum.backward()

    total = 0.0
    for head, tensor in values.items():
        assert tensor.grad is not None
        for i in range(tensor.shape[0]):
            for t in range(tensor.shape[1]):
                if batch.response_mask[i, t] == 0:
                    assert tensor.grad[i, t] == 0
                    continue
                value = float(tensor[i, t].detach())
                total += expected(head, i, t, value)
                quotient = (expected(head, i, t, value + 1e-6) - expected(head, i, t, value - 1e-6)) / 2e-6
                assert float(tensor.grad[i, t]) == pytest.approx(quotient, abs=1e-7)
    assert float(terms.loss_sum.detach()) == pytest.approx(total, rel=1e-12)
    assert int(terms.metric_sums["tokens"]) == sum(map(sum, MASKS))
