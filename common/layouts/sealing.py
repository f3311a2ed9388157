"""The trailer of a message: its number and a checksum of its words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]

TRAILER_WORDS = 3  # number, two sums
_LINE_WORDS = 512


def seal(message: Words, number: int) -> None:
    """Write the trailer into the last words."""
    message[-TRAILER_WORDS:] = (number, *checksum(message[:-TRAILER_WORDS]))


def is_whole(message: Words, number: int) -> bool:
    """Whether number and sums are right."""
    found = tuple(int(word) for word in message[-TRAILER_WORDS:])
    return found == (number, *checksum(message[:-TRAILER_WORDS]))


def checksum(words: Words) -> tuple[int, int]:
    """Sums modulo 2^64 of the lines and of the columns of a table of words, weighted by their place.

    Odd weights have an inverse modulo 2^64: no single changed word goes unnoticed. Words that change places
    are in another line or in another column. About five times as fast as CRC-32.
    """
    whole = words.size // _LINE_WORDS * _LINE_WORDS
    table, rest = words[:whole].reshape(-1, _LINE_WORDS), words[whole:]
    lines = np.append(table.sum(axis=1), rest.sum())
    columns = table.sum(axis=0)
    columns[: rest.size] += rest
    return _weighted(lines), _weighted(columns)


def _weighted(sums: Words) -> int:
    return int((sums * np.arange(1, 2 * sums.size, 2)).sum())
