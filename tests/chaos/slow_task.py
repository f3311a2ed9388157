"""The reward of `recipes/tiny_task.py`, at the pace of a reward that has something to do."""

from __future__ import annotations

import time
from typing import Any


def letters(completions: list[str], **_: Any) -> list[float]:
    """The share of lower-case letters, after a quarter of a second."""
    time.sleep(0.25)
    return [sum("a" <= c <= "z" for c in text) / max(1, len(text)) for text in completions]


def safe(rows: Any) -> list[bool]:
    """A node's verdict, after a quarter of a second: one response in five is not kept."""
    time.sleep(0.25)
    return [len(row.response_text) % 5 > 0 for row in rows]
