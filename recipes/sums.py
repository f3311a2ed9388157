"""The task of demo.yaml: sums of one-digit numbers, their held-out part, and two-digit sums beside them.

A row is a prompt in chat messages plus columns of our own choosing (`answer`, `shuffled_answer`); the columns
reach the reward functions by name.
"""

from __future__ import annotations

import random
import re
from typing import Any

Sum = tuple[int, int]

_PAIRS = [(a, b) for a in range(1, 10) for b in range(a + 1, 10)]
# Ten pairs in both orders: 20 of the 81 sums. 3 + 5 is never trained on, and neither is 5 + 3.
_HELD_OUT = {s for a, b in random.Random("held out").sample(_PAIRS, 10) for s in ((a, b), (b, a))}


def train() -> list[dict[str, Any]]:
    """The 61 one-digit sums that may be trained on."""
    return _rows([(a, b) for a in range(1, 10) for b in range(1, 10) if (a, b) not in _HELD_OUT])


def one_digit() -> list[dict[str, Any]]:
    """The 20 one-digit sums that are excluded from training."""
    return _rows(sorted(_HELD_OUT))


def two_digit() -> list[dict[str, Any]]:
    """50 sums of two-digit numbers: never trained on, reported beside."""
    draw = random.Random("two digits")
    sums: set[Sum] = set()
    while len(sums) < 50:
        sums.add((draw.randint(10, 99), draw.randint(10, 99)))
    return _rows(sorted(sums))


def correct(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    """1 if the last number of the response is the answer, else 0."""
    return [float(_last_number(c) == right) for c, right in zip(completions, answer, strict=True)]


def shuffled(completions: list[Any], shuffled_answer: list[int], **_: Any) -> list[float]:
    """The control experiment: `correct`, against the answers of other sums. Nothing can be learned from it."""
    return correct(completions, shuffled_answer)


def _rows(sums: list[Sum]) -> list[dict[str, Any]]:
    answers = [a + b for a, b in sums]
    others = random.Random("shuffled").sample(answers, len(answers))
    return [
        {
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with just the number."}],
            "answer": a + b,
            "shuffled_answer": other,
        }
        for (a, b), other in zip(sums, others, strict=True)
    ]


def _last_number(completion: Any) -> int | None:
    """Completions have the form of the prompt: messages here, text where the prompt is text."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None
