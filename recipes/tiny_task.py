"""The task of tiny.yaml: write lower-case letters. A random model begins at about one letter in ten."""

from __future__ import annotations

from typing import Any

_THINGS = ("bird", "boat", "book", "bread", "cloud", "door", "fish", "fox", "gate", "hill", "lamp", "leaf")
_HELD_OUT_THINGS = ("moon", "road", "tree", "wind")


def train() -> list[dict[str, Any]]:
    """24 plain-text prompts."""
    return _rows(_THINGS)


def held_out() -> list[dict[str, Any]]:
    """8 prompts about other things."""
    return _rows(_HELD_OUT_THINGS)


def letters(completions: list[str], **_: Any) -> list[float]:
    """The share of the response's characters that are lower-case letters; 0 for an empty response."""
    return [sum("a" <= c <= "z" for c in text) / max(1, len(text)) for text in completions]


def early_letters(completions: list[str], **_: Any) -> list[float]:
    """The share of characters from a to m: as a cost, it conflicts with `letters`."""
    return [sum("a" <= c <= "m" for c in text) / max(1, len(text)) for text in completions]


def _rows(things: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"prompt": f"{verb} a {thing}: "} for thing in things for verb in ("Name", "Paint")]
