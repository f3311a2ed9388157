"""What changed between two recipes, and what a run may be continued with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlmq.common.recipe.diff import changes, harmless
from rlmq.common.recipe.schema import Recipe

Read = Callable[..., Recipe]


def verdicts(old: Recipe, new: Recipe) -> dict[str, bool]:
    return {change.path: harmless(change) for change in changes(old, new)}


def test_equal_recipes_have_no_changes(read: Read) -> None:
    assert changes(read(), read(None, "train.lr=1.0e-6")) == []


def test_a_change_shows_key_and_both_values(read: Read) -> None:
    (change,) = changes(read(None, "train.lr=1.0e-4"), read(None, "train.lr=5.0e-5"))
    assert str(change) == "train.lr: 0.0001 -> 5e-05"


@pytest.mark.parametrize(
    "override",
    [
        "train.lr=1e-3", "train.warmup_steps=2", "run.seed=8", "model=other", "data.train=u.jsonl",
        "data.prompts_per_step=2", "data.shuffle=false", "algorithm.kl_coef=0.1", "algorithm.clip=[0.2, 0.3]",
        "reward.0.weight=2", "reward.0.function=q.py:f", "reward.0.arguments={a: 1}", "rollout.temperature=0.5",
        "rollout.batch_size_per_device=8", "train.dtype=bfloat16", "deterministic=true", "redis.url=redis://other",
        "evaluate.temperature=1", "data.eval=e.jsonl",
    ],
)  # fmt: skip
def test_what_changes_the_result_is_not_harmless(read: Read, override: str) -> None:
    found = verdicts(read(), read(None, override))
    assert found and not any(found.values())


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=9", "data.passes=2", "checkpoint.every_steps=1", "checkpoint.keep=5", "deadlines.step_s=5",
        "track=[jsonl, wandb]", "placement.rollout.workers=2", "placement.reward.workers=2",
        "evaluate.every_steps=1", "run.folder=elsewhere", "train.lr_steps=4",
        "stages.reward.min_batch=8", "stages.reference.max_wait_s=2", "stages.reward.lease_s=5",
        "stages.reward.max_deliveries=1", "dataflow.min_batch_for_reward=8",
    ],
)  # fmt: skip
def test_what_leaves_the_trained_steps_alone_is_harmless(read: Read, override: str) -> None:
    for mode in ("deterministic=false", "deterministic=true"):
        found = verdicts(read(None, mode), read(None, mode, override))
        assert found and all(found.values())


@pytest.mark.parametrize(
    "override",
    [
        "placement.actor.workers=2",
        "placement.rollout.threads=1",
        "train.micro_batch_tokens=64",
        "train.activation_checkpointing=true",
        "reward.0.timeout_s=99",
    ],
)
def test_what_moves_the_last_bits_is_harmless_only_outside_deterministic_mode(read: Read, override: str) -> None:
    assert all(verdicts(read(), read(None, override)).values())
    exact = "deterministic=true"
    assert not any(verdicts(read(None, exact), read(None, exact, override)).values())


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [
        (["train.lr_schedule=cosine"], ["train.lr_schedule=cosine", "train.steps=6"], False),
        (
            ["train.lr_schedule=cosine", "train.lr_steps=6"],
            ["train.lr_schedule=cosine", "train.lr_steps=6", "train.steps=6"],
            True,
        ),
        (["train.lr_schedule=linear"], ["train.lr_schedule=linear", "train.lr_steps=3"], True),
        (["train.lr_schedule=linear", "train.lr_steps=5"], ["train.lr_schedule=linear", "train.lr_steps=6"], False),
    ],
)
def test_more_steps_are_harmless_unless_they_bend_the_schedule(
    read: Read, old: list[str], new: list[str], allowed: bool
) -> None:
    assert all(verdicts(read(None, *old), read(None, *new)).values()) is allowed


def test_an_added_reward_function_is_a_change(read: Read) -> None:
    found = verdicts(read(), read(None, "reward.1.function=q.py:f"))
    assert found["reward.1.function"] is False
