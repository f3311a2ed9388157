"""The trailer of messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmq.common.layouts.sealing import checksum, is_whole, seal


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
def test_a_message_under_another_number_or_cut_short_is_not_whole(number: int) -> None:
    message = np.full(11, 5)
    seal(message, number)

    assert is_whole(message, number)
    assert not is_whole(message, number + 1)
    assert not is_whole(message[1:], number)
