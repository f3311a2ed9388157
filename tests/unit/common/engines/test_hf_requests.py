"""Requests through their life: end of text, limits, stops, batches, abort, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlmq.common.engines.generation import Request, Sampling
from rlmq.common.engines.hf import HfEngine
from rlmq.common.errors import IntegrityError, UsageError

EOS = 66


def _ends_at_once(model: Any) -> Any:
    """Make end of text the likeliest token after token 1, and token 1 after everything else."""
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[1] = 0.0
        model.model.embed_tokens.weight[1, 1] = 1.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[1, 0] = 9.0
        model.lm_head.weight[EOS, 1] = 9.0
    return model


@pytest.mark.parametrize("pad_id", [65, EOS], ids=["own-pad", "pad-is-eos"])
def test_end_of_text_is_part_of_the_response(
    pad_id: int, build_model: Callable[..., Any], build_engine: Callable[..., Any], run_engine: Callable[..., Any]
) -> None:
    engine = build_engine(_ends_at_once(build_model()), pad_id=pad_id)
    sampling = Sampling(temperature=0.0, max_tokens=8)
    responses = run_engine(engine, [Request("a", [5, EOS, 7], sampling, 0), Request("b", [1], sampling, 0)])
    assert (responses["a"].token_ids, responses["a"].truncated) == ([1, EOS], False)
    assert (responses["b"].token_ids, responses["b"].truncated) == ([EOS], False)
    assert len(responses["a"].logprobs) == len(responses["a"].policy_versions) == 2


def test_end_of_text_as_last_allowed_token_is_not_truncation(
    build_model: Callable[..., Any], build_engine: Callable[..., Any], run_engine: Callable[..., Any]
) -> None:
    engine = build_engine(_ends_at_once(build_model()))
    requests = [Request(f"m{m}", [5], Sampling(temperature=0.0, max_tokens=m), 0) for m in (1, 2, 3)]
    responses = run_engine(engine, requests)
    assert {name: (r.token_ids, r.truncated) for name, r in responses.items()} == {
        "m1": ([1], True),
        "m2": ([1, EOS], False),
        "m3": ([1, EOS], False),
    }


def test_a_stop_id_ends_only_its_own_request(
    build_model: Callable[..., Any], build_engine: Callable[..., Any], run_engine: Callable[..., Any]
) -> None:
    engine = build_engine(_ends_at_once(build_model()))
    free = Sampling(temperature=0.0, max_tokens=8)
    stopped = Sampling(temperature=0.0, max_tokens=8, stop_ids=(1,))
    responses = run_engine(engine, [Request("free", [5], free, 0), Request("stopped", [5], stopped, 0)])
    assert responses["free"].token_ids == [1, EOS]
    assert (responses["stopped"].token_ids, responses["stopped"].truncated) == ([1], False)


def test_finished_rows_leave_the_batch_without_touching_the_others(
    build_model: Callable[..., Any],
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    forced_logprobs: Callable[..., Any],
) -> None:
    # given rows that end after 1, 2, … 16 tokens
    model = build_model()
    requests = [Request(f"r{n}", [n, 3], Sampling(max_tokens=n), 5) for n in range(1, 17)]
    # when they are generated together
    responses = run_engine(build_engine(), requests)
    # then each is right to its end
    for request in requests:
        response = responses[request.id]
        assert response.logprobs == pytest.approx(
            forced_logprobs(model, request.prompt_ids, response.token_ids), abs=1e-4
        )


def test_a_chunk_larger_than_a_batch_gives_what_smaller_batches_give(
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    mixed_prompts: list[list[int]],
    requests_for: Callable[..., Any],
) -> None:
    requests = requests_for(mixed_prompts, Sampling(max_tokens=6), samples=2)
    wide = run_engine(build_engine(max_batch=64), requests)
    narrow = run_engine(build_engine(max_batch=3), requests)
    assert {i: r.token_ids for i, r in wide.items()} == {i: r.token_ids for i, r in narrow.items()}


def test_abort_returns_what_is_there_and_spares_the_rest(
    build_engine: Callable[..., Any], run_engine: Callable[..., Any]
) -> None:
    # given a batch on its way and a queued one
    engine = build_engine()
    sampling = Sampling(max_tokens=10, temperature=2.0)
    requests = [Request(f"a{i}", [i + 1], sampling, 20) for i in range(3)]
    whole = run_engine(engine, requests)
    engine.submit(requests)
    engine.submit([Request("queued", [4], sampling, 20)])
    # when one of each is aborted after three tokens
    for _ in range(3):
        assert engine.step() == []
    partial = {r.id: r for r in engine.abort(["a1", "queued", "unknown"])}
    # then they come back with what they have, and the others go on as before
    assert partial["a1"].token_ids == whole["a1"].token_ids[:3]
    assert (partial["a1"].truncated, partial["queued"].token_ids) == (True, [])
    rest = []
    while engine.pending:
        rest += engine.step()
    assert {r.id: r.token_ids for r in rest} == {i: whole[i].token_ids for i in ("a0", "a2")}
    assert engine.step() == []


def test_prompt_and_limit_beyond_the_context_are_refused(build_engine: Callable[..., Any]) -> None:
    engine = build_engine()
    with pytest.raises(UsageError, match=r"sample long: got 90 prompt tokens \+ 7 .* at most 96 tokens"):
        engine.submit(
            [
                Request("fits", [1] * 90, Sampling(max_tokens=6), 0),
                Request("long", [1] * 90, Sampling(max_tokens=7), 0),
            ]
        )
    assert engine.pending == 0


@pytest.mark.parametrize(("prompt", "limit"), [([], 4), ([1], 0)])
def test_an_empty_prompt_or_limit_is_refused(
    prompt: list[int], limit: int, build_engine: Callable[..., Any]
) -> None:
    with pytest.raises(UsageError, match=r"sample e: .* at least one of each"):
        build_engine().submit([Request("e", prompt, Sampling(max_tokens=limit), 0)])


def test_an_id_twice_is_refused(build_engine: Callable[..., Any]) -> None:
    engine = build_engine()
    request = Request("twin", [1], Sampling(max_tokens=2), 0)
    with pytest.raises(IntegrityError, match="sample twin"):
        engine.submit([request, request])
    engine.submit([request])
    with pytest.raises(IntegrityError, match="sample twin"):
        engine.submit([request])


def test_an_engine_without_weights_does_not_step(build_model: Callable[..., Any]) -> None:
    engine = HfEngine(build_model(), pad_id=65, eos_ids=(EOS,), max_batch=4)
    assert (engine.state, engine.version) == ("empty", -1)
    engine.submit([Request("a", [1], Sampling(), 0)])
    with pytest.raises(IntegrityError, match="state empty"):
        engine.step()
    assert engine.pending == 1


def test_weights_that_are_not_finite_stop_generation(
    build_model: Callable[..., Any], build_engine: Callable[..., Any]
) -> None:
    model = build_model()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    engine = build_engine(model)
    engine.submit([Request("a", [1], Sampling(), 0)])
    with pytest.raises(IntegrityError, match="not finite"):
        engine.step()
