"""A few made-up rows, on which a user's own functions are tried before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlmq.common.algorithms.algorithm import Algorithm, ScoredBatch

if TYPE_CHECKING:
    from rlmq.common.engines.training import MicroBatch, PolicyOutput
    from rlmq.common.recipe.schema import Recipe

_LENGTHS = (3, 1, 4, 2)
_TOKEN_COLUMNS = ("rollout_logprobs", "ref_logprobs", "values", "cost_values")


def trial_rows(algorithm: Algorithm, recipe: Recipe) -> ScoredBatch:
    """Two prompts of the recipe's group size, with every column that the algorithm needs."""
    draw = np.random.default_rng(0)
    size = recipe.algorithm.group_size
    lengths = [_LENGTHS[i % len(_LENGTHS)] for i in range(2 * size)]
    columns: dict[str, list[Any]] = {}
    for name in {"rollout_logprobs", *algorithm.needs} - {"prompt_ids", "response_ids", "loss_mask", "reward"}:
        one_a_token = name in _TOKEN_COLUMNS
        columns[name] = [-draw.random(n) if one_a_token else float(draw.random()) for n in lengths]
    return ScoredBatch(
        draw.random(len(lengths)),
        [f"group-{i // size}" for i in range(len(lengths))],
        [np.ones(n, dtype=np.bool_) for n in lengths],
        columns,
    )


def trial_batch(algorithm: Algorithm) -> tuple[PolicyOutput, MicroBatch]:
    """Padded rows with every column that a loss may read."""
    import torch

    from rlmq.common.engines.training import MicroBatch, PolicyOutput

    draw = torch.Generator().manual_seed(0)
    shape = (len(_LENGTHS), max(_LENGTHS))
    mask = torch.tensor([[float(place < n) for place in range(shape[1])] for n in _LENGTHS])
    names = {"rollout_logprobs", "old_logprobs", "advantages", *algorithm.needs} - {"prompt_ids", "response_ids"}
    columns = {
        name: -torch.rand(shape, generator=draw) * mask
        for name in sorted(names)
        if name in ("old_logprobs", "advantages") or name in _TOKEN_COLUMNS
    }
    ids = torch.zeros(shape, dtype=torch.int64)
    logprobs = (-torch.rand(shape, generator=draw) * mask).requires_grad_()
    return PolicyOutput(logprobs, mask.clone()), MicroBatch(ids, ids, ids, mask, columns)
