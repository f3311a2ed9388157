"""The micro-batch plan and the rectangles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmq.common.engines.micro_batches import build_micro_batch, padded_tokens, plan_micro_batches
from rlmq.common.errors import UsageError

lengths_of_rows = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=40)


@given(lengths_of_rows, st.integers(1, 300), st.integers(1, 7))
def test_every_row_is_in_exactly_one_micro_batch(lengths, budget, world) -> None:  # type: ignore[no-untyped-def]
    plan = plan_micro_batches(lengths, budget, world)

    assert len(plan) == world
    assert sorted(row for share in plan for micro in share for row in micro) == list(range(len(lengths)))


@given(lengths_of_rows, st.integers(1, 300), st.integers(1, 7))
def test_padding_counts_and_only_single_rows_exceed_the_budget(lengths, budget, world) -> None:  # type: ignore[no-untyped-def]
    for share in plan_micro_batches(lengths, budget, world):
        for micro in share:
            assert micro
            assert padded_tokens(lengths, micro) <= budget or len(micro) == 1


@given(lengths_of_rows, st.integers(1, 7))
def test_ranks_differ_by_at_most_one_longest_row(lengths, world) -> None:  # type: ignore[no-untyped-def]
    plan = plan_micro_batches(lengths, 200, world)

    loads = [sum(sum(lengths[row]) for micro in share for row in micro) for share in plan]

    assert max(loads) - min(loads) <= max((sum(pair) for pair in lengths), default=0)


@given(lengths_of_rows, st.integers(1, 300), st.integers(1, 7))
def test_the_plan_is_a_function_of_its_arguments(lengths, budget, world) -> None:  # type: ignore[no-untyped-def]
    assert plan_micro_batches(list(lengths), budget, world) == plan_micro_batches(tuple(lengths), budget, world)


@pytest.mark.parametrize(("budget", "world"), [(0, 1), (16, 0)])
def test_a_plan_for_nobody_is_refused(budget: int, world: int) -> None:
    with pytest.raises(UsageError, match="micro-batch plan"):
        plan_micro_batches([(1, 1)], budget, world)


def test_prompts_end_and_responses_begin_at_the_same_place() -> None:
    batch = build_micro_batch([[5, 6, 7], [8]], [[1], [2, 3]], columns={"advantages": [[0.5], [1, 2]]}, pad_id=9)

    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 9], [9, 9, 8, 2, 3]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert batch.position_ids.tolist()[0][:4] == [0, 1, 2, 3]
    assert batch.position_ids.tolist()[1][2:] == [0, 1, 2]
    assert batch.response_mask.tolist() == [[1, 0], [1, 1]]
    assert batch.columns["advantages"].tolist() == [[0.5, 0], [1, 2]]


def test_tokens_that_do_not_count_are_still_attended() -> None:
    batch = build_micro_batch([[5]], [[1, 2, 3]], [[True, False, True]])

    assert batch.response_mask.tolist() == [[1, 0, 1]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1]]


def test_a_pad_id_that_is_a_real_token_masks_nothing() -> None:
    batch = build_micro_batch([[9, 9], [9]], [[9], [9, 9]], pad_id=9)

    assert batch.attention_mask.tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]


def test_rows_without_responses_have_no_response_places() -> None:
    batch = build_micro_batch([[1, 2], [3]], [[], []])

    assert batch.response_length == 0
    assert batch.input_ids.shape == (2, 2)


@pytest.mark.parametrize(
    ("prompts", "masks", "columns"),
    [([[]], None, None), ([[1]], [[True]], None), ([[1]], None, {"advantages": [[0.0]]})],
)
def test_rows_that_do_not_fit_together_are_refused(prompts, masks, columns) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError):
        build_micro_batch(prompts, [[1, 2]], masks, columns)
