"""The items of the recipe's `reward` list."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rlmq.common.recipe.block import Block, PositiveFloat


class RewardBlock(Block):
    """One reward function; the reward is the weighted sum of all."""

    function: str = Field(description="file.py:function, looked up beside the recipe; TRL's or verl's signature.")
    weight: float = Field(default=1.0, description="Weight in the sum.")
    timeout_s: PositiveFloat = Field(default=10.0, description="Seconds per call; beyond: no verdict.")
    name: str | None = Field(default=None, description="Name of its column; default: the function's name.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Extra keyword arguments of the function.")
