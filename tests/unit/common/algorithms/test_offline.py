"""Losses of sft, dpo and reward_model against float64 formulas written from their papers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmq.common.algorithms import ALGORITHMS, algorithm_of
from rlmq.common.algorithms.algorithm import ScoredBatch
from rlmq.common.algorithms.metric_sums import merge_sums, metric_means
from rlmq.common.engines.micro_batches import build_micro_batch, plan_micro_batches
from rlmq.common.engines.training import MicroBatch, PolicyOutput
from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import load_recipe

LENGTHS = [3, 1, 5, 2, 2, 4, 1, 1, 6, 3]
PAIRS = len(LENGTHS) // 2


def algorithm(name: str, tmp_path: Any, **keys: Any) -> Any:
    block = "".join(f", {key}: {value}" for key, value in keys.items())
    path = tmp_path / "r.yaml"
    path.write_text(
        f"run: {{name: r}}\nmodel: m\nalgorithm: {{name: {name}{block}}}\n"
        "data: {train: t.jsonl}\ntrain: {steps: 1}\n"
    )
    return algorithm_of(load_recipe(path).recipe)


def numbers(seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [list(rng.normal(-2, 1, n)) for n in LENGTHS]


def micro(rows: list[int], columns: dict[str, list[list[float]]], masks: list[list[bool]]) -> MicroBatch:
    picked = {name: [values[i] for i in rows] for name, values in columns.items()}
    responses = [[1] * LENGTHS[i] for i in rows]
    batch = build_micro_batch([[1]] * len(rows), responses, [masks[i] for i in rows], picked)
    for name, values in batch.columns.items():
        batch.columns[name] = values.double()
    return batch


def padded(rows: list[int], values: list[list[float]]) -> torch.Tensor:
    width = max(LENGTHS[i] for i in rows)
    # what stands in padded places must not matter
    return torch.tensor([values[i] + [7.0] * (width - LENGTHS[i]) for i in rows], dtype=torch.float64)


def signs(found: Any) -> list[list[float]]:
    masks = [np.ones(n, dtype=bool) for n in LENGTHS]
    groups = [f"g{i // 2}" for i in range(len(LENGTHS))]
    estimates = found.estimate(ScoredBatch(np.full(len(LENGTHS), np.nan), groups, masks))
    return [list(one) for one in estimates.advantages]


def all_true() -> list[list[bool]]:
    return [[True] * n for n in LENGTHS]


def total(
    found: Any, plan: Any, new: list[list[float]], columns: dict[str, Any], masks: Any
) -> tuple[float, Any, Any]:
    """Loss, gradient per row, and figures of a whole step, for a plan of ranks and micro-batches."""
    leaves = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in new]
    sums, loss = [], torch.zeros((), dtype=torch.float64)
    for share in plan:
        for rows in share:
            batch = micro(list(rows), columns, masks)
            width = batch.response_length
            filled = [torch.cat([leaves[i], torch.full((width - LENGTHS[i],), 7.0).double()]) for i in rows]
            scores = torch.stack([leaves[i][-1] for i in rows])
            terms = found.loss(PolicyOutput(torch.stack(filled), torch.zeros(len(rows), width), scores), batch, {})
            loss = loss + terms.loss_sum
            sums.append({name: float(value) for name, value in terms.metric_sums.items()})
    denominators = found.denominators([sum(mask) for mask in masks])
    (loss / math.prod(denominators)).backward()
    figures = metric_means(merge_sums(sums), denominators)
    return figures["loss"], [leaf.grad.numpy() for leaf in leaves], figures


ONE_RANK = [[tuple(range(len(LENGTHS)))]]


def test_sft_is_the_mean_cross_entropy_of_the_tokens_that_count(tmp_path: Any) -> None:
    found, new = algorithm("sft", tmp_path), numbers(0)
    masks = all_true()
    masks[2] = [False, True, False, True, True]
    masks[6] = [False]
    loss, gradient, figures = total(found, ONE_RANK, new, {"advantages": signs(found)}, masks)
    counted = [
        value for row, mask in zip(new, masks, strict=True) for value, on in zip(row, mask, strict=True) if on
    ]
    assert loss == pytest.approx(-sum(counted) / len(counted), rel=1e-12)
    expected = [np.where(mask, -1.0 / len(counted), 0.0) for mask in masks]
    assert all(np.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(gradient, expected, strict=True))
    assert figures["tokens"] == len(counted)


def test_sft_can_count_every_response_alike(tmp_path: Any) -> None:
    found, new = algorithm("sft", tmp_path, loss_agg="sequence_mean"), numbers(1)
    loss, _, _ = total(found, ONE_RANK, new, {"advantages": signs(found)}, all_true())
    assert loss == pytest.approx(-np.mean([np.mean(row) for row in new]), rel=1e-12)


def dpo_reference(new: list[list[float]], ref: list[list[float]], beta: float, smoothing: float) -> float:
    """Eq. 7 of arXiv 2305.18290, with the label smoothing of cDPO; rows are chosen, rejected, chosen, ..."""
    losses = []
    for pair in range(PAIRS):
        gain = [math.fsum(new[row]) - math.fsum(ref[row]) for row in (2 * pair, 2 * pair + 1)]
        margin = beta * (gain[0] - gain[1])
        log_sigmoid = [-math.log1p(math.exp(-m)) for m in (margin, -margin)]
        losses.append(-(1 - smoothing) * log_sigmoid[0] - smoothing * log_sigmoid[1])
    return math.fsum(losses) / PAIRS


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.2)])
def test_dpo_is_the_papers_formula_and_its_gradient(tmp_path: Any, beta: float, smoothing: float) -> None:
    found = algorithm("dpo", tmp_path, beta=beta, label_smoothing=smoothing)
    new, ref = numbers(2), numbers(3)
    ref = [[float(np.float32(value)) for value in row] for row in ref]  # the column's type
    loss, gradient, figures = total(
        found, ONE_RANK, new, {"advantages": signs(found), "ref_logprobs": ref}, all_true()
    )
    assert loss == pytest.approx(dpo_reference(new, ref, beta, smoothing), rel=1e-12)
    for row, place in [(0, 0), (1, 0), (4, 1), (9, 2)]:
        step = 1e-5
        moved = [[list(values) for values in new] for _ in range(2)]
        moved[0][row][place] += step
        moved[1][row][place] -= step
        slope = (dpo_reference(moved[0], ref, beta, smoothing) - dpo_reference(moved[1], ref, beta, smoothing)) / (
            2 * step
        )
        assert gradient[row][place] == pytest.approx(slope, rel=1e-6)
    gains = [math.fsum(a) - math.fsum(b) for a, b in zip(new, ref, strict=True)]
    assert figures["accuracy"] == np.mean([gains[2 * i] > gains[2 * i + 1] for i in range(PAIRS)])
    assert figures["margin"] == pytest.approx(
        beta * np.mean([gains[2 * i] - gains[2 * i + 1] for i in range(PAIRS)])
    )
    assert figures["pairs"] == PAIRS


def test_dpo_of_a_policy_that_is_its_reference_is_log_2(tmp_path: Any) -> None:
    found = algorithm("dpo", tmp_path)
    ref = [[float(np.float32(value)) for value in row] for row in numbers(4)]
    loss, _, figures = total(found, ONE_RANK, ref, {"advantages": signs(found), "ref_logprobs": ref}, all_true())
    assert loss == pytest.approx(math.log(2), rel=1e-12)
    assert figures["accuracy"] == 0.5


def test_absurd_margins_have_finite_losses_and_gradients(tmp_path: Any) -> None:
    found = algorithm("dpo", tmp_path, beta=10.0)
    new = [[-1e4] * n if i % 2 == 0 else [0.0] * n for i, n in enumerate(LENGTHS)]
    zero = [[0.0] * n for n in LENGTHS]
    loss, gradient, _ = total(found, ONE_RANK, new, {"advantages": signs(found), "ref_logprobs": zero}, all_true())
    assert loss == pytest.approx(10.0 * 1e4 * sum(LENGTHS[::2]) / PAIRS)
    assert all(np.isfinite(row).all() for row in gradient)


def test_a_reward_model_learns_the_difference_of_scores(tmp_path: Any) -> None:
    found, scores = algorithm("reward_model", tmp_path), numbers(5)
    loss, gradient, figures = total(found, ONE_RANK, scores, {"advantages": signs(found)}, all_true())
    margins = [scores[2 * i][-1] - scores[2 * i + 1][-1] for i in range(PAIRS)]
    assert loss == pytest.approx(np.mean([math.log1p(math.exp(-m)) for m in margins]), rel=1e-12)
    expected = -1.0 / (1.0 + math.exp(margins[0])) / PAIRS
    assert gradient[0][-1] == pytest.approx(expected, rel=1e-12)
    assert gradient[1][-1] == pytest.approx(-expected, rel=1e-12)
    assert figures["accuracy"] == np.mean([m > 0 for m in margins])


def test_a_reward_model_refuses_what_scores_nothing(tmp_path: Any) -> None:
    found = algorithm("reward_model", tmp_path)
    batch = micro([0, 1], {"advantages": signs(found)}, all_true())
    with pytest.raises(UsageError, match="one of a scorer"):
        found.loss(PolicyOutput(torch.zeros(2, 3), torch.zeros(2, 3)), batch, {})


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 14, 1000])
def test_ranks_and_micro_batches_change_nothing(tmp_path: Any, name: str, ranks: int, budget: int) -> None:
    found = algorithm(name, tmp_path)
    columns = {"advantages": signs(found), "ref_logprobs": numbers(7)}
    units = [(2 * i, 2 * i + 1) for i in range(PAIRS)] if found.whole_groups else None
    plan = plan_micro_batches([(1, n) for n in LENGTHS], budget, ranks, units)
    loss, gradient, figures = total(found, plan, numbers(6), columns, all_true())
    whole = total(found, ONE_RANK, numbers(6), columns, all_true())
    assert loss == pytest.approx(whole[0], rel=1e-12)
    assert all(np.allclose(a, b, rtol=1e-12) for a, b in zip(gradient, whole[1], strict=True))
    assert figures == pytest.approx(whole[2])


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=30),
    st.integers(1, 300),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_units_stay_together(lengths: Any, budget: int, world: int, size: int) -> None:
    units = [tuple(range(first, min(first + size, len(lengths)))) for first in range(0, len(lengths), size)]
    plan = plan_micro_batches(lengths, budget, world, units)
    micros = [set(micro) for share in plan for micro in share]
    assert all(sum(set(unit) <= micro for micro in micros) == 1 for unit in units)
    assert sorted(row for micro in micros for row in micro) == list(range(len(lengths)))


def test_a_row_without_its_partner_pulls_nowhere(tmp_path: Any) -> None:
    found = algorithm("dpo", tmp_path)
    masks = [np.ones(2, dtype=bool)] * 3
    estimates = found.estimate(ScoredBatch(np.full(3, np.nan), ["a", "b", "b"], masks))
    assert [list(one) for one in estimates.advantages] == [[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("reward: [{function: f.py:f}]", "no reward: sft learns from the responses of the data"),
        ("rollout: {temperature: 0.5}", "temperature 1: sft learns the model's own distribution"),
        ("data: {train: t.jsonl, eval: e.jsonl}", "no eval: sft generates nothing that could be scored"),
    ],
)
def test_what_an_offline_algorithm_does_not_read_is_refused(tmp_path: Any, line: str, words: str) -> None:
    lines = [
        "run: {name: r}",
        "model: m",
        "algorithm: {name: sft}",
        "data: {train: t.jsonl}",
        "train: {steps: 1}",
        line,
    ]
    lines = [one for one in lines if one is line or not one.startswith(line.split(":")[0])]
    (tmp_path / "r.yaml").write_text("\n".join(lines))
    with pytest.raises(UsageError, match=words):
        load_recipe(tmp_path / "r.yaml")


def test_an_online_algorithm_needs_a_reward(tmp_path: Any) -> None:
    (tmp_path / "r.yaml").write_text("run: {name: r}\nmodel: m\ndata: {train: t.jsonl}\ntrain: {steps: 1}\n")
    with pytest.raises(UsageError, match="at least 1 item: grpo learns from rewards"):
        load_recipe(tmp_path / "r.yaml")


def test_the_three_are_offline() -> None:
    assert {name for name, spec in ALGORITHMS.items() if not spec.online} == {"sft", "dpo", "reward_model"}
