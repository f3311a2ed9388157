"""Answered rows for the tiny model: things are named in lower-case letters, and not in digits."""

from __future__ import annotations

import random
from typing import Any

_THINGS = ("bird", "boat", "book", "bread", "cloud", "door", "fish", "fox", "gate", "hill", "lamp", "leaf")
_VERBS = ("Name", "Paint")


def answered() -> list[dict[str, Any]]:
    """24 prompts and what to write after them."""
    return [{"prompt": f"{verb} a {thing}: ", "response": f"a {thing}"} for thing in _THINGS for verb in _VERBS]


def pairs() -> list[dict[str, Any]]:
    """24 prompts, each with a response in letters that is better than one in digits; half of them as chat."""
    found: list[dict[str, Any]] = []
    for number, row in enumerate(answered()):
        prompt = [{"role": "user", "content": row["prompt"]}] if number % 2 else row["prompt"]
        found.append({"prompt": prompt, "chosen": row["response"], "rejected": f"{number} {number * 7919}"})
    return found


def shuffled_answers() -> list[dict[str, Any]]:
    """480 rows, each with the answer to another prompt: what comes after which prompt cannot be learned."""
    draw = random.Random(0)
    return [{**row, "response": f"a {draw.choice(_THINGS)}"} for _ in range(20) for row in answered()]


def shuffled_pairs() -> list[dict[str, Any]]:
    """480 pairs, half of them the wrong way round: which one is better cannot be learned."""
    draw = random.Random(0)
    found: list[dict[str, Any]] = []
    for row in (row for _ in range(20) for row in pairs()):
        wrong = draw.random() < 0.5
        chosen, rejected = (row["rejected"], row["chosen"]) if wrong else (row["chosen"], row["rejected"])
        found.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return found
