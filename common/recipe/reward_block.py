"""The items of the recipe's `reward` list."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlmq.common.recipe.block import Block, PositiveFloat, PositiveInt

REWARD_KINDS = ("function", "builtin", "model", "judge", "code", "column")


class RewardBlock(Block):
    """One scorer, of exactly one kind; the reward is the weighted sum of all."""

    function: str | None = Field(
        default=None, description="file.py:function or file.py:Class, beside the recipe; TRL's or verl's signature."
    )
    builtin: Literal["math_verify", "reasoning_gym"] | None = Field(
        default=None, description="A scorer that is a package of its own, by name."
    )
    model: str | None = Field(
        default=None, description="Hugging Face folder of a sequence classifier, or file.py:builder of one."
    )
    judge: str | None = Field(default=None, description="URL of an OpenAI-compatible endpoint, up to /v1.")
    code: str | None = Field(
        default=None, description="Field of the data with the tests that the response's code is run against."
    )
    column: str | None = Field(
        default=None, description="Column of numbers that a node wrote, or learned_reward (see reward_model)."
    )
    objective: Literal["reward", "cost"] = Field(
        default="reward", description="Which sum it enters: the reward, or the cost that safe_rlhf limits."
    )
    weight: float = Field(default=1.0, description="Weight in the sum.")
    timeout_s: PositiveFloat = Field(default=10.0, description="Seconds per call; beyond: no verdict.")
    memory_mb: PositiveInt | None = Field(
        default=None, description="Most memory of its process, for code of each program; none: no limit, code 512."
    )
    name: str | None = Field(default=None, description="Name of its column; default: the function's name.")
    ensemble: str | None = Field(
        default=None, description="Items with the same name here enter the sum as their mean."
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="Extra keyword arguments of the scorer.")

    @model_validator(mode="after")
    def _one_kind(self) -> RewardBlock:
        given = [kind for kind in REWARD_KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(REWARD_KINDS)}, got {' and '.join(given) or 'none'}")
        return self

    @property
    def kind(self) -> str:
        """Which of the kinds it is."""
        return next(kind for kind in REWARD_KINDS if getattr(self, kind) is not None)

    @property
    def source(self) -> str:
        """What the kind's key says: `file.py:function`, a folder, a URL, …"""
        return str(getattr(self, self.kind))

    @property
    def label(self) -> str:
        """Its name: the given one, the function's, the package's, the column's, or the kind."""
        if self.function is not None or self.builtin is not None or self.column is not None:
            return self.name or self.source.rsplit(":", 1)[-1]
        return self.name or self.kind

    @property
    def subject(self) -> str:
        """The beginning of messages about it."""
        return f"reward {self.kind} {self.source}"
