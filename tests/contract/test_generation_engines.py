"""What every generation engine does, whoever wrote it: one suite over all of them.

Engines live as long as the file, so that each test finds them as the one before left them: with warm caches.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from contract.bench import CONTEXT_TOKENS, EOS, Bench, build_model, forced

from rlmq.common.engines.generation import Request, Sampling
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.weights import TensorSpec, WeightManifest

pytestmark = pytest.mark.timeout(600)  # the first test of an engine waits for its start

TOLERANCE = 1e-4
BEGINNING = [40 + i % 50 for i in range(20)]
PROMPTS = [[*BEGINNING, 5, 6, 7], [*BEGINNING, 9], [*BEGINNING, *range(17)], [4], [8, 3, 8], [*BEGINNING, 9]]


def test_without_weights_nothing_is_generated(bench: Bench) -> None:
    assert (bench.engine.state, bench.engine.version, bench.engine.pending) == ("empty", -1, 0)
    bench.engine.submit([Request("early", [1, 2], Sampling(max_tokens=2), 0)])
    with pytest.raises(IntegrityError, match="committed policy version"):
        bench.engine.step()
    assert [one.id for one in bench.engine.abort(["early"])] == ["early"]
    bench.sync(seed=0)
    assert (bench.engine.state, bench.engine.version, bench.engine.pending) == ("serving", 0, 0)
    assert bench.engine.step() == []


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_equal_a_teacher_forced_forward(bench: Bench, temperature: float) -> None:
    requests = bench.fresh("f", PROMPTS, Sampling(temperature=temperature, max_tokens=14), samples=3)
    responses = bench.run(requests)
    assert set(responses) == {request.id for request in requests}
    for request in requests:
        response = responses[request.id]
        expected = forced(bench.model, request.prompt_ids, response.token_ids, temperature)
        assert response.logprobs == pytest.approx(expected, abs=TOLERANCE), request.id
        assert response.policy_versions == [bench.engine.version] * len(response.token_ids)
        stopped = response.token_ids[-1] == EOS
        assert response.truncated == (not stopped)
        assert EOS not in response.token_ids[:-1] and (stopped or len(response.token_ids) == 14)


def test_more_requests_than_slots_of_very_different_length(bench: Bench) -> None:
    # given 8 slots and 30 requests that end after 1 to 30 tokens
    requests = [Request(f"long{n}", PROMPTS[n % 6], Sampling(max_tokens=n), 5) for n in range(1, 31)]
    for response in bench.run(requests).values():
        prompt = next(request.prompt_ids for request in requests if request.id == response.id)
        expected = forced(bench.model, prompt, response.token_ids)
        assert response.logprobs == pytest.approx(expected, abs=TOLERANCE), response.id


def test_seed_and_id_decide_the_tokens(bench: Bench) -> None:
    sampling = Sampling(temperature=2.0, max_tokens=20)

    def tokens(sample_id: str, seed: int) -> list[int]:
        return bench.run([Request(sample_id, [2, 3], sampling, seed)])[sample_id].token_ids

    first = tokens("seeded", 1)
    assert tokens("seeded", 1) == first
    assert tokens("seeded", 2) != first
    assert tokens("another", 1) != first


def test_stop_ids_and_stop_texts_end_their_own_request(bench: Bench) -> None:
    # given what a request generates, and the first of its tokens that is plain text
    sampling = Sampling(temperature=1.0, max_tokens=40)
    whole = bench.run([Request("whole", [1], sampling, 4)])["whole"].token_ids
    place, pair = next(
        (i, pair) for i, pair in enumerate(pairwise(whole)) if i > 2 and bench.decode(list(pair)).isascii()
    )
    text = bench.decode(list(pair))
    cut = 1 + next(i for i in range(1, len(whole)) if text in bench.decode(whole[: i + 1]))
    assert cut <= place + 2
    # when the same request has a stop text of two tokens, or a stop id, beside one that has none
    by_text = Sampling(temperature=1.0, max_tokens=40, stop=("no such text", text))
    stopped = bench.run([Request("whole", [1], by_text, 4), Request("free", [1], sampling, 9)])["whole"]
    assert (stopped.token_ids, stopped.truncated) == (whole[:cut], False)
    by_id = Sampling(temperature=1.0, max_tokens=40, stop_ids=(whole[4],))
    stopped = bench.run([Request("whole", [1], by_id, 4)])["whole"]
    assert (stopped.token_ids, stopped.truncated) == (whole[: whole.index(whole[4]) + 1], False)


def test_abort_gives_what_is_there_and_spares_the_others(bench: Bench) -> None:
    # given eight requests in slots and two that wait
    requests = bench.fresh("a", [[index + 1] for index in range(10)], Sampling(max_tokens=60, temperature=0.3))
    bench.engine.submit(requests)
    assert bench.engine.pending == 10
    finished = [one for _ in range(4) for one in bench.engine.step()]
    over = {one.id for one in finished}
    # when one that runs and one that waits are taken out
    victims = [*[r.id for r in requests if r.id not in over][:1], requests[9].id]
    partial = {one.id: one for one in bench.engine.abort([*victims, "unknown"])}
    # then they come back truncated, with a log-prob per token, and all others end as if nothing had been
    assert set(partial) == set(victims)
    assert bench.engine.pending == 10 - len(over) - 2
    for one in partial.values():
        assert one.truncated and len(one.logprobs) == len(one.token_ids) == len(one.policy_versions)
    rest = bench.finish(finished)
    assert set(rest) == {r.id for r in requests} - set(victims)
    for request in requests:
        response = {**rest, **partial}[request.id]
        expected = forced(bench.model, request.prompt_ids, response.token_ids, 0.3)
        assert response.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_new_weights_are_those_of_a_fresh_engine_though_caches_are_warm(bench: Bench) -> None:
    # given prompts whose beginnings the engine has just computed with the old weights, one of them longer than two
    # blocks of vLLM's prefix cache
    long = [40 + i % 150 for i in range(290)]
    requests = bench.fresh("w", [*PROMPTS, long], Sampling(temperature=0.0, max_tokens=12))
    before = bench.run(requests)
    model = bench.sync(seed=17 + bench.tied)
    # when the same prompts come again
    after = bench.run(requests)
    # then every log-prob is the new model's, and greedy tokens are what it says itself
    for request in requests:
        response = after[request.id]
        expected = forced(model, request.prompt_ids, response.token_ids)
        assert response.logprobs == pytest.approx(expected, abs=TOLERANCE), request.id
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*request.prompt_ids, *response.token_ids]])).logits[0]
        assert response.token_ids == logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist()
        assert set(response.policy_versions) == {bench.version}
    assert {i: r.token_ids for i, r in before.items()} != {i: r.token_ids for i, r in after.items()}


def test_responses_on_their_way_go_on_with_new_weights_and_say_so(bench: Bench) -> None:
    old = bench.model
    requests = bench.fresh("h", PROMPTS, Sampling(max_tokens=24))
    bench.engine.submit(requests)
    finished = [one for _ in range(4) for one in bench.engine.step()]
    before = bench.version
    new = bench.sync(seed=23)
    responses = bench.finish(finished)
    prompts = {request.id: request.prompt_ids for request in requests}
    assert (
        {bench.version} < {v for one in responses.values() for v in one.policy_versions} <= {before, bench.version}
    )
    for response in responses.values():
        prompt, versions = prompts[response.id], response.policy_versions
        by_old = forced(old, prompt, response.token_ids)
        by_new = forced(new, prompt, response.token_ids)
        expected = [o if v == before else n for o, n, v in zip(by_old, by_new, versions, strict=True)]
        assert versions == sorted(versions)
        assert response.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_old_weights_serve_until_the_commit_and_after_a_load_that_was_abandoned(bench: Bench) -> None:
    requests = bench.fresh("o", PROMPTS[:2], Sampling(temperature=0.0, max_tokens=6))
    before = bench.run(requests)
    bench.engine.begin_load(bench.engine.layout(), 99)
    first = next(iter(build_model(seed=4, tied=bench.tied).state_dict().items()))
    bench.engine.load(*first)
    assert (bench.engine.state, bench.engine.version) == ("loading", bench.version)
    with pytest.raises(IntegrityError, match="weight commit"):
        bench.engine.commit()
    bench.engine.abandon()
    assert (bench.engine.state, bench.engine.version) == ("serving", bench.version)
    after = bench.run(requests)
    assert {i: r.token_ids for i, r in after.items()} == {i: r.token_ids for i, r in before.items()}
    with pytest.raises(IntegrityError, match="begin_load"):
        bench.engine.load(*first)


@pytest.mark.parametrize("change", ["shape", "missing", "extra"])
def test_weights_of_another_model_are_refused(bench: Bench, change: str) -> None:
    first, *others = bench.engine.layout().tensors
    other = {
        "shape": (TensorSpec(first.name, (3, 3), first.dtype), *others),
        "missing": tuple(others),
        "extra": (first, *others, TensorSpec("extra.weight", (1,), "F32")),
    }[change]
    with pytest.raises(IntegrityError, match="extra.weight" if change == "extra" else first.name):
        bench.engine.begin_load(WeightManifest(other), 100)
    assert bench.engine.state == "serving"


def test_requests_that_cannot_be_are_refused(bench: Bench) -> None:
    beyond = Request("long", [1] * (CONTEXT_TOKENS - 4), Sampling(max_tokens=5), 0)
    with pytest.raises(UsageError, match="sample long"):
        bench.engine.submit([beyond])
    with pytest.raises(UsageError, match=r"sample nothing: .* at least one of each"):
        bench.engine.submit([Request("nothing", [], Sampling(max_tokens=4), 0)])
    twin = Request("twin", [1], Sampling(max_tokens=2), 0)
    bench.engine.submit([twin])
    with pytest.raises(IntegrityError, match="sample twin"):
        bench.engine.submit([twin])
    bench.engine.abort(["twin"])
    assert bench.engine.pending == 0
    assert len(bench.run([Request("fits", [1] * (CONTEXT_TOKENS - 4), Sampling(max_tokens=4), 0)])) == 1


def test_memory_that_was_given_back_is_taken_again(bench: Bench) -> None:
    requests = bench.fresh("m", PROMPTS[:3], Sampling(temperature=0.0, max_tokens=8))
    before = bench.run(requests)
    bench.engine.release_memory()
    bench.engine.acquire_memory()
    after = bench.run(requests)
    assert {i: r.token_ids for i, r in after.items()} == {i: r.token_ids for i, r in before.items()}
