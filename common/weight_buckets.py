"""Buckets: tensors packed into messages of bounded size, each with its number and a checksum.

numpy does the copying and adding: torch would open a pool of threads in each thread that packs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]

_WORD_BYTES = 8
_TRAILER_WORDS = 3  # bucket number, two sums
_LINE_WORDS = 512


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes of tensor `index` from its byte `start`, at byte `offset` of a bucket."""

    index: int
    start: int
    offset: int
    size: int


def cut(sizes: Sequence[int], bucket_bytes: int) -> Iterator[tuple[int, list[Piece]]]:
    """Lay tensors of these byte sizes into buckets; yields (payload bytes, pieces) per bucket.

    Every tensor begins at a whole word. It is cut only if it is longer than a bucket; empty ones are in none.
    """
    pieces: list[Piece] = []
    filled = 0
    for index, size in enumerate(sizes):
        if pieces and filled + size > bucket_bytes:
            yield filled, pieces
            pieces, filled = [], 0
        start = 0
        while start < size:
            taken = min(size - start, bucket_bytes)
            pieces.append(Piece(index, start, filled, taken))
            start += taken
            filled = _whole_words(filled + taken)
            if start < size:
                yield filled, pieces
                pieces, filled = [], 0
    if pieces:
        yield filled, pieces


def _whole_words(size: int) -> int:
    return -(-size // _WORD_BYTES) * _WORD_BYTES


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The tensor's memory, or a copy where it is not contiguous or not on the host."""
    import torch

    content: Bytes = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content


class Bucket:
    """A buffer for messages of up to `bucket_bytes` of payload."""

    def __init__(self, bucket_bytes: int) -> None:
        import torch

        self._words = np.zeros(_whole_words(bucket_bytes) // _WORD_BYTES + _TRAILER_WORDS, dtype=np.int64)
        self._tensor = torch.from_numpy(self._words)

    @property
    def payload(self) -> Bytes:
        """The whole buffer as bytes; no copy."""
        return self._words.view(np.uint8)

    def message(self, payload_bytes: int) -> torch.Tensor:
        """The message with so much payload (whole words), trailer included; no copy."""
        return self._tensor[: payload_bytes // _WORD_BYTES + _TRAILER_WORDS]

    def seal(self, payload_bytes: int, number: int) -> None:
        """Write the trailer."""
        words = payload_bytes // _WORD_BYTES
        self._words[words : words + _TRAILER_WORDS] = (number, *checksum(self._words[:words]))

    def is_whole(self, payload_bytes: int, number: int) -> bool:
        """Whether number and sums are right."""
        words = payload_bytes // _WORD_BYTES
        found = tuple(int(w) for w in self._words[words : words + _TRAILER_WORDS])
        return found == (number, *checksum(self._words[:words]))


def checksum(words: NDArray[np.int64]) -> tuple[int, int]:
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


def _weighted(sums: NDArray[np.int64]) -> int:
    return int((sums * np.arange(1, 2 * sums.size, 2)).sum())
