"""Weights on the move: the manifest that both sides agree on, and the transport between two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import torch


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


class TransferStats(msgspec.Struct, frozen=True):
    """What a transfer moved and how long it took."""

    bytes: int
    seconds: float


class WeightTransport(Protocol):
    """Moves a manifest's tensors from one sender to its receivers; each receiver has its own group."""

    def offer(self, generation: str, members: tuple[str, ...]) -> Rendezvous:
        """Open the meeting place for a generation (sender's side), on a free port."""

    def send(
        self,
        meeting: Rendezvous,
        manifest: WeightManifest,
        tensors: Iterable[tuple[str, torch.Tensor]],
        gone: Callable[[str], bool] = lambda _: False,
    ) -> TransferStats:
        """Send every tensor to every member; checksummed per bucket. One that is `gone` is not waited for.

        Raises:
            DeadlineExceeded: a member did not come or stopped; names it, the bucket and the generation.
        """

    def receive(
        self, meeting: Rendezvous, member: str, manifest: WeightManifest, sink: Callable[[str, torch.Tensor], None]
    ) -> TransferStats:
        """Receive every tensor and hand it to `sink`.

        Raises:
            IntegrityError: a bucket's checksum differs. DeadlineExceeded: the sender stopped.
        """
