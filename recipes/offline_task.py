"""Answered rows for the tiny model: things are named in lower-case letters, and not in digits."""

from __future__ import annotations

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
