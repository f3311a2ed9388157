"""The items of the recipe's `losses` list: what else an update learns from."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.block import Block, PositiveFloat, PositiveInt

NO_POLICY = ("reward_model", "score")
"""Algorithms whose model scores responses, so that their loss is none of a policy."""
TABLES = ("train", "eval", "dead")
"""Names that a loss cannot have: those of other tables."""


class LossBlock(Block):
    """One more loss in every update, of rows that are there already; they have a table of their own."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$", description="Name of the loss and of its table; `NAME_…` in the metrics."
    )
    algorithm: AlgorithmBlock = Field(description="Its algorithm, and the keys of that one.")
    data: str = Field(
        description="sft, dpo: rows with their responses, as data.train of that algorithm; others: a recording "
        "(a run's folder of samples), whose groups are trained on again."
    )
    min_reward: float | None = Field(default=None, description="As data.min_reward.")
    prompts_per_step: PositiveInt = Field(
        default=8, description="Rows of the data (pairs of dpo, groups) in each step."
    )
    weight: PositiveFloat = Field(
        default=1.0, description="Weight of its mean, beside that of the algorithm's own loss, which is 1."
    )

    @model_validator(mode="after")
    def _of_data(self) -> LossBlock:
        if self.name in TABLES:
            raise ValueError(f"name: not {', '.join(TABLES)}, which are other tables")
        if self.algorithm.name in NO_POLICY:
            raise ValueError(f"algorithm.name: one that trains a policy, not {self.algorithm.name}")
        if self.algorithm.loop is not None or self.algorithm.kl_target is not None:
            raise ValueError("algorithm: no loop and no kl_target, which are the run's own algorithm's")
        if self.algorithm.online and self.min_reward is not None:
            raise ValueError(f"no min_reward: {self.algorithm.name} learns from rewards")
        return self
