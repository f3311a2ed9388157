"""How a stage of the buffer hands out rows, as the recipe says it."""

from __future__ import annotations

from pydantic import Field

from rlmq.common.recipe.block import Block, PositiveFloat, PositiveInt


class StageBlock(Block):
    """How a stage of the buffer hands out rows."""

    min_batch: PositiveInt = Field(
        default=1, description="Rows that a worker waits for; fewer when the step has no more, or after max_wait_s."
    )
    max_wait_s: PositiveFloat | None = Field(
        default=None, description="Longest that a ready row waits for min_batch; none: until the step has no more."
    )
    lease_s: PositiveFloat = Field(
        default=60.0, description="Without progress, rows go to another worker after this time."
    )
    max_deliveries: int = Field(
        default=3, ge=1, le=40, description="Times that rows are handed out before they end as dead letters."
    )
