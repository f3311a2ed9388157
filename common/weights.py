"""Weights on the move: tensors by name, where both sides meet, what a transfer moved."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import msgspec

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by the name of its type."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: name, shape, dtype name as in safetensors (`F32`, `BF16`, …)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class WeightManifest(msgspec.Struct, frozen=True):
    """All tensors of a transfer, in the order in which they travel."""

    tensors: tuple[TensorSpec, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.bytes for spec in self.tensors)


class Rendezvous(msgspec.Struct, frozen=True):
    """Where one generation of a group meets; made by the sender, carried by the controller."""

    host: str
    port: int
    generation: str
    members: tuple[str, ...]
    timeout_s: float
    senders: int = 1


class TransferStats(msgspec.Struct, frozen=True):
    """What a transfer moved and how long it took."""

    bytes: int
    seconds: float


class SyncStats(msgspec.Struct, frozen=True):
    """What one end of a weight sync moved: `full_bytes` is what a full one moves, `changed` the share of elements
    that differ from the sync before, where that was looked at."""

    bytes: int
    seconds: float
    full_bytes: int
    changed: float | None = None
