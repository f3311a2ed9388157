"""The engine's log-probs against one forward pass over the whole sequence, without cache and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlmq.common.engines.generation import Request, Sampling

TOLERANCE = 1e-4  # float32, another order of sums


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "gemma", "mistral"])
@pytest.mark.parametrize("continuous", [False, True], ids=["fixed", "continuous"])
def test_logprobs_equal_transformers(
    kind: str,
    continuous: bool,
    build_model: Callable[..., Any],
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    forced_logprobs: Callable[..., Any],
    mixed_prompts: list[list[int]],
) -> None:
    # given prompts of unequal length, shared and padded with end of text, at three temperatures, in eight slots
    model = build_model(kind)
    requests = [
        Request(f"s{place}-{temperature}", prompt, Sampling(temperature=temperature, max_tokens=14), 1)
        for place, prompt in enumerate(mixed_prompts)
        for temperature in (1.0, 0.6, 0.0)
    ]
    engine = build_engine(build_model(kind), pad_id=66, max_batch=8, continuous=continuous)
    # when they are generated
    responses = run_engine(engine, requests)
    # then each token's log-prob is what the model says of the sequence alone
    assert len(responses) == len(requests)
    for request in requests:
        response = responses[request.id]
        temperature = request.sampling.temperature
        expected = forced_logprobs(model, request.prompt_ids, response.token_ids, temperature)
        assert response.logprobs == pytest.approx(expected, abs=1e-5, rel=1e-5), request.id


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5}])
def test_logprobs_are_of_the_distribution_before_the_cuts(
    cut: dict[str, Any],
    build_model: Callable[..., Any],
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    forced_logprobs: Callable[..., Any],
    requests_for: Callable[..., Any],
) -> None:
    model = build_model()
    requests = requests_for([[1, 2, 3]], Sampling(temperature=0.8, max_tokens=10, **cut), samples=8)
    for request, response in zip(requests, run_engine(build_engine(), requests).values(), strict=True):
        expected = forced_logprobs(model, request.prompt_ids, response.token_ids, 0.8)
        assert response.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_one_row_alone_equals_the_same_row_in_a_batch(
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    mixed_prompts: list[list[int]],
    requests_for: Callable[..., Any],
) -> None:
    requests = requests_for(mixed_prompts, Sampling(max_tokens=12))
    together = run_engine(build_engine(), requests)
    for request in requests:
        alone = run_engine(build_engine(), [request])[request.id]
        assert alone.token_ids == together[request.id].token_ids
        assert alone.logprobs == pytest.approx(together[request.id].logprobs, abs=TOLERANCE)


def test_different_temperatures_share_a_batch(
    build_model: Callable[..., Any],
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    forced_logprobs: Callable[..., Any],
) -> None:
    model = build_model()
    temperatures = {"a": 0.0, "b": 0.5, "c": 1.0, "d": 1.7}
    requests = [Request(name, [7, 8], Sampling(temperature=t, max_tokens=9), 3) for name, t in temperatures.items()]
    for name, response in run_engine(build_engine(), requests).items():
        expected = forced_logprobs(model, [7, 8], response.token_ids, temperatures[name])
        assert response.logprobs == pytest.approx(expected, abs=TOLERANCE)
