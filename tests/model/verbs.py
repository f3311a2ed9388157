"""What may happen, how often beside the rest, and with which arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORKERS = 3
Draw = Callable[[random.Random], Any]


def one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def between(least: int, most: int) -> Draw:
    return lambda rng: rng.randint(least, most)


WHO, INDEX, COIN = between(0, WORKERS - 1), between(0, 30), one_of(False, True)


@dataclass(frozen=True)
class Verb:
    """What may happen next, how often beside the others, and with which arguments."""

    action: Callable[..., None]
    weight: int
    when: Callable[[Any], bool]
    arguments: dict[str, Draw]


VERBS: list[Verb] = []


def verb(
    weight: int, when: Callable[[Any], bool] = lambda _: True, **arguments: Draw
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A verb of the machine."""

    def add(action: Callable[..., None]) -> Callable[..., None]:
        VERBS.append(Verb(action, weight, when, arguments))
        return action

    return add
