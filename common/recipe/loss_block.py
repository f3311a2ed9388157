"""The items of the recipe's `losses` list: what else an update learns from."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.block import Block, PositiveFloat, PositiveInt

TABLES = ("train", "eval", "dead")
"""Names that a loss cannot have: those of other tables."""


class LossBlock(Block):
    """One more loss in every update, of rows that the data bring; they have a table of their own."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$", description="Name of the loss and of its table; `NAME_…` in the metrics."
    )
    algorithm: AlgorithmBlock = Field(description="Its algorithm, sft or dpo, and the keys of that one.")
    data: str = Field(description="Rows with their responses, as data.train of that algorithm.")
    min_reward: float | None = Field(default=None, description="As data.min_reward.")
    prompts_per_step: PositiveInt = Field(default=8, description="Rows of the data (pairs of dpo) in each step.")
    weight: PositiveFloat = Field(
        default=1.0, description="Weight of its mean, beside that of the algorithm's own loss, which is 1."
    )

    @model_validator(mode="after")
    def _of_data(self) -> LossBlock:
        if self.name in TABLES:
            raise ValueError(f"name: not {', '.join(TABLES)}, which are other tables")
        if self.algorithm.name not in ("sft", "dpo"):
            raise ValueError(f"algorithm.name: sft or dpo, not {self.algorithm.name}")
        own = [key for key in ("advantage", "loss", "loop") if getattr(self.algorithm, key) is not None]
        if own:
            raise ValueError(f"algorithm: no {own[0]} of your own beside another loss")
        return self
