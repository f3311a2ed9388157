"""Fingerprints of tensors, and the file that keeps those of a run."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rlmq.consumers.fingerprints import Fingerprints, fingerprint, read_fingerprints


@pytest.mark.parametrize("size", [0, 1, 7, 8, 12, 4096, (1 << 18) + 12, (1 << 19) + 5])
def test_every_flipped_bit_and_every_swap_is_seen(size: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before = fingerprint(content)
    assert before == fingerprint(content.copy())
    draw = random.Random(size)
    for _ in range(20 if size else 0):
        other = content.copy()
        other[draw.randrange(size)] ^= 1 << draw.randrange(8)
        assert fingerprint(other) != before
    if size > 64:
        words = content[: size // 8 * 8].view(np.uint64).copy()
        words[[0, 3]] = words[[3, 0]]
        assert fingerprint(words.view(np.uint8)) != fingerprint(content[: size // 8 * 8])
    assert fingerprint(np.concatenate([content, np.zeros(8, np.uint8)])) != before  # zeros count too


def test_the_last_line_of_a_step_counts_and_the_first_difference_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fingerprints.jsonl"
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(5, dtype=torch.bfloat16)

    def step(prints: Fingerprints, number: int, loss: float, change: float = 0.0) -> None:
        for _ in range(2):
            prints.watch("gradient", [("a", a), ("b", b + change)])
            prints.watch("weights", [("a", a.T), ("b", b)])
        prints.take(number, {"loss": loss, "grad_norm": 1.0})

    first = Fingerprints(path)
    step(first, 1, 0.5)
    step(first, 2, 0.25)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')  # killed while it wrote
    step(Fingerprints(path), 2, 0.125)
    one = read_fingerprints(path)
    assert sorted(one) == [1, 2]
    assert one[2].loss == 0.125
    assert (one[1].gradient, one[1].weights) == (one[2].gradient, one[2].weights)
    assert one[1].differs_from(one[2]) == "loss"
    assert one[1].differs_from(one[1]) == ""

    changed = Fingerprints(tmp_path / "other.jsonl")
    step(changed, 1, 0.5, change=1.0)
    other = read_fingerprints(tmp_path / "other.jsonl")[1]
    assert other.differs_from(one[1]) == "gradient of b"
    assert other.whole("gradient") != one[1].whole("gradient")
    assert other.whole("weights") == one[1].whole("weights")
