"""GRPO's numbers against the papers' formulas, written out in plain Python float64."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlmq.common.algorithms import ALGORITHMS, algorithm_of
from rlmq.common.algorithms.algorithm import ScoredBatch
from rlmq.common.algorithms.grpo import Grpo
from rlmq.common.algorithms.metric_sums import merge_sums, metric_means
from rlmq.common.engines.training import MicroBatch, PolicyOutput
from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.schema import RolloutBlock

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")
MAX_RESPONSE_TOKENS = 11


def grpo(**knobs: object) -> Grpo:
    rollout = RolloutBlock(max_response_tokens=MAX_RESPONSE_TOKENS)
    return Grpo(SimpleNamespace(algorithm=AlgorithmBlock(**knobs), rollout=rollout))  # type: ignore[arg-type]


def rewarded(rewards: list[float], groups: list[str]) -> ScoredBatch:
    return ScoredBatch(np.array(rewards), groups, [np.ones(1, dtype=np.bool_)] * len(rewards))


def rows(lengths: list[int], seed: int = 0, scale: float = 0.3) -> tuple[PolicyOutput, MicroBatch]:
    """A micro-batch of float64 tensors; padded places hold NaN, which must never count."""
    draw = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = torch.tensor([[j < n for j in range(shape[1])] for n in lengths], dtype=torch.float64)

    def values(spread: float) -> torch.Tensor:
        drawn = torch.randn(shape, generator=draw, dtype=torch.float64) * spread - 1.0
        return torch.where(mask > 0, drawn, torch.nan)

    new = values(scale)
    advantages = torch.where(mask > 0, torch.randn(len(lengths), 1, generator=draw, dtype=torch.float64), torch.nan)
    columns = {
        "old_logprobs": values(scale),
        "rollout_logprobs": values(scale),
        "ref_logprobs": values(scale),
        "advantages": advantages,
    }
    empty = torch.zeros(shape, dtype=torch.int64)
    output = PolicyOutput(new.requires_grad_(), torch.where(mask > 0, 2.0, torch.nan))
    return output, MicroBatch(empty, empty, empty, mask, columns)


def reference_loss(
    new: list[list[float]],
    batch: MicroBatch,
    lengths: list[int],
    agg: str,
    clip: tuple[float, float],
    kl: float,
) -> float:
    """DeepSeekMath eq. 3 with DAPO's clip and its token-level mean, divided as the aggregation says."""
    column = {name: value.tolist() for name, value in batch.columns.items()}
    losses: list[list[float]] = []
    for i, length in enumerate(lengths):
        row = []
        for t in range(length):
            ratio = math.exp(new[i][t] - column["old_logprobs"][i][t])
            advantage = column["advantages"][i][t]
            clipped = min(max(ratio, 1 - clip[0]), 1 + clip[1])
            to_ref = column["ref_logprobs"][i][t] - new[i][t]
            row.append(-min(ratio * advantage, clipped * advantage) + kl * (math.exp(to_ref) - to_ref - 1))
        losses.append(row)
    if agg == "token_mean":
        return sum(map(sum, losses)) / sum(lengths)
    if agg == "sequence_mean":
        return statistics.fmean(sum(row) / len(row) for row in losses)
    return sum(map(sum, losses)) / MAX_RESPONSE_TOKENS / len(lengths)


def value_of(algorithm: Grpo, output: PolicyOutput, batch: MicroBatch, lengths: list[int]) -> torch.Tensor:
    return algorithm.loss(output, batch, {}).loss_sum / math.prod(algorithm.denominators(lengths))


def test_advantages_are_rewards_in_units_of_the_groups_sample_deviation() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 3.0, 5.0, 4.5, 1.0], ["a", "b", "a", "b", "b", "a", "a"]

    found = grpo(std_epsilon=1e-4).advantages(rewarded(rewards, groups))

    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        assert found[i] == pytest.approx(
            (reward - statistics.mean(own)) / (statistics.stdev(own) + 1e-4), abs=1e-14
        )


def test_advantages_without_normalisation_are_only_centred() -> None:
    found = grpo(std_normalisation=False).advantages(rewarded([1.0, 2.0, 6.0], ["a"] * 3))

    assert found.tolist() == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [1e9 + 0.1] * 7, [0.3]])
def test_groups_without_differences_have_no_advantage(rewards: list[float]) -> None:
    assert grpo().advantages(rewarded(rewards, ["a"] * len(rewards))).tolist() == [0.0] * len(rewards)


def test_no_rows_have_no_advantages() -> None:
    assert grpo().advantages(rewarded([], [])).shape == (0,)


