"""The trainer's micro-batches against a plain loop that pads every row to the longest of all.

Same random model, rows, loss, optimizer, threads and most tokens of a forward; the two take turns, and end with the
same weights up to the order of sums. Responses are log-normal (median 64, sigma 1), cut to 16 … 512, each with a
prompt of its own, so that nothing is gained by sharing prompts. The plain loop computes the softmax of padded
places too.

    RLMQ_BENCH_ROWS=96 RLMQ_BENCH_ROUNDS=3 rlmq bench packing
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch

from benchmarks.generate import _model, _work
from benchmarks.result import BenchResult, Cell
from rlmq.common.engines.micro_batches import build_micro_batch, padded_tokens, plan_micro_batches
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput
from rlmq.common.recipe.schema import TrainBlock

_BUDGET_TOKENS = 4096
_HIDDEN = 128


def run() -> BenchResult:
    """Measure both, in turns."""
    prompts, lengths = _work(int(os.environ.get("RLMQ_BENCH_ROWS", "96")))
    rounds = int(os.environ.get("RLMQ_BENCH_ROUNDS", "3"))
    rng = np.random.default_rng(1)
    responses = [rng.integers(1, 4096, length).tolist() for length in lengths]
    sizes = [(len(p), len(r)) for p, r in zip(prompts, responses, strict=True)]
    longest = sum(np.max(sizes, axis=0).tolist())
    many = max(1, _BUDGET_TOKENS // longest)
    plans = {
        "padded": tuple(tuple(range(i, min(i + many, len(sizes)))) for i in range(0, len(sizes), many)),
        "balanced": plan_micro_batches(sizes, _BUDGET_TOKENS, 1)[0],
    }
    places = {
        "padded": longest * len(sizes),
        "balanced": sum(padded_tokens(sizes, rows) for rows in plans["balanced"]),
    }
    engines = {name: TorchEngine(_model(_HIDDEN), TrainBlock(steps=100, lr=1e-5)) for name in plans}
    batches = {
        "padded": [
            _rectangle(prompts, responses, rows, np.max(sizes, axis=0).tolist()) for rows in plans["padded"]
        ],
        "balanced": [_rectangle(prompts, responses, rows, None) for rows in plans["balanced"]],
    }
    rows: list[dict[str, Cell]] = []
    for number in range(-1, rounds):  # the first warms up
        used = {name: _step(engines[name], batches[name], sum(lengths), plain=name == "padded") for name in plans}
        if number >= 0:
            rates = {name: sum(map(sum, sizes)) / seconds for name, (seconds, _) in used.items()}
            ratio = used["padded"][0] / used["balanced"][0]
            cpu = used["padded"][1] / used["balanced"][1]
            told = {f"{name} tokens/s": rate for name, rate in rates.items()}
            rows.append({"round": number + 1, **told, "ratio": ratio, "cpu ratio": cpu})
    apart = max(
        float((one - other).abs().max())
        for (_, one), (_, other) in zip(engines["padded"].shards(), engines["balanced"].shards(), strict=True)
    )
    notes = [
        f"{len(sizes)} rows, {sum(map(sum, sizes))} tokens; {places['padded']} places padded to the longest, "
        f"{places['balanced']} balanced; hidden {_HIDDEN}, {torch.get_num_threads()} threads",
        f"weights of both differ by at most {apart:.1e} after {rounds + 1} steps",
    ]
    ratios = {
        f"balanced / padded to the longest, {what}": median(float(str(row[column])) for row in rows)
        for what, column in (("training tokens/s", "ratio"), ("tokens per CPU second", "cpu ratio"))
    }
    return BenchResult("packing", rows, ratios, notes)


def _rectangle(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], rows: Sequence[int], to: list[int] | None
) -> MicroBatch:
    """Rows as a micro-batch; `to`: padded to so many prompt and response places."""
    own = build_micro_batch([prompts[i] for i in rows], [responses[i] for i in rows])
    if to is None:
        return own
    left, right = to[0] + own.response_length - own.input_ids.shape[1], to[1] - own.response_length
    pad = torch.nn.functional.pad
    return MicroBatch(
        pad(own.input_ids, (left, right)),
        pad(own.attention_mask, (left, right)),
        pad(own.position_ids, (left, right)),
        pad(own.response_mask, (0, right)),
    )


def _loss(output: PolicyOutput, batch: MicroBatch) -> LossTerms:
    return LossTerms(-(output.logprobs * batch.response_mask).sum(), {})


def _plain(engine: TorchEngine, batch: MicroBatch) -> None:
    """Forward and backward as a plain loop makes them: logits and their softmax of every place of a response."""
    prompt = batch.input_ids.shape[1] - batch.response_length
    logits = engine.model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=batch.response_length + 1,
        use_cache=False,
    ).logits[:, :-1]
    chosen = torch.log_softmax(logits, dim=-1).gather(2, batch.input_ids[:, prompt:, None])[..., 0]
    (-(chosen * batch.response_mask).sum()).backward()


def _step(engine: TorchEngine, batches: Sequence[MicroBatch], tokens: int, *, plain: bool) -> tuple[float, float]:
    """Seconds and CPU seconds of a step."""
    began, cpu = time.monotonic(), time.process_time()
    for batch in batches:
        if plain:
            _plain(engine, batch)
        else:
            engine.accumulate(batch, _loss)
    engine.step((float(tokens),))
    return time.monotonic() - began, time.process_time() - cpu
