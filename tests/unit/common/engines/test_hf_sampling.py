"""Which tokens the engine chooses: greedy, frequencies, cuts, and independence of company and order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlmq.common.engines.generation import Request, Sampling
from rlmq.common.engines.token_choice import TokenChoice


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "mistral"])
def test_greedy_equals_transformers_generate(
    kind: str,
    build_model: Callable[..., Any],
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    mixed_prompts: list[list[int]],
    requests_for: Callable[..., Any],
) -> None:
    model = build_model(kind)
    requests = requests_for(mixed_prompts, Sampling(temperature=0.0, max_tokens=16))
    responses = run_engine(build_engine(build_model(kind)), requests)
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, pad_token_id=65
        )
        assert responses[request.id].token_ids == expected[0, ids.shape[1] :].tolist()


def test_sampled_frequencies_match_the_probabilities(
    build_model: Callable[..., Any], build_engine: Callable[..., Any], run_engine: Callable[..., Any]
) -> None:
    # given 6000 samples of one token, at temperature 1.5
    model = build_model()
    requests = [Request(f"f{i}", [3, 1, 4], Sampling(temperature=1.5, max_tokens=1), 12) for i in range(6000)]
    responses = run_engine(build_engine(max_batch=2000), requests)
    counts = np.bincount([r.token_ids[0] for r in responses.values()], minlength=67)
    # then a chi-square test against the model's own probabilities passes at 1e-4
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[3, 1, 4]])).logits[0, -1].double()
    expected = torch.softmax(logits / 1.5, dim=-1).numpy() * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    freedom = common.sum()
    # Wilson and Hilferty's approximation of the quantile; 3.719 is the normal's at 1e-4
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3
    assert ((observed - wanted) ** 2 / wanted).sum() < limit


def test_order_of_submission_does_not_change_tokens(
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    mixed_prompts: list[list[int]],
    requests_for: Callable[..., Any],
) -> None:
    requests = requests_for(mixed_prompts, Sampling(max_tokens=12), samples=3)
    forwards = run_engine(build_engine(), requests)
    backwards = run_engine(build_engine(), requests[::-1])
    assert {i: r.token_ids for i, r in forwards.items()} == {i: r.token_ids for i, r in backwards.items()}


def test_a_chunk_is_bit_equal_whatever_else_is_queued(
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    mixed_prompts: list[list[int]],
    requests_for: Callable[..., Any],
) -> None:
    # given a chunk generated alone
    chunk = requests_for(mixed_prompts, Sampling(max_tokens=12))
    alone = run_engine(build_engine(), chunk)
    # when it is submitted between two others, the first one half-way
    engine = build_engine()
    engine.submit([Request("before", [5] * 40, Sampling(max_tokens=20), 9)])
    finished = engine.step()
    engine.submit(chunk)
    engine.submit([Request("after", [6], Sampling(max_tokens=3), 9)])
    while engine.pending:
        finished += engine.step()
    # then its responses are equal to the last bit
    among = {response.id: response for response in finished}
    assert {i: among[i] for i in alone} == alone
    assert {"before", "after"} < set(among)


def test_a_chunk_is_bit_equal_where_batches_change_the_last_bits(
    build_engine: Callable[..., Any], run_engine: Callable[..., Any], requests_for: Callable[..., Any]
) -> None:
    # given layers of SmolLM2's size: there, logits of one row and of eight differ in the last bits
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=66,
    )
    engine = build_engine(LlamaForCausalLM(config))
    chunk = requests_for([[7] * n for n in (3, 30, 11)], Sampling(max_tokens=12), samples=8)
    first = run_engine(engine, chunk)
    # when the same chunk comes again, after and before others
    engine.submit(requests_for([[9] * 17], Sampling(max_tokens=5), seed=3))
    engine.submit([Request(f"x{i}", [i], Sampling(max_tokens=2), 0) for i in range(9)])
    engine.step()
    engine.abort([f"x{i}" for i in range(9)] + ["s0-0"])
    # then its responses are equal to the last bit
    assert run_engine(engine, chunk) == first


def test_seed_and_id_change_the_tokens(build_engine: Callable[..., Any], run_engine: Callable[..., Any]) -> None:
    def tokens(sample_id: str, seed: int) -> list[int]:
        request = Request(sample_id, [2, 3], Sampling(max_tokens=20, temperature=3.0), seed)
        return list(run_engine(build_engine(), [request])[sample_id].token_ids)

    assert tokens("a", 1) == tokens("a", 1)
    assert tokens("a", 1) != tokens("a", 2)
    assert tokens("a", 1) != tokens("b", 1)


def _chosen(probabilities: list[float], sampling: Sampling, draws: int = 400) -> dict[int, float]:
    """Share of each token when the uniform numbers are a fine grid: exact to 1 / draws."""
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    choice = TokenChoice([sampling] * draws, torch.device("cpu"))
    tokens, _ = choice.choose(torch.tensor(probabilities).log().repeat(draws, 1), uniforms)
    values, counts = tokens.unique(return_counts=True)
    return {int(v): float(c) / draws for v, c in zip(values, counts, strict=True)}


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ({}, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.3, 4: 0.15}),
        ({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_k": 9}, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.3, 4: 0.15}),
        ({"top_p": 0.39}, {1: 1.0}),
        ({"top_p": 0.6}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.8}, {1: 0.4 / 0.85, 3: 0.3 / 0.85, 4: 0.15 / 0.85}),
        # the nucleus is taken of what top_k leaves: 0.4 / 0.85 < 0.5 < 0.7 / 0.85
        ({"top_k": 3, "top_p": 0.5}, {1: 4 / 7, 3: 3 / 7}),
        ({"temperature": 0.5}, {t: p * p / 0.285 for t, p in enumerate([0.1, 0.4, 0.05, 0.3, 0.15])}),
        ({"temperature": 0.0, "top_k": 3}, {1: 1.0}),
    ],
)
def test_cuts_keep_exactly_these_tokens(cut: dict[str, Any], expected: dict[int, float]) -> None:
    assert _chosen([0.1, 0.4, 0.05, 0.3, 0.15], Sampling(**cut)) == pytest.approx(expected, abs=1 / 400)


def test_rows_with_and_without_cuts_do_not_disturb_each_other() -> None:
    # given three rows of which only the middle one is cut, and the largest uniform number there is
    rows = [Sampling(), Sampling(top_k=1), Sampling(temperature=0.0)]
    uniforms = torch.full((3,), 1 - 2.0**-53, dtype=torch.float64)
    logits = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().repeat(3, 1)
    # then the free one takes the last token with any weight, the others the likeliest
    tokens, logprobs = TokenChoice(rows, torch.device("cpu")).choose(logits, uniforms)
    assert tokens.tolist() == [2, 0, 0]
    assert logprobs.exp().tolist() == pytest.approx([0.2, 0.5, 0.5])


def test_choice_over_a_large_vocabulary_equals_a_float64_cumulative_sum() -> None:
    # given 64 rows over 49157 tokens
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(64, 49157, generator=generator) * 3
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    # when the same is done in float64, in one level
    weights = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
    ends = weights.cumsum(-1)
    expected = torch.searchsorted(ends, (uniforms[:, None] * ends[:, -1:]).contiguous(), right=True)[:, 0]
    # then the tokens are equal (float32 weights move borders by less than 1e-6) and so are their log-probs
    tokens, logprobs = TokenChoice([Sampling()] * 64, torch.device("cpu")).choose(logits.clone(), uniforms)
    assert tokens.tolist() == expected.tolist()
    reference = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(reference.tolist(), abs=1e-5)
