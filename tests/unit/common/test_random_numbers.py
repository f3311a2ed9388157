"""The counter-based generator: known answers, independence of batch composition, uniformity."""

from __future__ import annotations

import numpy as np
import pytest

from rlmq.common.engines.random_numbers import philox, uniforms

# Random123 1.14, tests/kat_vectors: philox4x32, 10 rounds.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))
    assert words.tolist() == [expected]


def test_many_counters_at_once_equal_one_at_a_time() -> None:
    counters = np.arange(400, dtype=np.uint32).reshape(100, 4) * np.uint32(2654435761)
    keys = np.array([[7, 9]], dtype=np.uint32)
    together = philox(counters, keys)
    assert together.tolist() == [philox(c[None], keys)[0].tolist() for c in counters]


def test_a_number_depends_on_seed_id_and_index_alone() -> None:
    # given numbers of three samples drawn together
    together = uniforms(11, ["a", "b", "c"], [4, 5, 6])
    # when they are drawn apart, in another order, with other companions
    apart = [uniforms(11, ["x", name], [0, index])[1] for name, index in [("c", 6), ("a", 4), ("b", 5)]]
    # then they are the same
    assert together.tolist() == [apart[1], apart[2], apart[0]]


def test_each_part_of_the_key_changes_the_number() -> None:
    base = uniforms(1, ["a"], 0)[0]
    others = [uniforms(2, ["a"], 0)[0], uniforms(1 + 2**32, ["a"], 0)[0], uniforms(1, ["b"], 0)[0]]
    others += [uniforms(1, ["a"], 1)[0], uniforms(-1, ["a"], 0)[0]]
    assert len({base, *others}) == 6


def test_one_seed_per_id_equals_separate_calls() -> None:
    assert uniforms([3, 2**64 - 1], ["a", "b"], 2).tolist() == [
        uniforms(3, ["a"], 2)[0],
        uniforms(-1, ["b"], 2)[0],
    ]


def test_numbers_are_uniform_and_uncorrelated() -> None:
    # given the numbers of 64 samples over 256 tokens
    drawn = np.stack([uniforms(5, [f"train-{i:04d}" for i in range(64)], t) for t in range(256)])
    # then: in range; 32 bins pass chi-square at 1e-4 (31 degrees of freedom: 66.6); neighbours do not correlate
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.bincount((drawn.ravel() * 32).astype(int), minlength=32)
    expected = drawn.size / 32
    assert ((counts - expected) ** 2 / expected).sum() < 66.6
    assert abs(np.corrcoef(drawn[1:].ravel(), drawn[:-1].ravel())[0, 1]) < 4 / np.sqrt(drawn.size)
    assert abs(np.corrcoef(drawn[:, 1:].ravel(), drawn[:, :-1].ravel())[0, 1]) < 4 / np.sqrt(drawn.size)
