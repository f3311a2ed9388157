"""Counter-based random numbers: a token's number depends on (seed, sample id, token index) and on nothing else.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), tables 1 and 2. There is no
state to save, restore or share: batch composition, order, restarts and worker count cannot change a draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32-10 of every counter.

    Args:
        counters: four 32-bit words each, `[draws, 4]`.
        keys: two 32-bit words each, `[draws, 2]`, or `[1, 2]` for one key.

    Returns:
        Four random 32-bit words each, `[draws, 4]`.
    """
    # Words are held in 64 bits, so that a product keeps its high half.
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (keys[:, i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _WORD) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _WORD) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def id_words(sample_id: str) -> int:
    """64 bits of BLAKE2b of the id: the part of the counter that tells samples apart."""
    return int.from_bytes(hashlib.blake2b(sample_id.encode(), digest_size=8).digest(), "little")


def uniforms(
    seed: int | Sequence[int], ids: Sequence[str], token_index: int | Sequence[int]
) -> NDArray[np.float64]:
    """One number in [0, 1) per id, with 53 random bits, `[len(ids)]`.

    Args:
        seed: 64-bit seed, one for all or one per id; greater and negative ones are taken modulo 2**64.
        ids: sample ids.
        token_index: index of the token inside the response, one for all or one per id, below 2**32.

    Example:
        >>> a, b = uniforms(7, ["x", "y"], 3)
        >>> a == uniforms(7, ["x"], 3)[0], a != b
        (np.True_, np.True_)
    """
    hashes = np.array([id_words(sample_id) for sample_id in ids], dtype=np.uint64)
    return uniforms_of_words(_words(seed), hashes, np.asarray(token_index, dtype=np.uint64))


def uniforms_of_words(
    seeds: NDArray[np.uint64], hashes: NDArray[np.uint64], token_index: NDArray[Any]
) -> NDArray[np.float64]:
    """`uniforms` for ids that are hashed already (`id_words`)."""
    counters = np.zeros((len(hashes), 4), dtype=np.uint32)
    counters[:, 0], counters[:, 1] = hashes & _LOW, hashes >> _WORD
    counters[:, 2] = token_index
    keys = np.empty((np.size(seeds), 2), dtype=np.uint32)
    keys[:, 0], keys[:, 1] = seeds & _LOW, seeds >> _WORD
    words = philox(counters, keys).astype(np.uint64)
    bits = (words[:, 0] >> np.uint64(5)) * np.uint64(1 << 26) + (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def _words(seed: int | Sequence[int]) -> NDArray[np.uint64]:
    seeds = [seed] if isinstance(seed, int) else seed
    return np.array([value % 2**64 for value in seeds], dtype=np.uint64)


def request_seed(seed: int, sample_id: str) -> int:
    """A seed for an engine with generators of its own: 63 bits that depend on both."""
    word = hashlib.blake2b(f"{seed} {sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") >> 1
