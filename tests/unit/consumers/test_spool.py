"""Tensors put aside on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from rlmq.consumers.spool import Spool
from rlmq.consumers.tensor_files import write_tensors


def _anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def test_what_is_put_aside_takes_no_memory_and_is_what_it_was(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "checkpoints")
    kept, sums = {}, {}
    before = _anonymous_kib()
    for number in range(24):
        tensor = torch.full((1 << 20,), float(number))  # 4 MiB each
        kept[f"t{number}"] = spool.keep(tensor)
        sums[f"t{number}"] = hashlib.sha256(tensor.numpy().data).hexdigest()
        tensor.zero_()
    write_tensors(tmp_path, "model", kept, 1 << 40)

    assert _anonymous_kib() - before < 24 << 10  # of 96 MiB
    assert {name: hashlib.sha256(t.numpy().data).hexdigest() for name, t in kept.items()} == sums
    assert list((tmp_path / "checkpoints").iterdir()) == []  # it has no name, and goes with its tensors


@pytest.mark.parametrize("tensor", [torch.tensor(3), torch.empty(0, 4), torch.randn(3, 5).bfloat16().T])
def test_any_tensor_keeps_shape_type_and_values(tmp_path: Path, tensor: torch.Tensor) -> None:
    kept = Spool(tmp_path).keep(tensor)

    assert torch.equal(kept, tensor)
    assert (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape)


def test_a_disk_without_room_leaves_it_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    live = torch.ones(3)
    kept = Spool(tmp_path).keep(live)
    live.zero_()

    assert kept.tolist() == [1, 1, 1]
