"""One message with every problem: place, found, expected, what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import Recipe

Read = Callable[..., Recipe]


def refusal(read: Read, text: str | None = None, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        read(text, *overrides)
    return str(caught.value)


def test_every_problem_is_named_at_once(read: Read) -> None:
    message = refusal(
        read,
        """\
run: {name: b, sed: 7}
model: ./m
data: {train: t.jsonl, max_prompt_tokens: 0}
reward:
  - {weight: heavy}
train: {lr: fast}
evaluate: {samples: 4}
""",
    )
    for part in (
        "has 6 problems",
        "run.sed (line 1): got an unknown key, expected one of name, seed, folder. Did you mean run.seed?",
        "data.max_prompt_tokens (line 3): got 0, expected greater than 0 (Longest prompt",
        "reward.0.weight (line 5): got 'heavy', expected a number (Weight in the sum)",
        "train.lr (line 6): got 'fast', expected a number (Peak learning rate",
        "train.steps (line 6): got nothing, expected a whole number",
        "evaluate (line 7)",
    ):
        assert part in message


def test_one_problem_is_one_line_that_names_file_and_line(read: Read, base: str) -> None:
    message = refusal(read, base + "\nrollout:\n  temperature: 0\n")
    assert message.startswith("rollout.temperature (") and "b.yaml line 8)" in message and "\n" not in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.learning_rate=1", None),
        ("train.step=1", "train.steps"),
        ("data.max_response_tokens=5", "rollout.max_response_tokens"),
        ("rollout.group_size=5", "algorithm.group_size"),
        ("rollout.prompts_per_step=5", "data.prompts_per_step"),
        ("evaluate.every=5", "evaluate.every_steps"),
        ("trian.steps=5", "train"),
        ("reward.0.timeout=5", "reward.0.timeout_s"),
        ("placement.actor.worker=5", "placement.actor.workers"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(read: Read, key: str, meant: str | None) -> None:
    message = refusal(read, None, key)
    assert key.split("=")[0].split(".")[-1] in message and "an unknown key" in message
    if meant:
        assert f"Did you mean {meant}?" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train: [1\n", "line 2"),
        ("\ttrain: 1\n", "line 1"),
        ("- a\n- b\n", "a recipe"),
        ("just text\n", "a recipe"),
        ("a: 1\n---\nb: 2\n", "line"),
        ("[1, 2]: 3\n", "a key that is no text"),
        ("x-a: " + "[" * 3000, "nested without end"),
        ("", "problems"),
    ],
)
def test_what_is_no_recipe_is_refused(read: Read, text: str, part: str) -> None:
    assert part in refusal(read, text)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "big.yaml").write_text("#" * (2 << 20))
    for name, part in (
        ("dmo.yaml", "Did you mean 'demo.yaml'?"),
        (".", "a folder"),
        ("demo.yaml", "no UTF-8"),
        ("big.yaml", "at most"),
    ):
        with pytest.raises(UsageError) as caught:
            load_recipe(tmp_path / name)
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.steps", "no key=value"),
        ("=3", "no key=value"),
        ("train..steps=3", "no key=value"),
        ("train.steps.more=3", "below the value"),
        ("reward.2.weight=3", "an index from 0 to 1"),
        ("reward.first.weight=3", "an index from 0 to 1"),
        ("algorithm.clip=[1", "override"),
        ("train=5", "a block"),
        ("reward=x", "a list"),
        ("algorithm.clip=0.2", "a list of 2"),
        ("algorithm.clip=[0.2]", "a list of 2"),
        ("reward=[]", "at least 1 item"),
        ("data.eval={}", "at least one set"),
        ("data.eval={a: 1, b: [x]}", "data.eval.b"),
        ("data.eval=[x]", "text"),
        ("run.name=a/b", "without '/'"),
        ("rollout.truncated=penalise", "truncation_penalty"),
        ("rollout.temperature=0", "greedy is refused"),
        ("rollout.temperature=1e-8", "greedy is refused"),
        ("rollout.temperature=nan", "a number"),
        ("evaluate.samples=4", "greedy samples are all equal"),
    ],
)
def test_bad_overrides_are_refused_by_name(read: Read, override: str, part: str) -> None:
    message = refusal(read, None, override)
    assert part in message and override in message


def test_overrides_make_blocks_and_append_to_lists(read: Read) -> None:
    recipe = read(
        None,
        "placement.rollout.workers=2",
        "reward.1.function=q.py:f",
        "reward.0.weight=2",
        "data.eval.a=#1: x.jsonl",
    )
    assert recipe.placement.rollout.workers == 2
    assert [block.weight for block in recipe.reward] == [2.0, 1.0]
    assert recipe.data.eval == {"a": "#1: x.jsonl"}


def test_overrides_leave_shared_blocks_alone(read: Read, base: str) -> None:
    text = base + "placement:\n  actor: &p {threads: 2}\n  rollout: *p\n"
    recipe = read(text, "placement.actor.threads=4")
    assert (recipe.placement.actor.threads, recipe.placement.rollout.threads) == (4, 2)


@pytest.mark.parametrize(
    ("algorithm", "more", "told"),
    [
        ("{name: reward_model}", "", "trains a policy, not reward_model"),
        ("{name: ppo}", "", "without a critic for old"),
        ("{name: safe_rlhf}", "", "without a critic for old"),
        ("{name: sft, loop: 'l.py:loop'}", "", "no loop and no kl_target"),
        ("{name: grpo, kl_coef: 0.1, kl_target: 0.1}", "", "no loop and no kl_target"),
        ("{name: grpo}", ", min_reward: 0.5", "no min_reward"),
        ("{name: grpo, beta: 0.5}", "", "not beta"),
    ],
)
def test_a_loss_that_cannot_be_mixed_in_is_refused_by_name(
    read: Read, base: str, algorithm: str, more: str, told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read(base + f"losses: [{{name: old, data: d.jsonl, algorithm: {algorithm}{more}}}]\n")
    assert told in str(caught.value)
