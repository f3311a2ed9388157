"""The recipe's `schedule` block."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlmq.common.recipe.block import Block

MOST = 64


class ScheduleBlock(Block):
    """How far generation may be ahead of training; see docs/staleness.md."""

    kind: Literal["sync", "one_step_off", "async"] = Field(
        default="sync",
        description="sync: a step's rows are generated with the weights that it trains; one_step_off: beside the "
        "training of the step before; async: up to max_staleness steps ahead.",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        le=MOST,
        description="async: most steps between the weights of a row and those that it trains; none: 1.",
    )
    partial: bool = Field(
        default=True, description="async: a response that new weights come into is finished with them."
    )

    @model_validator(mode="after")
    def _of_async(self) -> ScheduleBlock:
        if self.kind != "async" and self.max_staleness is not None:
            raise ValueError(f"kind: async with max_staleness, not {self.kind}")
        return self

    @property
    def staleness(self) -> int:
        """The bound: most steps between the weights of a row's first token and those that it trains."""
        bound = 1 if self.max_staleness is None else self.max_staleness
        return {"sync": 0, "one_step_off": 1, "async": bound}[self.kind]

    @property
    def interrupts(self) -> bool:
        """Whether new weights come into responses that are not finished."""
        return self.kind == "async" and self.partial and self.staleness > 0
