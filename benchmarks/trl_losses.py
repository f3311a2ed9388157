"""Losses, gradients and advantages beside TRL's own code, on random numbers in float64.

TRL's methods run in TRL's environment (`benchmarks/trl_side.py`); ours are those of `recipes/algorithms/`, set to
what TRL is set to. The figures are the greatest differences, relative to the greatest value.

    rlmq bench trl_losses
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.result import BenchResult, Cell
from benchmarks.trl_environment import ask_trl
from rlmq.common.algorithms import algorithm_of
from rlmq.common.algorithms.algorithm import Algorithm, ScoredBatch
from rlmq.common.engines.training import MicroBatch, PolicyOutput
from rlmq.common.models import resolve_model
from rlmq.common.recipe.load import load_recipe

_RECIPES = Path(__file__).resolve().parent.parent / "recipes" / "algorithms"
_GROUP, _GROUPS, _TOKENS = 4, 3, 7
_ROWS = _GROUP * _GROUPS
_LIMIT = 1e-7  # TRL takes n / (n - 1) of the standard deviation in float32


@dataclass(frozen=True)
class Pair:
    """One comparison: our recipe and overrides, TRL's trainer and attributes.

    `old` says whether the policy has moved from the one that generated; `scale` is what our loss is smaller by.
    """

    recipe: str
    ours: tuple[str, ...]
    trainer: str
    theirs: Mapping[str, Any] = field(default_factory=dict)
    old: bool = True
    scale: float = 1.0


def _policy(recipe: str, loss_type: str, *ours: str, level: str = "token", high: float = 0.2, **more: Any) -> Pair:
    base = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon_low": 0.2, "beta": 0.0}
    return Pair(recipe, ours, "grpo", {**base, "epsilon_high": high, "max_completion_length": _TOKENS, **more})


_CLIP = "algorithm.clip=[0.2, 0.2]"
_LOSSES = {
    "GRPO": _policy("grpo", "grpo", "algorithm.loss_agg=sequence_mean"),
    "GRPO, KL k3": _policy("grpo", "grpo", "algorithm.loss_agg=sequence_mean", "algorithm.kl_coef=0.1", beta=0.1),
    "Dr. GRPO": _policy("dr_grpo", "dr_grpo"),
    "DAPO": _policy("dapo", "dapo", "algorithm.overlong_tokens=0", high=0.28),
    "GSPO": _policy("gspo", "grpo", _CLIP, level="sequence"),
    "CISPO": _policy("cispo", "cispo", high=5.0),
    # TRL's ratio is of the whole response, so the gradients are equal where the ratio is 1.
    "RLOO (gradient at ratio 1)": Pair(
        "rloo",
        ("algorithm.kl_coef=0",),
        "rloo",
        {"epsilon_low": 0.2, "epsilon_high": 0.2},
        old=False,
        scale=1.0 / _TOKENS,
    ),
}
_STD = "algorithm.std_epsilon=1e-4"  # TRL's
_ADVANTAGES = {
    "GRPO": Pair("grpo", (_STD,), "grpo", {"scale_rewards": "group", "beta": 0.0}),
    "Dr. GRPO": Pair("dr_grpo", (), "grpo", {"scale_rewards": "none", "beta": 0.0}),
    "RLOO, KL k1 in the reward": Pair("rloo", ("algorithm.kl_coef=0.1",), "rloo", {"beta": 0.1}),
}


def run() -> BenchResult:
    """Compare all."""
    draw = random.Random(0)
    masks = [[1] * draw.randint(1, _TOKENS) for _ in range(_ROWS)]
    mask = [row + [0] * (_TOKENS - len(row)) for row in masks]

    def tokens(middle: float, spread: float) -> list[list[float]]:
        return [[draw.gauss(middle, spread) for _ in range(_TOKENS)] for _ in range(_ROWS)]

    numbers: dict[str, Any] = {
        "mask": mask,
        "logprobs": tokens(-1.0, 0.4),
        "old": tokens(-1.0, 0.4),
        "reference": tokens(-1.0, 0.4),
        "rewards": [draw.random() for _ in range(_ROWS)],
        "advantages": [draw.gauss(0, 1) for _ in range(_ROWS)],
    }
    numbers["rewards"][:_GROUP] = [0.5] * _GROUP  # a group of equal rewards
    cases = [
        *(_asked("loss", pair, numbers) for pair in _LOSSES.values()),
        {"kind": "dpo", "trainer": "dpo", "beta": 0.1, **numbers},
        *(_asked("advantages", pair, numbers) for pair in _ADVANTAGES.values()),
    ]
    model = resolve_model("../tiny_model.py:folder", _RECIPES)
    theirs = iter(ask_trl("losses", {"model": str(model), "cases": cases}))
    rows = [_compared(name, pair, numbers, next(theirs)) for name, pair in _LOSSES.items()]
    rows.append(_dpo(numbers, next(theirs)))
    rows += [_advantages(name, pair, numbers, next(theirs)) for name, pair in _ADVANTAGES.items()]
    worst = max(cell for row in rows for cell in row.values() if isinstance(cell, float))
    return BenchResult("trl_losses", rows, {f"greatest difference / {_LIMIT:g}, limit 1": worst / _LIMIT})


def _asked(kind: str, pair: Pair, numbers: Mapping[str, Any]) -> dict[str, Any]:
    old = numbers["old"] if pair.old or kind == "advantages" else numbers["logprobs"]
    return {"kind": kind, "trainer": pair.trainer, "settings": dict(pair.theirs), **numbers, "old": old}


def _algorithm(pair: Pair) -> Algorithm:
    own = (*pair.ours, f"rollout.max_response_tokens={_TOKENS}")
    return algorithm_of(load_recipe(_RECIPES / f"{pair.recipe}.yaml", own).recipe)


def _loss(algorithm: Algorithm, numbers: Mapping[str, Any], advantages: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Our loss and its gradient by the log-probs."""

    def tensor(name: str) -> torch.Tensor:
        return torch.tensor(numbers[name], dtype=torch.float64)

    logprobs, mask = tensor("logprobs").requires_grad_(), tensor("mask")
    columns = {"advantages": advantages, "old_logprobs": tensor("old"), "ref_logprobs": tensor("reference")}
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    output = PolicyOutput(logprobs, torch.zeros_like(logprobs))
    loss_sum = algorithm.loss(output, MicroBatch(ids, ids, ids, mask, columns), {}).loss_sum
    lengths = [sum(row) for row in numbers["mask"]]
    value = loss_sum / math.prod(algorithm.denominators(lengths))
    value.backward()
    assert logprobs.grad is not None
    return value.item(), logprobs.grad


