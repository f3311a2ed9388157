"""Numbers, words and times in YAML mean what they say, from the file and from the command line alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlmq.common.errors import UsageError
from rlmq.common.recipe.schema import Recipe

Read = Callable[..., Recipe]


def with_value(base: str, key: str, value: str) -> str:
    """The base recipe with one more value, written as YAML in its block."""
    block, name = key.split(".")
    lines = base.splitlines()
    for i, line in enumerate(lines):
        if line.startswith(f"{block}: {{"):
            kept = [part for part in line[len(block) + 3 : -1].split(", ") if not part.startswith(f"{name}:")]
            lines[i] = f"{block}: {{{', '.join([*kept, f'{name}: {value}'])}}}"
            return "\n".join(lines)
    return base + f"{block}: {{{name}: {value}}}\n"


GOOD = [
    ("train.lr", "1e-6", 1e-6),
    ("train.lr", "1E-6", 1e-6),
    ("train.lr", "1.e-6", 1e-6),
    ("train.lr", ".5", 0.5),
    ("train.lr", "+1e+2", 100.0),
    ("train.lr", "1", 1.0),
    ("train.lr", "0", 0.0),
    ("train.steps", "1e1", 10),
    ("train.steps", "10.0", 10),
    ("train.steps", "+10", 10),
    ("run.name", "on", "on"),
    ("run.name", "no", "no"),
    ("run.name", "true", "true"),
    ("run.name", "1234", "1234"),
    ("run.name", "010", "010"),
    ("run.name", "1e3", "1e3"),
    ("run.name", "1:30", "1:30"),
    ("run.name", "2026-11-29", "2026-11-29"),
    ("run.name", "0x1F", "0x1F"),
    ("run.name", '"quoted"', "quoted"),
    ("data.train", "2001.jsonl", "2001.jsonl"),
    ("data.passes", "null", None),
    ("data.passes", "~", None),
    ("redis.url", "null", None),
    ("data.shuffle", "false", False),
    ("data.shuffle", "True", True),
]
BAD = [
    ("run.seed", "010", "a whole number", "Write 10"),
    ("run.seed", "0x10", "a whole number", ""),
    ("run.seed", "-1", "greater than or equal to 0", ""),
    ("run.seed", "true", "a whole number", ""),
    ("train.steps", "1.5", "a whole number", ""),
    ("train.steps", "1_000", "a whole number", "Write 1000"),
    ("train.steps", '"3"', "a whole number", "Remove the quotes"),
    ("train.steps", "1e999", "a whole number", ""),
    ("train.steps", "1:30", "a whole number", ""),
    ("train.lr", "fast", "a number", ""),
    ("train.lr", ".nan", "a number", ""),
    ("train.lr", ".inf", "a number", ""),
    ("train.lr", "nan", "a number", ""),
    ("train.lr", "1e-6x", "a number", ""),
    ("train.lr", "null", "a number", ""),
    ("deadlines.step_s", "1:30", "a number", ""),
    ("data.shuffle", "on", "true or false", "Write true"),
    ("data.shuffle", "no", "true or false", "Write false"),
    ("data.shuffle", "1", "true or false", ""),
    ("data.shuffle", '"true"', "true or false", "Remove the quotes"),
    ("run.name", "null", "text", ""),
    ("train.dtype", "float23", "one of float32, bfloat16", "Did you mean 'float32'?"),
]


def value_of(recipe: Recipe, key: str) -> object:
    block, name = key.split(".")
    return getattr(getattr(recipe, block), name)


@pytest.mark.parametrize(("key", "text", "value"), GOOD)
def test_scalars_have_the_type_of_their_key(read: Read, base: str, key: str, text: str, value: object) -> None:
    for recipe in (read(with_value(base, key, text)), read(None, f"{key}={text}")):
        found = value_of(recipe, key)
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("key", "text", "expected", "remedy"), BAD)
def test_other_scalars_are_refused(read: Read, base: str, key: str, text: str, expected: str, remedy: str) -> None:
    for arguments in ((with_value(base, key, text),), (None, f"{key}={text}")):
        with pytest.raises(UsageError) as caught:
            read(*arguments)
        message = str(caught.value)
        assert key in message and expected in message and remedy in message


def test_time_limits_in_minutes_are_refused_in_list_items_too(read: Read) -> None:
    with pytest.raises(UsageError, match=r"reward\.0\.timeout_s .* got '1:30', expected a number"):
        read(None, "reward.0.timeout_s=1:30")


def test_free_arguments_are_read_as_yaml_1_2(read: Read, base: str) -> None:
    arguments = "{a: 1e-6, b: on, c: 010, d: 1:30, e: true, f: null, g: [1, 2.0, x], h: {i: '7'}, j: 2026-01-02}"
    recipe = read(base.replace('"r.py:score"', f'"r.py:score", arguments: {arguments}'))
    assert recipe.reward[0].arguments == {
        "a": 1e-6, "b": "on", "c": "010", "d": "1:30", "e": True, "f": None, "g": [1, 2.0, "x"], "h": {"i": "7"},
        "j": "2026-01-02",
    }  # fmt: skip


def test_lists_become_tuples_of_the_right_type(read: Read) -> None:
    recipe = read(None, "algorithm.clip=[0, 1e-1]", "track=[jsonl, wandb]")
    assert recipe.algorithm.clip == (0.0, 0.1) and type(recipe.algorithm.clip[0]) is float
    assert recipe.track == ("jsonl", "wandb")


def test_names_of_evaluation_sets_are_text(read: Read, base: str) -> None:
    recipe = read(base.replace("train: t.jsonl", "train: t.jsonl, eval: {on: a.jsonl, 1: b.jsonl}"))
    assert recipe.evaluation_sets == {"on": "a.jsonl", "1": "b.jsonl"}


@pytest.mark.parametrize(
    "tagged", ["!!python/object/apply:os.system [ls]", "!mine 3", "!!binary aGk=", "!!int '3'"]
)
def test_tags_are_refused(read: Read, base: str, tagged: str) -> None:
    with pytest.raises(UsageError, match="plain values without tags"):
        read(base + f"x-a: {tagged}\n")
