"""The learning rate as a closed formula of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlmq.common.recipe.schema import TrainBlock


def learning_rate(step: float, block: TrainBlock) -> float:
    """Learning rate of AdamW at `step`, the number of training steps already done (0 for the first).

    Linear warm-up `lr · step / warmup_steps`, then the shape of `lr_schedule`, which for `linear` and
    `cosine` reaches 0 at `lr_steps` (default `steps`) and stays there. A step may be fractional: with
    several optimizer steps per batch the rate moves between them.

    Source: the schedules of `transformers.optimization` (`get_linear_schedule_with_warmup`,
    `get_cosine_schedule_with_warmup` with half a cycle; Loshchilov and Hutter, arXiv 1608.03983).

    Example:
        >>> from rlmq.common.recipe.schema import TrainBlock
        >>> learning_rate(5, TrainBlock(steps=10, lr=1.0, lr_schedule="linear"))
        0.5
    """
    if step < block.warmup_steps:
        return block.lr * step / block.warmup_steps
    if block.lr_schedule == "constant":
        return block.lr
    end = block.lr_steps if block.lr_steps is not None else block.steps
    done = min(1.0, (step - block.warmup_steps) / max(1, end - block.warmup_steps))
    if block.lr_schedule == "linear":
        return block.lr * (1.0 - done)
    return block.lr * 0.5 * (1.0 + math.cos(math.pi * done))
