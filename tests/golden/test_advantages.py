"""Every advantage against the paper's formula, written out in plain Python float64."""

from __future__ import annotations

import math
import random
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlmq.common.algorithms import ALGORITHMS, algorithm_of
from rlmq.common.algorithms.algorithm import Algorithm, Estimates, ScoredBatch
from rlmq.common.algorithms.gae import gae
from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.schema import RolloutBlock

MOST_TOKENS = 9
ONLINE = [
    "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "dapo", "gspo", "cispo", "ppo",
    "decoupled_ppo", "safe_rlhf",
]  # fmt: skip


def made(name: str, **knobs: object) -> Algorithm:
    recipe = SimpleNamespace(
        algorithm=AlgorithmBlock(name=name, **{"group_size": 3} | knobs),  # type: ignore[arg-type]
        rollout=RolloutBlock(max_response_tokens=MOST_TOKENS),
    )
    return algorithm_of(recipe)  # type: ignore[arg-type]


def scored(
    masks: list[list[bool]], rewards: list[float], groups: list[str], seed: int = 5, **state: float
) -> ScoredBatch:
    """Rows with every column that any algorithm needs; values at masked tokens are NaN and must not count."""
    draw = random.Random(seed)

    def tokens(low: float, high: float) -> list[Any]:
        return [np.array([draw.uniform(low, high) if counts else math.nan for counts in mask]) for mask in masks]

    columns = {
        "rollout_logprobs": tokens(-2, 0),
        "ref_logprobs": tokens(-2, 0),
        "values": tokens(-1, 1),
        "cost_values": tokens(-1, 1),
        "baseline": [draw.random() for _ in masks],
        "cost": [draw.uniform(-1, 2) for _ in masks],
        "group_std": [1.0 for _ in masks],
    }
    return ScoredBatch(
        np.array(rewards), groups, [np.array(mask, dtype=np.bool_) for mask in masks], columns, state
    )


T, F = True, False
MASKS = [[T, T, F, T], [T], [T, F, F, T, T, T, T, T], [F, T, T], [T, T], [F, F, T, T, T]]
REWARDS = [1.0, 0.25, -0.5, 2.0, 0.75, 0.1]
GROUPS = ["a", "b", "a", "b", "a", "b"]


def batch(**state: float) -> ScoredBatch:
    return scored(MASKS, REWARDS, GROUPS, 5, **state)


def counted(estimates: Estimates, masks: list[list[bool]]) -> list[list[float]]:
    return [
        [float(a) for a, counts in zip(row, mask, strict=True) if counts]
        for row, mask in zip(estimates.advantages, masks, strict=True)
    ]


def packed(rows: ScoredBatch, column: str) -> list[list[float]]:
    return [
        [float(x) for x, counts in zip(row, mask, strict=True) if counts]
        for row, mask in zip(rows.columns[column], rows.masks, strict=True)
    ]


def kl_rows(rows: ScoredBatch, kind: str) -> list[list[float]]:
    found = []
    for own, reference in zip(packed(rows, "rollout_logprobs"), packed(rows, "ref_logprobs"), strict=True):
        x = [p - q for p, q in zip(own, reference, strict=True)]
        found.append([{"k1": v, "k2": v * v / 2, "k3": math.exp(-v) - 1 + v}[kind] for v in x])
    return found


def of_groups(rewards: list[float], kind: str) -> list[float]:
    found = []
    for i, reward in enumerate(rewards):
        own = [r for r, g in zip(rewards, GROUPS, strict=True) if g == GROUPS[i]]
        others = [r for j, (r, g) in enumerate(zip(rewards, GROUPS, strict=True)) if g == GROUPS[i] and j != i]
        if kind == "loo":
            found.append(reward - statistics.fmean(others))
        else:
            centred = reward - statistics.fmean(own)
            found.append(centred if kind == "centred" else centred / (statistics.stdev(own) + 1e-6))
    return found


def white(rows: list[list[float]]) -> list[list[float]]:
    flat = [a for row in rows for a in row]
    mean = statistics.fmean(flat)
    scale = math.sqrt(statistics.fmean((a - mean) ** 2 for a in flat) + 1e-8)
    return [[(a - mean) / scale for a in row] for row in rows]


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-10, abs=1e-12)


def repeated(values: list[float]) -> list[list[float]]:
    return [[value] * sum(mask) for value, mask in zip(values, MASKS, strict=True)]