@given(st.lists(st.tuples(st.floats(-9, 9), st.sampled_from("abc")), min_size=1, max_size=12), st.randoms())
def test_advantages_do_not_depend_on_the_order_of_rows(pairs: list[tuple[float, str]], random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(pairs)))
    random.shuffle(order)
    algorithm = grpo()

    straight = algorithm.advantages(rewarded([r for r, _ in pairs], [g for _, g in pairs]))
    shuffled = algorithm.advantages(rewarded([pairs[i][0] for i in order], [pairs[i][1] for i in order]))

    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize("kl", [0.0, 0.07])
def test_loss_is_the_papers_formula(agg: str, kl: float) -> None:
    lengths = [3, 7, 1, 5]
    output, batch = rows(lengths)
    algorithm = grpo(clip=(0.1, 0.28), kl_coef=kl, loss_agg=agg)

    found = value_of(algorithm, output, batch, lengths)

    expected = reference_loss(output.logprobs.tolist(), batch, lengths, agg, (0.1, 0.28), kl)
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_gradient_is_the_difference_quotient_of_the_formula(agg: str) -> None:
    lengths = [3, 7, 1, 5]
    output, batch = rows(lengths, seed=1)
    algorithm = grpo(clip=(0.1, 0.28), kl_coef=0.07, loss_agg=agg)
    value_of(algorithm, output, batch, lengths).backward()
    new, step = output.logprobs.tolist(), 1e-6
    assert output.logprobs.grad is not None

    for i, length in enumerate(lengths):
        for t in range(length):
            around = []
            for sign in (1, -1):
                moved = [list(row) for row in new]
                moved[i][t] += sign * step
                around.append(reference_loss(moved, batch, lengths, agg, (0.1, 0.28), 0.07))
            quotient = (around[0] - around[1]) / (2 * step)
            assert float(output.logprobs.grad[i, t]) == pytest.approx(quotient, abs=1e-8)


def test_places_that_do_not_count_have_no_gradient() -> None:
    output, batch = rows([2, 5])
    grpo(kl_coef=0.1).loss(output, batch, {}).loss_sum.backward()

    assert output.logprobs.grad is not None
    assert output.logprobs.grad[0, 2:].tolist() == [0.0] * 3


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_the_policy_gradient() -> None:
    lengths = [2, 4]
    output, batch = rows(lengths)
    del batch.columns["old_logprobs"]

    terms = grpo().loss(output, batch, {})
    terms.loss_sum.backward()

    expected = torch.where(batch.response_mask > 0, -batch.columns["advantages"], 0.0)
    torch.testing.assert_close(output.logprobs.grad, expected, rtol=1e-12, atol=0)
    assert float(terms.metric_sums["ratio"]) == sum(lengths)


def test_old_logprobs_of_the_rollout_are_used_when_the_recipe_says_so() -> None:
    output, batch = rows([3])
    batch.columns["old_logprobs"].fill_(torch.nan)

    found = grpo(old_logprobs="rollout").loss(output, batch, {}).metric_sums["ratio"]

    expected = (output.logprobs.detach() - batch.columns["rollout_logprobs"]).exp().sum()
    assert float(found) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("agg", AGGREGATIONS)
def test_rows_that_are_empty_or_fully_masked_change_nothing(agg: str) -> None:
    output, batch = rows([3, 5, 4])
    algorithm = grpo(loss_agg=agg)
    batch.response_mask[2] = 0
    kept_output, kept = rows([3, 5, 4])

    with_masked = algorithm.loss(output, batch, {}).loss_sum
    alone = algorithm.loss(
        PolicyOutput(kept_output.logprobs[:2], kept_output.entropy[:2]),
        MicroBatch(
            kept.input_ids[:2],
            kept.attention_mask[:2],
            kept.position_ids[:2],
            kept.response_mask[:2],
            {name: value[:2] for name, value in kept.columns.items()},
        ),
        {},
    ).loss_sum

    assert with_masked.item() == alone.item()
    assert algorithm.denominators([3, 5, 0]) == algorithm.denominators([3, 5])


def test_a_batch_without_any_counted_token_has_loss_zero() -> None:
    empty = torch.zeros(2, 0)
    batch = MicroBatch(empty.long(), empty.long(), empty.long(), empty, {"advantages": empty})
    algorithm = grpo()

    terms = algorithm.loss(PolicyOutput(empty, empty), batch, {})

    assert float(terms.loss_sum) == 0.0
    assert algorithm.denominators([0, 0]) == (1.0,)
    assert metric_means({n: float(v) for n, v in terms.metric_sums.items()}, (1.0,))["ratio"] == 0.0


