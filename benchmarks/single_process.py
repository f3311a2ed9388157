"""The same training in one process and one loop: what being decoupled is measured against.

    python -m benchmarks.single_process recipes/tiny.yaml train.steps=10

Same model, data, engines, algorithm, seeds and threads as `rlmq up`; no buffer, no messages, no weight
transfer (one model is generated with and trained). Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlmq.common.algorithms import algorithm_of
from rlmq.common.algorithms.algorithm import Algorithm, ScoredBatch
from rlmq.common.engines.generation import Generated, Request, Sampling
from rlmq.common.engines.hf import HfEngine
from rlmq.common.engines.micro_batches import build_micro_batch, plan_micro_batches
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.models import (
    eos_ids,
    folder_context_length,
    load_model,
    load_tokenizer,
    pad_id,
    resolve_model,
)
from rlmq.common.recipe.load import LoadedRecipe, load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.user_code import load_function
from rlmq.producers.data import load_rows
from rlmq.producers.prompt_order import PromptOrder
from rlmq.producers.prompt_tokens import LengthPolicy, PreparedPrompt, prepare_prompts


def train(loaded: LoadedRecipe) -> dict[str, Any]:
    """Run the recipe's steps; evaluation and checkpoints are left out on both sides."""
    recipe = loaded.recipe
    began = time.monotonic()
    folder = resolve_model(recipe.model, loaded.folder)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, torch.float32)
    trainer = TorchEngine(model, recipe.train, temperature=recipe.rollout.temperature)
    engine = HfEngine(
        model,
        pad_id=pad_id(tokenizer),
        eos_ids=eos_ids(folder, tokenizer),
        max_batch=recipe.rollout.batch_size_per_device,
    )
    prompts = _prompts(loaded, folder, tokenizer)
    functions = [load_function(block.source, loaded.folder, subject="reward") for block in recipe.reward]
    algorithm = algorithm_of(recipe)
    order = PromptOrder(
        len(prompts), recipe.data.prompts_per_step, recipe.run.seed, recipe.data.shuffle, recipe.data.passes
    )
    _serve(engine, trainer, 0)
    startup_s = time.monotonic() - began
    rewards, step_s, tokens = [], [], 0
    first = time.monotonic()
    for step in range(1, recipe.train.steps + 1):
        at = time.monotonic()
        chosen = [prompts[i] for i in order.step_prompts(step)]
        ids = _ids(step, len(chosen), recipe.algorithm.group_size)
        members = [p for p in chosen for _ in range(recipe.algorithm.group_size)]
        generated = _generate(engine, recipe, ids, members)
        texts = tokenizer.batch_decode([g.token_ids for g in generated], skip_special_tokens=True)
        scores = _score(functions, recipe, members, texts)
        _update(trainer, algorithm, recipe, members, generated, scores, pad_id(tokenizer))
        _serve(engine, trainer, step)
        rewards.append(float(scores.mean()))
        tokens += sum(len(g.token_ids) for g in generated)
        step_s.append(time.monotonic() - at)
    return {
        "startup_s": startup_s,
        "steps_wall_s": time.monotonic() - first,
        "step_s": step_s,
        "reward_mean": rewards,
        "generated_tokens": tokens,
    }


def _prompts(loaded: LoadedRecipe, folder: str, tokenizer: Any) -> Sequence[PreparedPrompt]:
    recipe = loaded.recipe
    policy = LengthPolicy(
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        max_response_tokens=recipe.rollout.max_response_tokens,
        long_prompts=recipe.data.long_prompts,
        context_tokens=folder_context_length(folder),
    )
    rows = load_rows(recipe.training_sets["train"], loaded.folder, subject="data.train")
    return prepare_prompts(rows, tokenizer, policy, source="train", subject="data.train").prompts


def _ids(step: int, prompts: int, group_size: int) -> list[str]:
    """The pipeline's sample ids: they key the random numbers."""
    return [f"train-{step:06d}-{group:04d}-{k:02d}" for group in range(prompts) for k in range(group_size)]


def _generate(
    engine: HfEngine, recipe: Recipe, ids: Sequence[str], members: Sequence[PreparedPrompt]
) -> list[Generated]:
    rollout = recipe.rollout
    sampling = Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_response_tokens,
    )
    requests = [Request(i, p.ids, sampling, recipe.run.seed) for i, p in zip(ids, members, strict=True)]
    size = max(1, rollout.batch_size_per_device // recipe.algorithm.group_size) * recipe.algorithm.group_size
    found: dict[str, Generated] = {}
    for first in range(0, len(requests), size):
        engine.submit(requests[first : first + size])
        while engine.pending:
            found.update({g.id: g for g in engine.step()})
    return [found[i] for i in ids]


def _score(
    functions: Sequence[Any], recipe: Recipe, members: Sequence[PreparedPrompt], texts: Sequence[str]
) -> Any:
    records = [json.loads(p.record) for p in members]
    prompts = [r["prompt"] for r in records]
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    columns = {name: [r.get(name) for r in records] for name in records[0] if name != "prompt"}
    total = np.zeros(len(texts))
    for function, block in zip(functions, recipe.reward, strict=True):
        total += block.weight * np.array(function(prompts=prompts, completions=completions, **columns), dtype=float)
    return total


def _update(
    trainer: TorchEngine,
    algorithm: Algorithm,
    recipe: Recipe,
    members: Sequence[PreparedPrompt],
    generated: Sequence[Generated],
    scores: Any,
    pad: int,
) -> None:
    groups = [g.id.rsplit("-", 1)[0] for g in generated]
    lengths = [len(g.token_ids) for g in generated]
    masks = [np.ones(n, dtype=np.bool_) for n in lengths]
    advantages = algorithm.estimate(ScoredBatch(scores, groups, masks)).advantages
    shapes = [(len(p.ids), n) for p, n in zip(members, lengths, strict=True)]
    [plan] = plan_micro_batches(shapes, recipe.train.micro_batch_tokens, 1)
    for rows in plan:
        micro = build_micro_batch(
            [members[i].ids for i in rows],
            [generated[i].token_ids for i in rows],
            None,
            {
                "rollout_logprobs": [generated[i].logprobs for i in rows],
                "advantages": [advantages[i].tolist() for i in rows],
            },
            pad_id=pad,
        )
        trainer.accumulate(micro, partial(algorithm.loss, state={}))
    trainer.step(algorithm.denominators(lengths))


def _serve(engine: HfEngine, trainer: TorchEngine, version: int) -> None:
    """One model for both: the engine takes the trainer's own tensors, nothing is copied."""
    engine.begin_load(trainer.layout(), version)
    for name, tensor in trainer.shards():
        engine.load(name, tensor)
    engine.commit()


if __name__ == "__main__":
    print(json.dumps(train(load_recipe(Path(sys.argv[1]), sys.argv[2:]))))
