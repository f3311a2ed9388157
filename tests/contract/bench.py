"""One engine under test, the model whose weights it serves, and the reference that judges it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from rlmq.common.engines.generation import Generated, GenerationEngine, Request, Sampling

EOS, CONTEXT_TOKENS = 257, 320


def build_model(*, seed: int, tied: bool) -> PreTrainedModel:
    """A random model over bytes whose distributions are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=256,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@dataclass
class Bench:
    """One engine, and the model whose weights it serves."""

    engine: GenerationEngine
    tied: bool
    model: PreTrainedModel
    decode: Callable[..., str]
    version: int = -1
    taken: int = field(default=0)

    def sync(self, seed: int, version: int | None = None) -> PreTrainedModel:
        """Load the weights of another seed as the next version."""
        model = build_model(seed=seed, tied=self.tied)
        self.version = self.version + 1 if version is None else version
        self.engine.begin_load(self.engine.layout(), self.version)
        for name, tensor in model.state_dict().items():
            buffer = tensor.clone()
            self.engine.load(name, buffer)
            buffer.fill_(7)  # the sender uses its memory again
        self.engine.commit()
        self.model = model
        return model

    def finish(self, responses: list[Generated] | None = None) -> dict[str, Generated]:
        """Step until nothing is pending."""
        finished = list(responses or [])
        for _ in range(100_000):
            if not self.engine.pending:
                break
            finished += self.engine.step()
        assert self.engine.pending == 0
        assert len({one.id for one in finished}) == len(finished)
        return {one.id: one for one in finished}

    def run(self, requests: list[Request]) -> dict[str, Generated]:
        """Submit and finish."""
        self.engine.submit(requests)
        return self.finish()

    def fresh(self, stem: str, prompts: list[list[int]], sampling: Sampling, **more: Any) -> list[Request]:
        """Requests with ids that this engine has not seen."""
        self.taken += 1
        seed, samples = more.get("seed", 1), more.get("samples", 1)
        return [
            Request(f"{stem}{self.taken}-{p}-{k}", prompt, sampling, seed)
            for p, prompt in enumerate(prompts)
            for k in range(samples)
        ]


def forced(model: PreTrainedModel, prompt: Any, response: Any, temperature: float = 1.0) -> list[float]:
    """Reference: one forward pass over the whole sequence, alone, float64 softmax."""
    if not response:
        return []
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return [float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(response)]
