"""What advantages and losses add to a training step, beside the plain sum of the log-probs.

A step is forward, backward and update. All but the loss is the same for every algorithm, and is measured with the
sum as the loss. Advantages, the loss, its backward to the log-probs and its figures are measured on the same rows,
and the sum in their place; the difference is what is added. All is CPU time of one thread, medians over rounds.

    rlmq bench losses -- [tiny | wide] [ROUNDS]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.result import BenchResult, Cell
from rlmq.common.algorithms import ALGORITHMS, algorithm_of
from rlmq.common.algorithms.algorithm import Algorithm, ScoredBatch
from rlmq.common.engines.micro_batches import build_micro_batch
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput
from rlmq.common.models import load_model, resolve_model
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import Recipe

_RECIPES = Path(__file__).resolve().parent.parent / "recipes"
_ROUNDS, _REPEATS = 5, 10
_SUM, _STEP = "the sum", "a step"
_GROUP, _PROMPTS, _PROMPT_TOKENS, _RESPONSE_TOKENS = 8, 4, 32, 96
_ROWS = _GROUP * _PROMPTS


def run(arguments: Sequence[str] = ()) -> BenchResult:
    """Measure every algorithm that learns from rewards."""
    size, rounds = (arguments[0] if arguments else "wide"), int(arguments[1]) if len(arguments) > 1 else _ROUNDS
    function = {"wide": "wide", "tiny": "folder"}[size]
    torch.set_num_threads(1)
    names = [name for name, spec in ALGORITHMS.items() if spec.online and name != "score"]
    recipes = {name: load_recipe(_RECIPES / "algorithms" / f"{name}.yaml").recipe for name in names}
    model = load_model(resolve_model(f"tiny_model.py:{function}", _RECIPES), torch.float32)
    engine = TorchEngine(model, next(iter(recipes.values())).train.model_copy(update={"lr": 1e-6}))
    batch, micro = _rows(algorithm_of(recipes["grpo"]))
    costs = {name: _of(recipe) for name, recipe in recipes.items()} | {_SUM: partial(_cost, batch, micro, None)}
    step = partial(_step, engine, batch, micro)
    step()
    found: dict[str, list[float]] = {name: [] for name in (*costs, _STEP)}
    for _ in range(rounds):
        found[_STEP].append(_seconds(step))
        for _ in range(_REPEATS):
            for name, cost in costs.items():
                found[name].append(_seconds(cost))
    middle = {name: median(seconds) for name, seconds in found.items()}
    added = {name: middle[name] - middle[_SUM] for name in names}
    rows: list[dict[str, Cell]] = [
        {"algorithm": name, "added (ms)": 1000.0 * own, "of a step (%)": 100.0 * own / middle[_STEP]}
        for name, own in added.items()
    ]
    return BenchResult(
        "losses",
        rows,
        {"greatest part of a step, limit 0.03": max(added.values()) / middle[_STEP]},
        [
            f"a step with the plain sum: {middle[_STEP]:.2f} s; {_ROWS} rows of {_PROMPT_TOKENS} + "
            f"{_RESPONSE_TOKENS} tokens, hidden size {model.config.hidden_size}; {rounds} rounds"
        ],
    )


def _of(recipe: Recipe) -> Callable[[], None]:
    algorithm = algorithm_of(recipe)
    return partial(_cost, *_rows(algorithm), algorithm)


def _seconds(step: Callable[[], None]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def _rows(algorithm: Algorithm) -> tuple[ScoredBatch, MicroBatch]:
    """Random rows with every column that the algorithm and its loss read."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(_RESPONSE_TOKENS // 2, _RESPONSE_TOKENS + 1, _ROWS)
    masks = [np.ones(n, dtype=np.bool_) for n in lengths]

    def tokens() -> list[Any]:
        return [-draw.random(n) for n in lengths]

    ragged: dict[str, Any] = {
        name: tokens() for name in ("rollout_logprobs", "ref_logprobs", "old_logprobs", "advantages")
    }
    columns = {name: ragged[name] for name in ("rollout_logprobs", "ref_logprobs")}
    more = {name: tokens() for name in algorithm.critics}
    one_a_row = {name: list(draw.random(_ROWS)) for name in (*algorithm.group_columns, "cost")}
    groups = [f"group-{row // _GROUP}" for row in range(_ROWS)]
    batch = ScoredBatch(draw.random(_ROWS), groups, masks, {**columns, **more, **one_a_row})
    micro = build_micro_batch(
        [list(map(int, draw.integers(97, 123, _PROMPT_TOKENS))) for _ in range(_ROWS)],
        [list(map(int, draw.integers(97, 123, n))) for n in lengths],
        [[True] * int(n) for n in lengths],
        ragged,
        pad_id=0,
    )
    return batch, micro


def _step(engine: TorchEngine, batch: ScoredBatch, micro: MicroBatch) -> None:
    """One training step with the sum as its loss."""
    engine.accumulate(micro, _sum)
    engine.step((float(batch.lengths.sum()),))


def _cost(batch: ScoredBatch, micro: MicroBatch, algorithm: Algorithm | None) -> None:
    """Advantages, loss, its gradient by the log-probs, and its figures; or those of the sum."""
    leaf = micro.columns["old_logprobs"].clone().requires_grad_()
    output = PolicyOutput(leaf, micro.columns["old_logprobs"])
    if algorithm is None:
        terms = _sum(output, micro)
    else:
        estimates = algorithm.estimate(batch)
        algorithm.denominators(list(map(int, batch.lengths)))
        terms = algorithm.loss(output, micro, estimates.state)
    terms.loss_sum.backward()
    for value in terms.metric_sums.values():
        float(value)


def _sum(output: PolicyOutput, batch: MicroBatch) -> LossTerms:
    return LossTerms(torch.where(batch.response_mask > 0, output.logprobs, 0.0).sum(), {})
