"""Checkpoints: one atomic rename each; safetensors in the Hugging Face layout plus named optimizer shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec


class CheckpointManifest(msgspec.Struct, frozen=True):
    """What a checkpoint covers: the step, its policy version, the rows trained since the last checkpoint,
    the world size, a SHA-256 per file, and the step's figures."""

    step: int
    policy_version: int
    rows: tuple[str, ...]
    world_size: int
    files: dict[str, str]
    recipe_hash: str
    figures: dict[str, Any] = {}


class Checkpoints(Protocol):
    """The checkpoints of one run."""

    def newest(self) -> tuple[Path, CheckpointManifest] | None:
        """The newest whole checkpoint; incomplete ones are skipped, with the reason logged."""

    def prune(self, keep: int, protect: frozenset[int]) -> list[int]:
        """Remove all but the newest `keep`, except protected steps; returns the steps removed."""
