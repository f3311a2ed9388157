"""Keys that go by two names, and the blocks of the stages that they lead to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.recipe.schema import Recipe
from rlmq.common.recipe.stage_block import StageBlock

Read = Callable[..., Recipe]
ALIAS = "dataflow: {min_batch_for_reward: 32}\n"


def refusal(read: Read, text: str | None, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        read(text, *overrides)
    return str(caught.value)


def test_without_a_block_a_stage_hands_out_what_is_ready(read: Read) -> None:
    for stage in (read().stages.reward, read().stages.reference):
        assert stage == StageBlock(min_batch=1, max_wait_s=None, lease_s=60.0, max_deliveries=3)


@pytest.mark.parametrize("more", ["", "stages:\n", "stages: {reward: {lease_s: 5}}\n", "stages: {reference: {}}\n"])
def test_the_alias_is_the_canonical_key(read: Read, base: str, more: str) -> None:
    recipe = read(base + ALIAS + more)
    canonical = read(base + more, "stages.reward.min_batch=32")
    assert recipe == canonical
    assert recipe.stages.reward.min_batch == 32
    assert recipe.stages.reference.min_batch == 1
    assert recipe_hash(recipe) == recipe_hash(canonical)


def test_the_alias_works_as_an_override_and_replaces_the_files_own(read: Read, base: str) -> None:
    assert read(base, "dataflow.min_batch_for_reward=8").stages.reward.min_batch == 8
    assert read(base + ALIAS, "dataflow.min_batch_for_reward=8").stages.reward.min_batch == 8


def test_both_names_at_once_are_refused_with_both_places(read: Read, base: str) -> None:
    message = refusal(read, base + ALIAS + "stages: {reward: {min_batch: 32}}\n")
    assert "dataflow.min_batch_for_reward (line 6)" in message
    assert "stages.reward.min_batch (line 7)" in message
    message = refusal(read, base + ALIAS, "stages.reward.min_batch=32")
    assert "override 'stages.reward.min_batch=32'" in message


def test_a_problem_of_the_alias_names_the_line_that_it_stands_on(read: Read, base: str) -> None:
    message = refusal(read, base + "dataflow: {min_batch_for_reward: many}\n")
    assert "stages.reward.min_batch" in message
    assert "line 6" in message
    assert "'many'" in message


@pytest.mark.parametrize(
    "text", ["dataflow: {min_batch_for_reward: 32, nodes: 3}\n", "dataflow: 3\n", "dataflow: {}\n"]
)
def test_there_is_nothing_else_in_that_block(read: Read, base: str, text: str) -> None:
    message = refusal(read, base + text)
    assert message.startswith("dataflow (")
    assert "an unknown key" in message


@pytest.mark.parametrize("text", ["stages: 5\n", "stages: {reward: 5}\n"])
def test_a_value_where_the_alias_needs_a_block_is_refused(read: Read, base: str, text: str) -> None:
    assert "below the value '5'" in refusal(read, base + text + ALIAS)


@pytest.mark.parametrize(
    "override",
    [
        "stages.reward.min_batch=0",
        "stages.reward.max_wait_s=0",
        "stages.reward.lease_s=0",
        "stages.reward.max_deliveries=0",
        "stages.reward.max_deliveries=41",  # the functions keep deliveries in one character
        "stages.actor.min_batch=2",
        "stages.reward.batch=2",
    ],
)
def test_what_a_stage_cannot_do_is_refused(read: Read, override: str) -> None:
    assert override.split("=")[0].split(".")[-1] in refusal(read, None, override)
