"""`hf` with continuous batching against transformers' own `generate`, on responses of long-tailed length.

Same random model, prompts, lengths, rows at once and threads; the two take turns, the ratio is the median over the
rounds. Lengths are log-normal (median 64, sigma 1), cut to 16 … 512: `generate` learns of a row's end by a stopping
criterion per row, as it does with an end-of-text token, and pads it until the longest of its batch ends.

    RLMQ_BENCH_HIDDEN=256 RLMQ_BENCH_ROUNDS=3 RLMQ_BENCH_REQUESTS=256 rlmq bench generate
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.result import BenchResult, Cell
from rlmq.common.engines.generation import Request, Sampling
from rlmq.common.engines.hf import HfEngine

_ROWS = 64
_VOCABULARY = 4096
_PROMPT_TOKENS = (8, 64)
_RESPONSE_TOKENS = (16, 512)


def run() -> BenchResult:
    """Measure both, in turns."""
    hidden = int(os.environ.get("RLMQ_BENCH_HIDDEN", "256"))
    rounds = int(os.environ.get("RLMQ_BENCH_ROUNDS", "3"))
    prompts, lengths = _work(int(os.environ.get("RLMQ_BENCH_REQUESTS", "256")))
    plain = _model(hidden)
    engines = {
        name: HfEngine(_model(hidden), pad_id=0, eos_ids=(), max_batch=_ROWS, continuous=name == "continuous")
        for name in ("fixed", "continuous")
    }
    for engine in engines.values():
        engine.serve(0)
        _ours(engine, prompts[:8], [16] * 8, "warm")
    _plain(plain, prompts[:8], [16] * 8)
    rows: list[dict[str, Cell]] = []
    tokens = sum(lengths)
    for number in range(rounds):
        used = {"generate": _plain(plain, prompts, lengths)}
        for name, engine in engines.items():
            used[name] = _ours(engine, prompts, lengths, f"{name}{number}")
        wall = {name: seconds for name, (seconds, _) in used.items()}
        cpu = {name: seconds for name, (_, seconds) in used.items()}
        rows.append(
            {
                "round": number + 1,
                "tokens": tokens,
                **{f"{name} tokens/s": tokens / seconds for name, seconds in wall.items()},
                **{f"{name} cpu_s": seconds for name, seconds in cpu.items()},
                "ratio": wall["generate"] / wall["continuous"],
                "cpu ratio": cpu["generate"] / cpu["continuous"],
            }
        )
    steps = sum(max(lengths[start : start + _ROWS]) for start in range(0, len(lengths), _ROWS))
    notes = [
        f"hidden {hidden}, 4 layers, {len(lengths)} requests, {_ROWS} at once, {torch.get_num_threads()} threads",
        f"generate steps through {steps * _ROWS} places for {sum(lengths)} tokens",
    ]
    ratios = {
        f"continuous batching / generate, {what}": median(float(str(row[column])) for row in rows)
        for what, column in (("tokens/s", "ratio"), ("tokens per CPU second", "cpu ratio"))
    }
    return BenchResult("generate", rows, ratios, notes)


def _work(requests: int) -> tuple[list[list[int]], list[int]]:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(64), 1.0, requests), *_RESPONSE_TOKENS).astype(int).tolist()
    prompts = [random.integers(1, _VOCABULARY, random.integers(*_PROMPT_TOKENS)).tolist() for _ in range(requests)]
    return prompts, lengths


def _model(hidden: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = hidden // 64 if hidden >= 128 else 2
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def _ours(engine: HfEngine, prompts: Sequence[list[int]], lengths: Sequence[int], name: str) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    requests = [
        Request(f"{name}-{i}", prompt, Sampling(max_tokens=length), 0)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    began, used, tokens = time.monotonic(), time.process_time(), 0
    engine.submit(requests)
    while engine.pending:
        tokens += sum(len(response.token_ids) for response in engine.step())
    assert tokens == sum(lengths)
    return time.monotonic() - began, time.process_time() - used


class _Lengths(StoppingCriteria):  # type: ignore[misc]
    """Each row ends at its own length."""

    def __init__(self, ends: torch.Tensor) -> None:
        self._ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return torch.full_like(self._ends, input_ids.shape[1]) >= self._ends


def _plain(model: LlamaForCausalLM, prompts: Sequence[list[int]], lengths: Sequence[int]) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    began, used = time.monotonic(), time.process_time()
    for start in range(0, len(prompts), _ROWS):
        some, limits = prompts[start : start + _ROWS], lengths[start : start + _ROWS]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in some])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in some])
        ends = _Lengths(width + torch.tensor(limits))
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=max(limits),
                stopping_criteria=StoppingCriteriaList([ends]),
                pad_token_id=0,
            )
        assert made.shape[1] == width + max(limits)
    return time.monotonic() - began, time.process_time() - used
