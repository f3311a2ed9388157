"""Tensors put aside on disk until a checkpoint is written: memory for one at a time, however many there are."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

import torch

_TRIM_BYTES = 32 << 20


def _trim() -> None:
    """Give freed memory back: small objects that stay lie in holes that the next tensor then does not fit in."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


class Spool:
    """A file without a name, which goes with the last tensor in it.

    Args:
        folder: on the disk that has room for a checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it lives as long as its tensors
        self._end = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values in the file, from where the kernel reads them when they are asked for.

        A disk without room: in memory of its own.
        """
        own = tensor.detach().cpu().contiguous()
        if not own.nbytes:
            return own.clone()
        try:
            return self._written(own)
        except OSError:
            return own.clone()

    def _written(self, tensor: torch.Tensor) -> torch.Tensor:
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        start = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        done = 0
        while done < len(content):
            done += os.pwrite(self._file.fileno(), content[done:], start + done)
        self._end = start + done
        if start // _TRIM_BYTES != self._end // _TRIM_BYTES:
            _trim()
        there = mmap.mmap(self._file.fileno(), done, mmap.MAP_PRIVATE, offset=start)
        return torch.frombuffer(there, dtype=tensor.dtype).view(tensor.shape)
