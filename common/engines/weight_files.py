"""Weights as a Hugging Face folder, for engines that read files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], model: Path) -> None:
    """Write every tensor by every name (tied ones twice) beside the configuration of the model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / ".model.safetensors.new"
    seen: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():  # one file cannot hold two names of the same memory
        whole[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    save_file(whole, new, metadata={"format": "pt"})
    new.replace(folder / "model.safetensors")
    for path in model.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
