"""No key twice; anchors and merges are no repetition."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlmq.common.errors import UsageError
from rlmq.common.recipe.schema import Recipe

Read = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("{base}evaluate: {{samples: 1, every_steps: 2, samples: 1}}\n", "samples", (6, 6)),
        ("{base}rollout:\n  top_k: 1\nrollout:\n  top_k: 2\n", "rollout", (6, 8)),
        ("{base}'rollout': {{top_k: 1}}\nrollout: {{top_k: 2}}\n", "rollout", (6, 7)),
        ("{base}x-a:\n  b: 1\n  c:\n    - {{d: 1,\n       d: 2}}\n", "d", (9, 10)),
        ("{base}x-a: &a {{top_k: 1}}\nrollout:\n  <<: *a\n  <<: *a\n", "<<", (8, 9)),
    ],
)
def test_a_key_twice_is_refused_with_both_lines(
    read: Read, base: str, text: str, key: str, lines: tuple[int, int]
) -> None:
    with pytest.raises(UsageError) as caught:
        read(text.format(base=base))
    assert f"the key {key!r} twice, on line {lines[0]} and line {lines[1]}" in str(caught.value)


def test_a_key_twice_is_refused_inside_an_override(read: Read) -> None:
    with pytest.raises(UsageError, match="the key 'samples' twice"):
        read(None, "evaluate={samples: 1, samples: 2}")


def test_a_merge_gives_way_to_the_key_beside_it(read: Read, base: str) -> None:
    recipe = read(
        "x-common: &c {top_k: 4, temperature: 1.0}\n" + base + "rollout: {<<: *c, temperature: 0.7}\n"
        "evaluate: {every_steps: &n 5}\ncheckpoint: {every_steps: *n}\n"
    )
    assert (recipe.rollout.top_k, recipe.rollout.temperature) == (4, 0.7)
    assert recipe.checkpoint.every_steps == 5


def test_of_merged_blocks_the_first_wins(read: Read, base: str) -> None:
    recipe = read(
        "x-a: &a {top_k: 1, top_p: 0.5}\nx-b: &b {top_k: 2, temperature: 0.3}\n"
        + base
        + "rollout:\n  <<: [*a, *b]\n"
    )
    assert (recipe.rollout.top_k, recipe.rollout.top_p, recipe.rollout.temperature) == (1, 0.5, 0.3)


def test_one_block_merged_in_two_places_is_no_repetition(read: Read, base: str) -> None:
    recipe = read(base + "placement:\n  actor: &p {threads: 2}\n  rollout: *p\n  reward: {<<: *p, workers: 3}\n")
    assert (recipe.placement.rollout.threads, recipe.placement.reward.workers) == (2, 3)


def test_a_merge_of_something_else_is_refused(read: Read, base: str) -> None:
    with pytest.raises(UsageError, match="<< with something that is no block"):
        read(base + "rollout: {<<: 3}\n")


def test_of_repeated_overrides_the_last_wins(read: Read) -> None:
    assert read(None, "train.steps=2", "train.steps=5").train.steps == 5


@pytest.mark.parametrize(
    "text",
    ["x-a: &a [*a]\n", "x-a: &a {b: *a}\n", "x-0: &x0 [1]\n" + "".join(
        f"x-{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 10))],
    ids=["list in itself", "block in itself", "billion laughs"],
)  # fmt: skip
def test_endless_aliases_are_refused(read: Read, base: str, text: str) -> None:
    with pytest.raises(UsageError, match="without end"):
        read(text + base)
