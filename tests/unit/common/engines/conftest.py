"""Small random models, and an engine that serves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlmq.common.engines.generation import Generated, Request, Sampling
from rlmq.common.engines.hf import HfEngine

VOCABULARY = 67  # no multiple of anything
PAD, EOS = 65, 66
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "initializer_range": 0.4,  # distributions far from uniform
}

ModelBuilder = Callable[..., PreTrainedModel]
EngineBuilder = Callable[..., HfEngine]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def build_model() -> ModelBuilder:
    """`build_model(kind, seed=0, tied=False)`: kinds `llama`, `qwen2`, `qwen3`, `gemma`, `mistral` (a window
    of 8), `gpt2`."""

    def build(kind: str = "llama", *, seed: int = 0, tied: bool = False) -> PreTrainedModel:
        torch.manual_seed(seed)
        model: PreTrainedModel
        if kind == "gpt2":
            config = GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=96,
                bos_token_id=None,
                eos_token_id=EOS,
                initializer_range=0.4,
            )
            model = GPT2LMHeadModel(config)
        elif kind == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=tied))
        elif kind == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=tied))
        elif kind == "gemma":
            model = GemmaForCausalLM(GemmaConfig(**{**_SIZES, "initializer_range": 0.1}, head_dim=16))
        elif kind == "mistral":
            model = MistralForCausalLM(MistralConfig(**_SIZES, tie_word_embeddings=tied, sliding_window=8))
        else:
            model = LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=tied))
        return model.eval()

    return build


@pytest.fixture
def build_engine(build_model: ModelBuilder) -> EngineBuilder:
    """`build_engine(model=None, …)`: an engine that serves the model's weights as version 0."""

    def build(
        model: PreTrainedModel | None = None, *, pad_id: int = PAD, max_batch: int = 64, continuous: bool = False
    ) -> HfEngine:
        model = model or build_model()
        engine = HfEngine(model, pad_id=pad_id, eos_ids=(EOS,), max_batch=max_batch, continuous=continuous)
        engine.begin_load(engine.layout(), 0)
        for name, tensor in model.state_dict().items():
            engine.load(name, tensor.clone())
        engine.commit()
        return engine

    return build


@pytest.fixture(scope="session")
def run_engine() -> Callable[[HfEngine, Sequence[Request]], dict[str, Generated]]:
    """Submit one chunk and step until it is done; responses by id."""

    def run(engine: HfEngine, requests: Sequence[Request]) -> dict[str, Generated]:
        engine.submit(requests)
        finished: list[Generated] = []
        for _ in range(1000):
            if not engine.pending:
                break
            finished += engine.step()
        assert engine.pending == 0
        assert len(finished) == len({response.id for response in finished})
        return {response.id: response for response in finished}

    return run


@pytest.fixture(scope="session")
def forced_logprobs() -> Callable[..., list[float]]:
    """Reference: the whole sequence in one forward pass, alone, without cache or padding, float64 softmax."""

    def forced(
        model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].double()
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(response)]

    return forced


@pytest.fixture
def mixed_prompts() -> list[list[int]]:
    """Prompts of 1 to 37 tokens; three share 20 first tokens, two are equal."""
    beginning = [3 * i % 61 for i in range(20)]
    return [
        [*beginning, 5, 6, 7],
        [*beginning, 9],
        [*beginning, *range(17)],
        [4],
        [EOS, 8, EOS],
        [*beginning, 9],
        [PAD, PAD, 2, 1],
    ]


@pytest.fixture(scope="session")
def requests_for() -> Callable[..., list[Request]]:
    """`requests_for(prompts, sampling, seed=1, samples=1)`: ids `s<prompt>-<member>`."""

    def make(
        prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int = 1, samples: int = 1
    ) -> list[Request]:
        return [
            Request(f"s{p}-{k}", prompt, sampling, seed) for p, prompt in enumerate(prompts) for k in range(samples)
        ]

    return make
