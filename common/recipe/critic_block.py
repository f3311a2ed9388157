"""The recipe's `critic` block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rlmq.common.recipe.block import Block, PositiveInt

if TYPE_CHECKING:
    from rlmq.common.recipe.schema import TrainBlock


class CriticBlock(Block):
    """The critic, where the algorithm has one. What is not given is as in `train`."""

    model: str | None = Field(
        default=None, description="Model that the critic begins with; none: the recipe's `model`."
    )
    lr: float | None = Field(default=None, ge=0, description="Peak learning rate; none: train.lr.")
    warmup_steps: int | None = Field(default=None, ge=0, description="Steps of linear warm-up; none: train's.")
    grad_clip: float | None = Field(
        default=None, ge=0, description="Greatest gradient norm; none: train.grad_clip."
    )
    mini_batches: PositiveInt | None = Field(
        default=None, description="Optimizer steps per pass over a batch; none: train.mini_batches."
    )
    epochs: PositiveInt | None = Field(default=None, description="Passes over each batch; none: train.epochs.")

    def training(self, train: TrainBlock) -> TrainBlock:
        """The block of the critic's optimizer."""
        own = {name: value for name, value in self.model_dump(exclude={"model"}).items() if value is not None}
        return train.model_copy(update=own)
