"""The recipe's block of low-rank adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlmq.common.recipe.block import Block, PositiveFloat, PositiveInt


class LoraBlock(Block):
    """Train adapters (peft) beside a frozen model, which is then its own reference."""

    r: PositiveInt | None = Field(default=None, description="Rank of the adapters; none: all weights are trained.")
    alpha: PositiveFloat = Field(default=16.0, description="The adapters' product is scaled by alpha / r.")
    targets: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="Ends of the names of the layers that get one; all-linear: each linear layer but the head.",
    )
    sync: Literal["merged", "adapters"] = Field(
        default="merged",
        description="What rollout workers are sent: whole weights, or the adapters, which they add to the base.",
    )