def quadratic_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2016, eq. 16, as a double sum."""
    after = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("grpo", "std"), ("dapo", "std"), ("gspo", "std"), ("cispo", "std"), ("decoupled_ppo", "std"),
        ("dr_grpo", "centred"), ("rloo", "loo"),
    ],
)  # fmt: skip
def test_a_group_is_its_own_baseline(name: str, kind: str) -> None:
    close(counted(made(name).estimate(batch()), MASKS), repeated(of_groups(REWARDS, kind)))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_the_response_is_taken_off_its_reward(estimator: str) -> None:
    rows = batch()
    algorithm = made("rloo", kl_coef=0.3, kl_estimator=estimator)

    less = [r - 0.3 * sum(kl) for r, kl in zip(REWARDS, kl_rows(rows, estimator), strict=True)]

    close(counted(algorithm.estimate(rows), MASKS), repeated(of_groups(less, "loo")))


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp(gamma: float) -> None:
    rows = batch()
    expected = []
    for reward, kl in zip(REWARDS, kl_rows(rows, "k1"), strict=True):
        earned = [-0.2 * k + (reward if t == len(kl) - 1 else 0.0) for t, k in enumerate(kl)]
        expected.append(
            [sum(gamma ** (k - t) * earned[k] for k in range(t, len(earned))) for t in range(len(earned))]
        )

    found = made("reinforce_pp", group_size=1, kl_coef=0.2, gamma=gamma).estimate(rows)

    close(counted(found, MASKS), white(expected))


def test_reinforce_pp_with_a_baseline() -> None:
    found = made("reinforce_pp_baseline").estimate(batch())

    close(counted(found, MASKS), white(repeated(of_groups(REWARDS, "centred"))))


def test_remax() -> None:
    rows = batch()
    expected = []
    for reward, baseline, kl in zip(REWARDS, rows.columns["baseline"], kl_rows(rows, "k1"), strict=True):
        expected.append([reward - baseline - 0.1 * sum(kl[t:]) for t in range(len(kl))])

    close(counted(made("remax", kl_coef=0.1).estimate(rows), MASKS), expected)


def test_dapo_takes_the_overlong_penalty_off_the_rewards() -> None:
    """arXiv 2503.14476, eq. 13, with L_max 9 and L_cache 6."""
    less = []
    for reward, mask in zip(REWARDS, MASKS, strict=True):
        length, most, cache = len(mask), MOST_TOKENS, 6
        penalty = 0.0 if length <= most - cache else ((most - cache) - length) / cache if length <= most else -1.0
        less.append(reward + penalty)
    assert less != REWARDS

    found = made("dapo", overlong_tokens=6).estimate(batch())

    close(counted(found, MASKS), repeated(of_groups(less, "std")))


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("whiten", [True, False])
def test_ppo_is_gae_over_counted_tokens(kl_in: str, whiten: bool) -> None:
    rows = batch()
    algorithm = made("ppo", kl_coef=0.2, kl_in=kl_in, gamma=0.97, lam=0.9, whiten=whiten)
    advantages, returns = [], []
    for reward, kl, values in zip(REWARDS, kl_rows(rows, "k1"), packed(rows, "values"), strict=True):
        cost = 0.2 if kl_in == "reward" else 0.0
        earned = [-cost * k + (reward if t == len(kl) - 1 else 0.0) for t, k in enumerate(kl)]
        advantages.append(quadratic_gae(earned, values, 0.97, 0.9))
        returns.append([a + v for a, v in zip(advantages[-1], values, strict=True)])

    found = algorithm.estimate(rows)

    close(counted(found, MASKS), white(advantages) if whiten else advantages)
    close([list(row[mask]) for row, mask in zip(found.returns["values"], rows.masks, strict=True)], returns)


@pytest.mark.parametrize("state", [{}, {"log_multiplier": -0.4}])
def test_safe_rlhf_weighs_cost_with_a_learned_multiplier(state: dict[str, float]) -> None:
    """arXiv 2310.12773: the multiplier's step, the halved KL, and the combined advantage."""
    rows = batch(**state)
    algorithm = made(
        "safe_rlhf", kl_coef=0.2, lam=0.9, whiten=False, cost_limit=0.1, multiplier=2.0, multiplier_lr=0.3
    )
    before = state.get("log_multiplier", math.log(2.0))
    mean = statistics.fmean(rows.columns["cost"])
    log_multiplier = before + 0.3 * math.exp(before) * (mean - 0.1)
    weight = math.exp(log_multiplier)
    expected = []
    for i, kl in enumerate(kl_rows(rows, "k1")):
        last = len(kl) - 1
        gain = [-0.1 * k + (REWARDS[i] if t == last else 0.0) for t, k in enumerate(kl)]
        harm = [0.1 * k + (rows.columns["cost"][i] if t == last else 0.0) for t, k in enumerate(kl)]
        good = quadratic_gae(gain, packed(rows, "values")[i], 1.0, 0.9)
        bad = quadratic_gae(harm, packed(rows, "cost_values")[i], 1.0, 0.9)
        expected.append([(g - weight * b) / (1 + weight) for g, b in zip(good, bad, strict=True)])

    found = algorithm.estimate(rows)

    close(counted(found, MASKS), expected)
    assert found.state == pytest.approx({"log_multiplier": log_multiplier})
    assert found.metrics["multiplier"] == pytest.approx(weight)
    assert found.metrics["cost_mean"] == pytest.approx(mean)


