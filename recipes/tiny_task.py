"""The task of tiny.yaml: write lower-case letters. A random model begins at about one letter in ten."""

from __future__ import annotations

import random
from typing import Any

_THINGS = ("bird", "boat", "book", "bread", "cloud", "door", "fish", "fox", "gate", "hill", "lamp", "leaf")
_HELD_OUT_THINGS = ("moon", "road", "tree", "wind")


def train() -> list[dict[str, Any]]:
    """24 plain-text prompts."""
    return _rows(_THINGS)


def held_out() -> list[dict[str, Any]]:
    """8 prompts about other things."""
    return _rows(_HELD_OUT_THINGS)


def digits() -> list[dict[str, Any]]:
    """12 prompts that ask for something else: see `asked`."""
    return [{"prompt": f"Count a {thing}: ", "asks": "digits"} for thing in _THINGS]


def asked(completions: list[str], asks: list[str] | None = None, **_: Any) -> list[float]:
    """The share of what the row asks for: digits where it says so, else lower-case letters."""
    kinds = [kind or "letters" for kind in asks or [""] * len(completions)]
    shares = letters(completions)
    numbers = [sum(c.isdecimal() for c in text) / max(1, len(text)) for text in completions]
    return [
        number if kind == "digits" else share for kind, share, number in zip(kinds, shares, numbers, strict=True)
    ]


def letters(completions: list[str], **_: Any) -> list[float]:
    """The share of the response's characters that are lower-case letters; 0 for an empty response."""
    return [sum("a" <= c <= "z" for c in text) / max(1, len(text)) for text in completions]


def early_letters(completions: list[str], **_: Any) -> list[float]:
    """The share of characters from a to m: as a cost, it conflicts with `letters`."""
    return [sum("a" <= c <= "m" for c in text) / max(1, len(text)) for text in completions]


def liked(completions: list[str], **_: Any) -> list[float]:
    """1 - (1 - share of letters)^2: the first letters are liked best, and each is still liked."""
    return [1.0 - (1.0 - share) ** 2 for share in letters(completions)]


def shuffled(completions: list[str], **_: Any) -> list[float]:
    """`letters` of other responses: there is nothing to learn, and the mean is the right one."""
    return _shuffled(letters(completions), completions)


def shuffled_liked(completions: list[str], **_: Any) -> list[float]:
    """`liked` of other responses."""
    return _shuffled(liked(completions), completions[::-1])


def _shuffled(scores: list[float], completions: list[str]) -> list[float]:
    random.Random("\n".join(completions)).shuffle(scores)
    return scores


def _rows(things: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"prompt": f"{verb} a {thing}: "} for thing in things for verb in ("Name", "Paint")]
