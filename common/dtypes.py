"""Tensor types by the names that safetensors gives them: in manifests, on the wire, in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rlmq.common.weights import TensorSpec, WeightManifest

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Name, shape and type of a tensor; a type without a name is spelled as torch does."""
    return TensorSpec(name, tuple(tensor.shape), _NAMES.get(tensor.dtype, str(tensor.dtype)))


def manifest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
    """The manifest of named tensors, in their order."""
    return WeightManifest(tuple(spec_of(name, tensor) for name, tensor in tensors))
