"""Every prompt once per pass, in an order that depends on nothing but the recipe."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmq.producers.prompt_order import MixedOrder, PromptOrder

ORDERS = st.builds(
    PromptOrder,
    count=st.integers(1, 40),
    per_step=st.integers(1, 50),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
    passes=st.integers(1, 4),
)


@given(ORDERS)
def test_passes_end_after_every_prompt_was_used_once_per_pass(order: PromptOrder) -> None:
    total = order.total_steps()
    assert total is not None and order.passes is not None
    steps = [order.step_prompts(step) for step in range(1, total + 1)]
    used = [prompt for step in steps for prompt in step]
    for first in range(0, len(used), order.count):
        assert sorted(used[first : first + order.count]) == list(range(order.count))
    assert len(used) == order.count * order.passes
    assert all(len(step) == order.per_step for step in steps[:-1]) and steps[-1]
    assert order.step_prompts(total + 1) == []


def test_a_short_batch_is_filled_from_the_next_pass() -> None:
    """12 prompts, 5 per step, 10 steps: 50 prompts are 4 passes and 2 more."""
    order = PromptOrder(count=12, per_step=5, seed=7)
    steps = [order.step_prompts(step) for step in range(1, 11)]
    assert order.total_steps() is None
    assert [len(step) for step in steps] == [5] * 10
    used = [prompt for step in steps for prompt in step]
    assert all(sorted(used[n : n + 12]) == list(range(12)) for n in (0, 12, 24, 36))


def test_one_pass_ends_with_a_short_batch() -> None:
    order = PromptOrder(count=12, per_step=5, seed=7, passes=1)
    assert [len(order.step_prompts(step)) for step in range(1, 5)] == [5, 5, 2, 0]
    assert order.total_steps() == 3


def test_a_step_greater_than_the_data_spans_passes() -> None:
    """12 prompts, 32 per step: each step has every prompt 2 or 3 times."""
    order = PromptOrder(count=12, per_step=32, seed=7)
    assert set(Counter(order.step_prompts(1)).values()) == {2, 3}
    assert set(Counter(order.step_prompts(1) + order.step_prompts(2)).values()) == {5, 6}


def test_passes_differ_in_order_and_seeds_differ() -> None:
    order = PromptOrder(count=50, per_step=50, seed=7)
    other = PromptOrder(count=50, per_step=50, seed=8)
    assert order.step_prompts(1) != order.step_prompts(2)
    assert order.step_prompts(1) != other.step_prompts(1)


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    order = PromptOrder(count=5, per_step=3, seed=7, shuffle=False)
    assert [order.step_prompts(step) for step in (1, 2, 3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    """Runs are resumed elsewhere: this list may change with a release note only."""
    assert PromptOrder(count=8, per_step=8, seed=7).step_prompts(1) == FROZEN


FROZEN = [5, 1, 2, 6, 0, 3, 4, 7]


@pytest.mark.parametrize("position", [1, 7, 30])
def test_a_step_does_not_depend_on_the_steps_asked_before(position: int) -> None:
    order = PromptOrder(count=9, per_step=4, seed=1)
    alone = order.step_prompts(position)
    for step in range(1, 40):
        order.step_prompts(step)
    assert PromptOrder(count=9, per_step=4, seed=1).step_prompts(position) == alone


WEIGHTS = st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]), min_size=1).filter(
    lambda weights: sum(weights.values()) > 0
)


def mixed(first: dict[str, float], then: dict[str, float], at: int) -> MixedOrder:
    """Sets of 3, 7 and 40 prompts."""
    sets = {name: PromptOrder(count, 8, 0) for name, count in (("a", 3), ("b", 7), ("c", 40))}
    return MixedOrder(sets, [(0, first), (at, then)])


def set_of(index: int) -> str:
    return "a" if index < 3 else "b" if index < 10 else "c"


@given(WEIGHTS, WEIGHTS, st.integers(1, 60))
def test_sets_are_taken_as_often_as_their_weights_say_at_each_time(
    first: dict[str, float], then: dict[str, float], at: int
) -> None:
    order = mixed(first, then, at)

    for start, count, weights in ((0, at, first), (at, 100, then)):
        found = Counter(set_of(index) for index in order.prompts_at(start, count))
        for name in "abc":
            wanted = count * weights.get(name, 0.0) / sum(weights.values())
            assert abs(found[name] - wanted) <= 3
            assert weights.get(name, 0.0) > 0 or found[name] == 0


@given(WEIGHTS, WEIGHTS, st.integers(1, 60))
def test_a_mixture_is_the_same_from_wherever_it_is_asked(
    first: dict[str, float], then: dict[str, float], at: int
) -> None:
    whole = mixed(first, then, at).prompts_at(0, 90)

    parts = mixed(first, then, at)
    assert parts.prompts_at(60, 30) + parts.prompts_at(0, 60) == whole[60:] + whole[:60]


def test_each_set_of_a_mixture_has_its_own_passes() -> None:
    taken = Counter(mixed({"a": 3.0, "b": 7.0}, {"a": 3.0, "b": 7.0}, 1).prompts_at(0, 20))

    assert taken == dict.fromkeys(range(10), 2)
