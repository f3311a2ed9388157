"""Buckets and their checksum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmq.common.weight_buckets import Bucket, checksum, cut


@given(st.lists(st.integers(0, 200), max_size=20), st.integers(1, 12))
def test_every_byte_is_in_one_piece_and_no_bucket_overflows(sizes: list[int], words: int) -> None:
    bucket_bytes = 8 * words
    found: dict[int, list[tuple[int, int]]] = {}
    for size, pieces in cut(sizes, bucket_bytes):
        assert 0 < size <= bucket_bytes and size % 8 == 0
        ends = 0
        for piece in pieces:
            assert piece.offset % 8 == 0 and piece.offset >= ends
            ends = piece.offset + piece.size
            found.setdefault(piece.index, []).append((piece.start, piece.size))
        assert ends <= size

    for index, size in enumerate(sizes):
        at = 0
        for start, length in found.get(index, []):
            assert start == at
            at += length
        assert at == size


def test_only_tensors_longer_than_a_bucket_are_cut() -> None:
    buckets = list(cut([24, 24, 100, 8], 64))

    assert [(size, [(p.index, p.size) for p in pieces]) for size, pieces in buckets] == [
        (48, [(0, 24), (1, 24)]),
        (64, [(2, 64)]),
        (48, [(2, 36), (3, 8)]),
    ]


@given(st.integers(1, 1600), st.data())
def test_any_flipped_bit_changes_the_checksum(size: int, data: st.DataObject) -> None:
    words = np.random.default_rng(size).integers(-(2**62), 2**62, size)
    before = checksum(words)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 63))

    words.view(np.uint64)[place] ^= np.uint64(1 << bit)

    assert checksum(words) != before


@given(st.integers(2, 1600), st.data())
def test_words_that_change_places_change_the_checksum(size: int, data: st.DataObject) -> None:
    words = np.random.default_rng(size).integers(-(2**62), 2**62, size)
    before = checksum(words)
    one, other = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))

    words[[one, other]] = words[[other, one]]

    assert (checksum(words) != before) == (one != other)


@pytest.mark.parametrize("number", [0, 7])
def test_a_bucket_under_another_number_is_not_whole(number: int) -> None:
    bucket = Bucket(64)
    bucket.payload[:64] = 5
    bucket.seal(64, number)

    assert bucket.is_whole(64, number)
    assert not bucket.is_whole(64, number + 1)
    assert not bucket.is_whole(56, number)
