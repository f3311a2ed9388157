"""Small models and ragged rows that several tests and their rank processes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlmq.common.algorithms.grpo import Grpo
from rlmq.common.engines.micro_batches import build_micro_batch
from rlmq.common.engines.training import MicroBatch
from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.schema import RolloutBlock, TrainBlock

PAD_ID = 2
ALGORITHM = Grpo(SimpleNamespace(algorithm=AlgorithmBlock(), rollout=RolloutBlock()))  # type: ignore[arg-type]
LOSS = partial(ALGORITHM.loss, state={})


@dataclass(frozen=True, slots=True)
class Rows:
    prompts: list[list[int]]
    responses: list[list[int]]
    advantages: list[float]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        return [(len(p), len(r)) for p, r in zip(self.prompts, self.responses, strict=True)]

    def part(self, rows: Sequence[int]) -> Rows:
        return Rows(
            [self.prompts[i] for i in rows], [self.responses[i] for i in rows], [self.advantages[i] for i in rows]
        )


def rows_of(count: int) -> Rows:
    """Groups of three with a common prompt; lengths differ much, and the pad id occurs as a token."""
    draw = torch.Generator().manual_seed(count)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, 64, (length,), generator=draw).tolist()

    groups = [tokens(3 + 5 * (g % 3)) for g in range(count // 3 + 1)]
    return Rows(
        [groups[i // 3] for i in range(count)],
        [tokens(1 + (7 * i) % 13) for i in range(count)],
        torch.randn(count, generator=draw, dtype=torch.float64).tolist(),
    )


def micro_batches(rows: Rows, split: Sequence[Sequence[int]]) -> list[MicroBatch]:
    return [
        build_micro_batch(
            [rows.prompts[i] for i in part],
            [rows.responses[i] for i in part],
            columns={"advantages": [[rows.advantages[i]] * len(rows.responses[i]) for i in part]},
            pad_id=PAD_ID,
        )
        for part in split
    ]


def block(**keys: Any) -> TrainBlock:
    return TrainBlock(**{"steps": 10, "lr": 1e-3, "adam_epsilon": 1e-3, "grad_clip": 0.0, **keys})


def tiny_model(kind: str = "llama") -> Any:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 80,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=48, n_layer=2, n_head=3, initializer_range=0.2))
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes))
    if kind == "mistral-window":
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=4))
    attention = "eager" if kind == "llama-eager" else "sdpa"
    return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=attention))
