"""Named tensors as safetensors files in transformers' naming, hashed while they are written.

The format (huggingface.co/docs/safetensors): the header's length as 8 bytes, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BLOCK_BYTES = 8 << 20
_SYNC_BYTES = 32 << 20
"""Forced to disk as it grows: a long queue of dirty pages would hold up everybody else's fsync."""


def without_aliases(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors by name; of those that are the same memory (tied weights), the first."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in tensors:
        memory = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and memory in seen:
            continue
        seen.add(memory)
        found[name] = tensor
    return found


def write_tensors(
    folder: Path, stem: str, tensors: Mapping[str, torch.Tensor], max_file_bytes: int
) -> dict[str, str]:
    """Write `stem.safetensors`, or several and their index when there are more bytes; all is forced to disk.

    Returns:
        SHA-256 by file name.
    """
    parts = _parts(tensors, max_file_bytes)
    hashes: dict[str, str] = {}
    place: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        many = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        file = f"{stem}{many}.safetensors"
        hashes[file] = write_file(folder / file, _content(part))
        place |= dict.fromkeys(part, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": place}
        file = f"{stem}.safetensors.index.json"
        hashes[file] = write_file(folder / file, [json.dumps(index, indent=2).encode()])
    return hashes


def write_file(path: Path, content: Iterable[bytes | memoryview]) -> str:
    """Write a new file and force it to disk; returns its SHA-256."""
    digest = hashlib.sha256()
    unsynced = 0
    with path.open("wb", buffering=0) as file:
        for block in content:
            digest.update(block)
            _write_all(file.fileno(), memoryview(block))
            unsynced += len(block)
            if unsynced >= _SYNC_BYTES:
                os.fdatasync(file.fileno())
                unsynced = 0
        os.fsync(file.fileno())
    return digest.hexdigest()


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]


def _parts(tensors: Mapping[str, torch.Tensor], max_file_bytes: int) -> list[dict[str, torch.Tensor]]:
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = max_file_bytes
    for name, tensor in tensors.items():
        if parts[-1] and tensor.nbytes > room:
            parts.append({})
            room = max_file_bytes
        parts[-1][name] = tensor
        room -= tensor.nbytes
    return parts


def _content(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    import torch

    yield _header(tensors)
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(flat), _BLOCK_BYTES):
            yield flat[start : start + _BLOCK_BYTES]


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    from rlmq.common.dtypes import spec_of

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {
            "dtype": spec_of(name, tensor).dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
