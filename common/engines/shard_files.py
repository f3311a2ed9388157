"""Shards of a Hugging Face folder: each rank reads its own boxes of the safetensors files, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlmq.common.errors import UsageError
from rlmq.common.layouts.layout import Box


def read_boxes(folder: Path, wanted: Mapping[str, Box], stem: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The wanted part of each tensor, in the order of the files.

    Args:
        folder: holds one or more `*.safetensors` whose names begin with `stem`.
        wanted: by name.

    Raises:
        UsageError: a tensor is missing, smaller than its box, or a file cannot be read.
    """
    left = dict(wanted)
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in [name for name in file.keys() if name in left]:  # noqa: SIM118 - not a mapping
                    yield name, _slice(file.get_slice(name), name, left.pop(name), path)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"weights {path}", got=str(error), expected="a safetensors file") from error
    if left:
        raise UsageError(
            f"model {folder}",
            got=f"no tensor {min(left)}",
            expected="every tensor of the model that config.json describes",
            remedy="Name the folder of a whole model",
        )


def _slice(stored: Any, name: str, box: Box, path: Path) -> torch.Tensor:
    shape = tuple(stored.get_shape())
    if len(shape) != len(box.stop) or any(stop > extent for stop, extent in zip(box.stop, shape, strict=True)):
        raise UsageError(f"tensor {name} of {path}", got=f"shape {list(shape)}", expected=f"at least {box.stop}")
    found: torch.Tensor = stored[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
    return found
