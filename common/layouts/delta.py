"""What changed in a tensor since it was sent last: the places and the new values.

A place is the gap to the one before in one byte; 255 stands for 255 unchanged elements and no place. Where a few
per cent of 2-byte elements change, that is about 3 bytes for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlmq.common.errors import IntegrityError
from rlmq.common.layouts.sealing import checksum

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]
Numbers = NDArray[Any]

_SKIP = 255
_HEADER_WORDS = 4  # changed elements, bytes of their places, checksum of the whole content


def encode(new: Numbers, old: Numbers) -> tuple[Bytes, int]:
    """The change from `old` to `new`, flat unsigned integers of one type, and how many elements changed."""
    changed = np.flatnonzero(new != old)
    gaps = np.diff(changed, prepend=-1) - 1
    skips = gaps // _SKIP
    places = np.full(int(skips.sum()) + changed.size, _SKIP, dtype=np.uint8)
    places[np.cumsum(skips + 1) - 1] = gaps % _SKIP
    values = new[changed].view(np.uint8)
    header = np.array([changed.size, places.size, *content_sum(new)], dtype=np.int64).view(np.uint8)
    padding = np.zeros(-(places.size + values.size) % 8, dtype=np.uint8)
    return np.concatenate([header, places, values, padding]), int(changed.size)


def apply(blob: Bytes, content: Numbers, subject: str) -> int:
    """Bring `content` up to date in place; returns how much of the blob this tensor took.

    Raises:
        IntegrityError: the result is not what the sender has: it started from other values.
    """
    count, place_bytes, *sums = (int(word) for word in blob[: 8 * _HEADER_WORDS].view(np.int64))
    start = 8 * _HEADER_WORDS
    used = place_bytes + count * content.itemsize
    places = blob[start : start + place_bytes].astype(np.int64)
    ends = places != _SKIP
    at = np.cumsum(np.where(ends, places + 1, _SKIP))[ends] - 1
    if at.size != count or (count and int(at[-1]) >= content.size):
        raise IntegrityError(subject, got=f"{at.size} places for {count} values", expected="one for each")
    content[at] = blob[start + place_bytes : start + used].copy().view(content.dtype)
    if list(content_sum(content)) != sums:
        raise IntegrityError(subject, got="another checksum after the change", expected="the sender's")
    return start + -(-used // 8) * 8


def content_sum(content: Numbers) -> tuple[int, int]:
    """Checksum of a whole content."""
    raw = content.view(np.uint8)
    whole = raw.size // 8 * 8
    tail = np.zeros(8, dtype=np.uint8)
    tail[: raw.size - whole] = raw[whole:]
    first, second = checksum(raw[:whole].view(np.int64))
    last = int(tail.view(np.int64)[0])
    return first, (second ^ last)


def numbers(tensor: torch.Tensor) -> Numbers:
    """The tensor's elements, flat, as unsigned integers; a copy unless it is contiguous and on the host."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Bytes = flat.view(torch.uint8).numpy() if flat.dtype is not torch.bool else flat.to(torch.uint8).numpy()
    found: Numbers = raw.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[flat.element_size()])
    return found
