"""Loading weights into the engine: equal to a fresh engine, whole or not at all, no cache of old weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlmq.common.engines.generation import Request, Sampling
from rlmq.common.errors import IntegrityError
from rlmq.common.weights import TensorSpec, WeightManifest


def _sync(engine: Any, model: Any, version: int) -> None:
    engine.begin_load(engine.layout(), version)
    for name, tensor in model.state_dict().items():
        engine.load(name, tensor.clone())
    engine.commit()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loaded_weights_equal_a_fresh_engine(
    kind: str,
    tied: bool,
    build_model: Callable[..., Any],
    build_engine: Callable[..., Any],
    run_engine: Callable[..., Any],
    mixed_prompts: list[list[int]],
    requests_for: Callable[..., Any],
) -> None:
    # given an engine that has already generated with other weights, twice synced
    requests = requests_for(mixed_prompts, Sampling(max_tokens=12))
    engine = build_engine(build_model(kind, seed=1, tied=tied))
    before = run_engine(engine, requests)
    for version, seed in ((1, 2), (2, 3)):
        _sync(engine, build_model(kind, seed=seed, tied=tied), version)
    # when it generates, then it is bit-equal to an engine built with the new weights
    fresh = run_engine(build_engine(build_model(kind, seed=3, tied=tied)), requests)
    after = run_engine(engine, requests)
    assert {i: (r.token_ids, r.logprobs) for i, r in after.items()} == {
        i: (r.token_ids, r.logprobs) for i, r in fresh.items()
    }
    assert {v for r in after.values() for v in r.policy_versions} == {2}
    assert {i: r.token_ids for i, r in before.items()} != {i: r.token_ids for i, r in after.items()}


def test_tied_names_are_in_the_layout_and_stay_tied(
    build_model: Callable[..., Any], build_engine: Callable[..., Any]
) -> None:
    model = build_model(tied=True)
    engine = build_engine(model)
    names = [spec.name for spec in engine.layout().tensors]
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(names)
    assert names == list(model.state_dict())
    other = build_model(seed=5, tied=True)
    _sync(engine, other, 1)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_a_commit_half_way_continues_with_the_new_weights(
    build_model: Callable[..., Any],
    build_engine: Callable[..., Any],
    forced_logprobs: Callable[..., Any],
    mixed_prompts: list[list[int]],
    requests_for: Callable[..., Any],
) -> None:
    # given responses with four tokens of version 0
    old, new = build_model(seed=1), build_model(seed=2)
    engine = build_engine(build_model(seed=1))
    requests = requests_for(mixed_prompts, Sampling(max_tokens=10))
    engine.submit(requests)
    finished = [r for _ in range(4) for r in engine.step()]
    # when new weights are committed
    _sync(engine, new, 1)
    while engine.pending:
        finished += engine.step()
    # then each token has the log-prob of the version that it names: nothing cached survived
    prompts = {request.id: request.prompt_ids for request in requests}
    assert {len(r.token_ids) for r in finished} != {4}
    for response in finished:
        count = min(4, len(response.token_ids))
        assert response.policy_versions == [0] * count + [1] * (len(response.token_ids) - count)
        by_old = forced_logprobs(old, prompts[response.id], response.token_ids)
        by_new = forced_logprobs(new, prompts[response.id], response.token_ids)
        assert response.logprobs == pytest.approx(by_old[:count] + by_new[count:], abs=1e-4)


def test_the_engine_keeps_no_hold_on_the_senders_memory(
    build_model: Callable[..., Any], build_engine: Callable[..., Any], run_engine: Callable[..., Any]
) -> None:
    # given weights that were loaded from one reused buffer each
    engine, source = build_engine(), build_model(seed=8)
    engine.begin_load(engine.layout(), 1)
    for name, tensor in source.state_dict().items():
        buffer = tensor.clone()
        engine.load(name, buffer)
        buffer.fill_(7)
    engine.commit()
    # then the engine has the values of the moment of loading
    request = [Request("a", [1, 2], Sampling(max_tokens=8), 0)]
    assert run_engine(engine, request)["a"].token_ids == run_engine(build_engine(source), request)["a"].token_ids


def test_old_weights_serve_until_the_commit(
    build_engine: Callable[..., Any], build_model: Callable[..., Any]
) -> None:
    engine = build_engine()
    engine.submit([Request("a", [1, 2], Sampling(max_tokens=1), 0)])
    engine.begin_load(engine.layout(), 9)
    for name, tensor in build_model(seed=4).state_dict().items():
        engine.load(name, tensor)
    assert (engine.state, engine.version) == ("loading", 0)
    assert engine.step()[0].policy_versions == [0]
    engine.commit()
    assert (engine.state, engine.version) == ("serving", 9)


def test_an_incomplete_load_is_not_committed_and_can_be_abandoned(
    build_engine: Callable[..., Any], run_engine: Callable[..., Any], build_model: Callable[..., Any]
) -> None:
    engine = build_engine()
    request = [Request("a", [1, 2], Sampling(max_tokens=8), 0)]
    before = run_engine(engine, request)
    engine.begin_load(engine.layout(), 1)
    name, tensor = next(iter(build_model(seed=4).state_dict().items()))
    engine.load(name, tensor)
    with pytest.raises(IntegrityError, match=r"weight commit: got 1 of \d+ tensors"):
        engine.commit()
    engine.abandon()
    assert (engine.state, engine.version) == ("serving", 0)
    assert run_engine(engine, request) == before
    with pytest.raises(IntegrityError, match="weight commit"):
        engine.commit()


def _changed(manifest: WeightManifest, index: int, spec: TensorSpec | None) -> WeightManifest:
    tensors = list(manifest.tensors)
    tensors[index : index + 1] = [spec] if spec else []
    return WeightManifest(tuple(tensors))


@pytest.mark.parametrize("change", ["shape", "dtype", "name", "missing", "extra"])
def test_a_manifest_of_another_model_is_refused(change: str, build_engine: Callable[..., Any]) -> None:
    engine = build_engine()
    layout = engine.layout()
    first = layout.tensors[0]
    other = {
        "shape": _changed(layout, 0, TensorSpec(first.name, (3, 3), first.dtype)),
        "dtype": _changed(layout, 0, TensorSpec(first.name, first.shape, "BF16")),
        "name": _changed(layout, 0, TensorSpec("other.weight", first.shape, first.dtype)),
        "missing": _changed(layout, 0, None),
        "extra": WeightManifest((*layout.tensors, TensorSpec("extra.weight", (1,), "F32"))),
    }[change]
    with pytest.raises(IntegrityError, match="extra.weight" if change == "extra" else first.name):
        engine.begin_load(other, 1)
    assert engine.state == "serving"


def test_wrong_tensors_are_refused(build_engine: Callable[..., Any], build_model: Callable[..., Any]) -> None:
    model = build_model(tied=True)
    engine = build_engine(build_model(tied=True))
    with pytest.raises(IntegrityError, match="begin_load"):
        engine.load("lm_head.weight", model.lm_head.weight)
    engine.begin_load(engine.layout(), 1)
    with pytest.raises(IntegrityError, match=r"got F32 \[2\], expected F32 \[67, 32\]"):
        engine.load("lm_head.weight", torch.zeros(2))
    engine.load("model.embed_tokens.weight", model.lm_head.weight.detach())
    with pytest.raises(IntegrityError, match="tied"):
        engine.load("lm_head.weight", model.lm_head.weight.detach() + 1)


def test_released_memory_is_taken_again_without_changing_results(
    build_engine: Callable[..., Any], run_engine: Callable[..., Any], build_model: Callable[..., Any]
) -> None:
    # given an undisturbed response
    request = [Request("a", [1, 2], Sampling(max_tokens=12), 0)]
    undisturbed = run_engine(build_engine(), request)["a"]
    # when memory is released half-way
    engine = build_engine()
    engine.submit(request)
    finished = engine.step() + engine.step()
    engine.release_memory()
    engine.acquire_memory()
    while engine.pending:
        finished += engine.step()
    # then it goes on as if nothing had been, and weights can still be loaded
    assert finished[0].token_ids == undisturbed.token_ids
    assert finished[0].logprobs == pytest.approx(undisturbed.logprobs, abs=1e-5)
    _sync(engine, build_model(seed=6), 1)
    assert engine.version == 1
