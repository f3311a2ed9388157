"""Linear layers in float32 on the CPU through oneDNN instead of the BLAS that torch was built with.

torch sends float32 products to MKL, which on some CPUs is far behind oneDNN; it calls oneDNN itself only for
bfloat16. Measured on 2 cores of an AMD EPYC (Zen 4) with 64 rows: 93 against 167 GFLOP/s for SmolLM2's vocabulary,
116 against 153 for its other layers. The sums are the same, in another order.
"""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn


def use_onednn(model: nn.Module) -> None:
    """Let the model's float32 CPU linears compute through oneDNN in inference mode, and in it only."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for module in model.modules():
        if (
            type(module) is nn.Linear
            and module.weight.dtype is torch.float32
            and module.weight.device.type == "cpu"
        ):
            module.forward = MethodType(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    if not torch.is_inference_mode_enabled() or rows.dtype is not torch.float32:
        return nn.functional.linear(rows, module.weight, module.bias)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, module.weight, module.bias, "none", [], "")
    return product
