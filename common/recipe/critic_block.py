"""The recipe's blocks of models that are trained beside the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlmq.common.recipe.block import Block, PositiveInt

if TYPE_CHECKING:
    from rlmq.common.recipe.schema import TrainBlock


class _TrainedBlock(Block):
    """Its optimizer. What is not given is as in `train`."""

    lr: float | None = Field(default=None, ge=0, description="Peak learning rate; none: train.lr.")
    warmup_steps: int | None = Field(default=None, ge=0, description="Steps of linear warm-up; none: train's.")
    grad_clip: float | None = Field(
        default=None, ge=0, description="Greatest gradient norm; 0: none; none: train.grad_clip."
    )
    mini_batches: PositiveInt | None = Field(
        default=None, description="Optimizer steps per pass over a batch; none: train.mini_batches."
    )
    epochs: PositiveInt | None = Field(default=None, description="Passes over each batch; none: train.epochs.")

    def training(self, train: TrainBlock) -> TrainBlock:
        """The block of its optimizer."""
        own = {name: getattr(self, name) for name in _TrainedBlock.model_fields}
        return train.model_copy(update={name: value for name, value in own.items() if value is not None})


class CriticBlock(_TrainedBlock):
    """The critic, where the algorithm has one."""

    model: str | None = Field(
        default=None, description="Model that the critic begins with; none: the recipe's `model`."
    )


class OwnCriticBlock(CriticBlock):
    """One more critic: a role with processes, a model and an optimizer of its own."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$",
        description="Its stage, its role and its processes: NAME-0; `NAME_…` in metrics.",
    )
    learns: str = Field(
        default="values",
        description="Values of the algorithm that it gives in the place of `critic`. Where several give the same, "
        "each has a column VALUES.NAME, and their mean counts.",
    )
    role: str | None = Field(
        default=None,
        description="file.py:Class or package.module:Class of the role, which extends "
        "rlmq.consumers.critic.CriticRole; none: that one.",
    )
    workers: PositiveInt = Field(default=1, description="Trainer ranks of this critic.")
    threads: PositiveInt | None = Field(default=None, description="Compute threads per process; none: all cores.")


class RewardModelBlock(_TrainedBlock):
    """A reward model that the run trains on part of its rows; its score is the column `learned_reward`."""

    learns: str | None = Field(
        default=None, description="Name of the reward whose values it learns from; none: there is no such model."
    )
    loss: Literal["pairs", "regression"] = Field(
        default="pairs",
        description="pairs: the best row of a group shall score above the worst (Bradley-Terry); regression: each "
        "row's score shall be the value.",
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Part of the groups that it learns from, drawn by run.seed."
    )
    model: str | None = Field(
        default=None, description="Model with the policy's tokenizer that it begins with; none: `model`."
    )