def _compared(name: str, pair: Pair, numbers: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Cell]:
    numbers = {**numbers, "old": numbers["old"] if pair.old else numbers["logprobs"]}
    advantages = torch.tensor(numbers["advantages"], dtype=torch.float64)[:, None].expand(_ROWS, _TOKENS)
    value, gradient = _loss(_algorithm(pair), numbers, advantages)
    row: dict[str, Cell] = {"what": f"{name} loss", "TRL": f"{pair.trainer} {pair.theirs.get('loss_type', '')}"}
    row["value differs by"] = abs(value - theirs["value"]) / abs(theirs["value"]) if pair.old else None
    row["gradient differs by"] = _differs(gradient.numpy() / pair.scale, theirs["gradient"])
    return row


def _dpo(numbers: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Cell]:
    """The first half of the rows is chosen, the second rejected."""
    half = _ROWS // 2
    pull = torch.tensor([1.0] * half + [-1.0] * half, dtype=torch.float64)[:, None]
    first = torch.zeros(_ROWS, _TOKENS, dtype=torch.float64)
    first[:, :1] = pull
    value, gradient = _loss(_algorithm(Pair("dpo", ("algorithm.beta=0.1",), "dpo")), numbers, first)
    return {
        "what": "DPO loss",
        "TRL": "dpo sigmoid",
        "value differs by": abs(value - theirs["value"]) / abs(theirs["value"]),
        "gradient differs by": _differs(gradient.numpy(), theirs["gradient"]),
    }


def _advantages(name: str, pair: Pair, numbers: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Cell]:
    masks = [np.ones(sum(row), dtype=np.bool_) for row in numbers["mask"]]
    columns = {
        column: [np.array(row[: len(mask)]) for row, mask in zip(numbers[given], masks, strict=True)]
        for column, given in (("rollout_logprobs", "logprobs"), ("ref_logprobs", "reference"))
    }
    groups = [f"group-{row // _GROUP}" for row in range(_ROWS)]
    batch = ScoredBatch(np.array(numbers["rewards"]), groups, masks, columns)
    ours = np.array([row[0] for row in _algorithm(pair).estimate(batch).advantages])
    setting = ", ".join(f"{key} {value}" for key, value in pair.theirs.items())
    return {
        "what": f"{name} advantages",
        "TRL": f"{pair.trainer} {setting}",
        "value differs by": _differs(ours, theirs["advantages"]),
    }


def _differs(ours: NDArray[np.float64], theirs: Any) -> float:
    expected = np.array(theirs)
    return float(np.abs(ours - expected).max() / np.abs(expected).max())
