"""The recipe's `data.difficulty` block."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlmq.common.recipe.block import Block


class DifficultyBlock(Block):
    """Prompts by how many of their samples passed, when they were last trained on."""

    window: tuple[float, float] | None = Field(
        default=None, description="Least and greatest pass rate of the prompts that are taken; none: all are."
    )
    pass_reward: float = Field(default=1.0, description="Least reward of a sample that passes.")
    outside: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Part of the other prompts that are taken all the same, to be measured.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> DifficultyBlock:
        if self.window is not None and not 0 <= self.window[0] <= self.window[1] <= 1:
            raise ValueError("window: [least, greatest], both from 0 to 1")
        return self
