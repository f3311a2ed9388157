"""Responses of several turns: what is the policy's, what the environment's, and when they end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlmq.common.engines.generation import Generated, Request, Sampling
from rlmq.common.errors import UsageError
from rlmq.common.user_code import load_function
from rlmq.producers.episodes import Answers, Episode

pytestmark = pytest.mark.timeout(60)

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
ASKS = """
class Environment:
    def answer(self, text, fields):
        return {"ask": "ab", "more": "c", "stop": None, "wrong": 7}[text]
"""
WORDS = {1: "ask", 2: "more", 3: "stop", 4: "wrong", 5: "unknown"}


@pytest.fixture
def answers(tmp_path: Path) -> Callable[..., Answers]:
    """Answers of ASKS; a token is a word of WORDS, an answer has a token per letter."""
    (tmp_path / "env.py").write_text(ASKS)

    def make(spec: str | None = "env.py:Environment", most_turns: int = 4) -> Answers:
        return Answers(
            spec,
            tmp_path,
            most_turns=most_turns,
            encode=lambda text: [ord(letter) for letter in text],
            decode=lambda ids: WORDS[ids[-1]],
        )

    return make


def episode(budget: int = 10) -> Episode:
    return Episode(Request("s-00", [9, 9], Sampling(max_tokens=budget), seed=1), {"prompt": "p"})


def turn(one: Episode, *ids: int, truncated: bool = False) -> Generated:
    generated = Generated(one.next_request().id, list(ids), [-0.5] * len(ids), [3] * len(ids), truncated)
    one.add(generated)
    return generated


def test_turns_and_answers_become_one_response_of_which_only_the_turns_count(answers) -> None:
    # given a response whose first two turns are answered
    one, environment = episode(), answers()
    assert environment.goes_on(one, turn(one, 8, 1))
    assert environment.goes_on(one, turn(one, 2))
    # when its third is not
    assert not environment.goes_on(one, turn(one, 3))
    # then all tokens are there, in their order, and the mask is true for the policy's
    assert one.token_ids == [8, 1, ord("a"), ord("b"), 2, ord("c"), 3]
    assert one.own == [True, True, False, False, True, False, True]
    assert one.turns == [0, 0, 0, 0, 1, 1, 2]
    assert one.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5, 0.0, -0.5]
    assert one.policy_versions == [3] * 7
    assert not one.truncated


def test_the_next_turn_is_asked_for_with_all_tokens_and_what_is_left_of_the_budget(answers) -> None:
    one, environment = episode(budget=10), answers()
    first = one.next_request()
    environment.goes_on(one, turn(one, 8, 1))
    second = one.next_request()

    assert (first.id, first.sampling.max_tokens) == ("s-00", 10)
    assert (second.id, list(second.prompt_ids)) == ("s-00~1", [9, 9, 8, 1, ord("a"), ord("b")])
    assert second.sampling.max_tokens == 10 - 4


def test_an_answer_that_leaves_no_room_ends_the_response_as_truncated(answers) -> None:
    one = episode(budget=4)

    assert not answers().goes_on(one, turn(one, 8, 1))
    assert (one.truncated, one.token_ids) == (True, [8, 1])


def test_a_turn_that_the_limit_cut_is_not_answered(answers) -> None:
    one = episode()

    assert not answers().goes_on(one, turn(one, 8, 1, truncated=True))
    assert one.truncated


def test_the_number_of_turns_has_a_limit(answers) -> None:
    one, environment = episode(), answers(most_turns=2)

    assert environment.goes_on(one, turn(one, 1))
    assert not environment.goes_on(one, turn(one, 1))
    assert one.turns == [0, 0, 0, 1]


def test_without_an_environment_there_is_one_turn(answers) -> None:
    one = episode()

    assert not answers(None).goes_on(one, turn(one, 1))


@pytest.mark.parametrize(("token", "says"), [(4, "got int, expected text or None"), (5, "KeyError at ")])
def test_what_the_users_code_does_wrong_is_named(answers, token: int, says: str) -> None:
    one, environment = episode(), answers()

    with pytest.raises(UsageError) as error:
        environment.goes_on(one, turn(one, token))
    assert "rollout.environment, sample s-00" in str(error.value) and says in str(error.value)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("6*7", "42\n"), ("(1+2)/4", "0.75\n"), ("-3-4", "-7\n"), ("1/0", None), ("2**9", None), ("7", None)],
)
def test_the_calculator_knows_arithmetic_and_nothing_else(asked: str, answer: str | None) -> None:
    calculator = load_function("calculator.py:Calculator", RECIPES, subject="test")()

    assert calculator.answer("=", {"prompt": f"What is it? {asked}"}) == answer
    assert calculator.answer(" perhaps", {"prompt": asked}) is None


def test_a_turn_that_other_weights_come_into_keeps_its_tokens_and_its_budget(answers) -> None:
    # given a turn of which two tokens are there when it is taken from the engine
    one, environment = episode(budget=10), answers()
    first = one.next_request()
    one.add_part(Generated(first.id, [8, 7], [-0.1, -0.2], [3, 3], truncated=False))
    # then its rest is asked for under another name, with the tokens and what is left of the budget
    rest = one.next_request()
    assert rest.prompt_ids == [9, 9, 8, 7]
    assert rest.sampling.max_tokens == 8
    assert rest.id != first.id
    # when nothing came before the next weights, then the same is asked for again
    one.add_part(Generated(rest.id, [], [], [], truncated=False))
    assert one.next_request() == rest
    # and it is one turn with two versions, after which the next one has a name of its own
    one.add(Generated(rest.id, [1], [-0.3], [4], truncated=False))
    assert environment.goes_on(one, Generated(rest.id, [1], [-0.3], [4], truncated=False))
    assert one.policy_versions[:3] == [3, 3, 4]
    assert one.turns[:3] == [0, 0, 0]
    assert one.next_request().id not in (first.id, rest.id)