@pytest.mark.parametrize("jump", [1e4, -1e4])
def test_absurd_ratios_stay_finite_in_float32(jump: float) -> None:
    output, batch = rows([3])
    new = output.logprobs.detach().float()
    new[0, 0] += jump
    new.requires_grad_()
    columns = {name: value.float() for name, value in batch.columns.items()}
    narrow = MicroBatch(batch.input_ids, batch.attention_mask, batch.position_ids, batch.response_mask, columns)

    terms = grpo(kl_coef=0.1).loss(PolicyOutput(new, output.entropy.float()), narrow, {})
    terms.loss_sum.backward()

    assert new.grad is not None and bool(new.grad.isfinite().all())
    assert all(math.isfinite(float(v)) for v in terms.metric_sums.values())


def test_metrics_are_means_over_all_tokens_however_the_rows_are_split() -> None:
    lengths = [3, 7, 1, 5]
    output, batch = rows(lengths, seed=3)
    algorithm = grpo(clip=(0.1, 0.2))

    def part(first: int, last: int) -> dict[str, float]:
        cut = MicroBatch(
            batch.input_ids[first:last],
            batch.attention_mask[first:last],
            batch.position_ids[first:last],
            batch.response_mask[first:last],
            {name: value[first:last] for name, value in batch.columns.items()},
        )
        terms = algorithm.loss(PolicyOutput(output.logprobs[first:last], output.entropy[first:last]), cut, {})
        return {name: float(value) for name, value in terms.metric_sums.items()}

    whole = metric_means(part(0, 4), algorithm.denominators(lengths))
    split = metric_means(merge_sums([part(0, 1), part(1, 4)]), algorithm.denominators(lengths))

    assert split == pytest.approx(whole, rel=1e-12)
    new, column = output.logprobs.tolist(), {n: v.tolist() for n, v in batch.columns.items()}
    places = [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    ratios = [math.exp(new[i][t] - column["old_logprobs"][i][t]) for i, t in places]
    signs = [column["advantages"][i][t] for i, t in places]
    off = [new[i][t] - column["rollout_logprobs"][i][t] for i, t in places]
    assert whole["ratio"] == pytest.approx(statistics.fmean(ratios))
    assert whole["ratio_max"] == pytest.approx(max(ratios))
    assert whole["clip_low"] == pytest.approx(
        statistics.fmean(r < 0.9 and a < 0 for r, a in zip(ratios, signs, strict=True))
    )
    assert whole["clip_high"] == pytest.approx(
        statistics.fmean(r > 1.2 and a > 0 for r, a in zip(ratios, signs, strict=True))
    )
    assert whole["kl_k1"] == pytest.approx(-statistics.fmean(off))
    assert whole["kl_k3"] == pytest.approx(statistics.fmean(math.exp(x) - 1 - x for x in off))
    assert whole["logprob_mismatch"] == pytest.approx(statistics.fmean(map(abs, off)))
    assert whole["logprob_mismatch_max"] == pytest.approx(max(map(abs, off)))
    assert whole["logprob_mismatch_kl"] == whole["kl_k3"]
    assert whole["entropy"] == pytest.approx(2.0)
    assert whole["tokens"] == sum(lengths)


def test_the_control_loop_trains_on_what_it_published() -> None:
    made: list[str] = []

    class Notes:
        def steps(self):  # type: ignore[no-untyped-def]
            return iter([4, 5])

        def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
            return lambda step: made.append(f"{name} {step}")

    grpo().loop(Notes())  # type: ignore[arg-type]

    body = ("admit", "wait_batch", "train", "publish", "evaluate", "checkpoint")
    per_step = [f"{name} {step}" for step in (4, 5) for name in body]
    assert made == ["publish 0", "evaluate 0", *per_step]


def test_a_reference_is_needed_only_with_a_kl() -> None:
    assert "ref_logprobs" not in grpo().needs
    assert grpo(kl_coef=0.1).needs_reference and "ref_logprobs" in grpo(kl_coef=0.1).needs


def test_the_table_of_algorithms_imports_no_torch() -> None:
    code = "import sys, rlmq.common.algorithms as a; assert 'torch' not in sys.modules; print(*a.ALGORITHMS)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.split() == list(ALGORITHMS)


def test_every_algorithm_in_the_table_can_be_built() -> None:
    from types import SimpleNamespace

    for name in ALGORITHMS:
        recipe = SimpleNamespace(algorithm=AlgorithmBlock(name=name), rollout=RolloutBlock())
        assert algorithm_of(recipe) is not None  # type: ignore[arg-type]