def test_the_multiplier_rises_above_the_limit_falls_below_it_and_comes_back() -> None:
    def run(cost_limit: float, before: float) -> float:
        algorithm = made("safe_rlhf", cost_limit=cost_limit, multiplier_lr=5.0)
        return float(algorithm.estimate(batch(log_multiplier=before)).state["log_multiplier"])

    assert run(-1e6, 9.0) == 10.0 and run(1e6, -9.0) == -10.0
    assert run(5.0, 10.0) == 9.0 and run(-1e6, 2.0) == 3.0  # one step is at most a factor of e


@pytest.mark.parametrize(("target", "factor"), [(1e-3, 1.2), (1e3, 0.8)])
def test_the_coefficient_of_the_kl_is_steered_by_what_was_measured(target: float, factor: float) -> None:
    """Ziegler et al. 2019, 2.2: the error is cut to a fifth; 6 rows in a horizon of 6 are a whole step of it."""
    algorithm = made("ppo", kl_coef=0.5, kl_target=target, kl_horizon=6.0, kl_estimator="k3")

    first = algorithm.estimate(batch())
    second = algorithm.estimate(batch(**first.state))

    assert first.state["kl_coef"] == 0.5 and first.metrics["kl_coef"] == 0.5
    assert second.state["kl_coef"] == pytest.approx(0.5 * factor)
    flat = [k for row in kl_rows(batch(), "k3") for k in row]
    assert first.metrics["ref_kl"] == pytest.approx(statistics.fmean(flat))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0), (0.0, 1.0)])
def test_gae_is_the_double_sum(seed: int, gamma: float, lam: float) -> None:
    draw = np.random.default_rng(seed)
    masks = [draw.random(n) < 0.7 for n in draw.integers(0, 13, size=7)]
    rewards, values = ([draw.normal(size=len(mask)) for mask in masks] for _ in range(2))

    advantages, returns = gae(rewards, values, masks, gamma=gamma, lam=lam)

    for a, r, reward, value, mask in zip(advantages, returns, rewards, values, masks, strict=True):
        expected = quadratic_gae(list(reward[mask]), list(value[mask]), gamma, lam)
        assert a[mask] == pytest.approx(expected, rel=1e-10, abs=1e-12)
        assert r[mask] == pytest.approx(np.array(expected) + value[mask], rel=1e-10, abs=1e-12)
        assert not a[~mask].any() and not r[~mask].any()


EDGES = {
    "no rows": ([], [], []),
    "a group of one": ([[T, T]], [0.7], ["a"]),
    "all rewards equal": ([[T, T], [T]], [0.1, 0.1], ["a", "a"]),
    "all tokens masked": ([[F, F], [F]], [1.0, 0.0], ["a", "a"]),
    "a response of no tokens": ([[], [T, T]], [1.0, 0.0], ["a", "a"]),
    "huge rewards": ([[T], [T, T]], [1e12, -1e12], ["a", "a"]),
}


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_have_finite_advantages_of_the_right_shape(name: str, edge: str) -> None:
    masks, rewards, groups = EDGES[edge]
    rows = scored(masks, rewards, groups)

    found = made(name, kl_coef=0.1).estimate(rows)

    assert [len(row) for row in found.advantages] == [len(mask) for mask in masks]
    for sequence in (found.advantages, *found.returns.values()):
        for row, mask in zip(sequence, rows.masks, strict=True):
            assert np.isfinite(row[mask]).all()
    assert all(math.isfinite(x) for x in (*found.state.values(), *found.metrics.values()))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("edge", ["a group of one", "all rewards equal"])
def test_a_group_that_says_nothing_has_no_advantage(name: str, edge: str) -> None:
    masks, rewards, groups = EDGES[edge]

    found = made(name).estimate(scored(masks, rewards, groups))

    assert all(not row.any() for row in found.advantages)


def test_every_online_algorithm_is_here() -> None:
    assert {name for name, spec in ALGORITHMS.items() if spec.online} - {"score"} == set(ONLINE)
