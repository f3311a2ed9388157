"""The recipe's `record` block."""

from __future__ import annotations

from pydantic import Field

from rlmq.common.recipe.block import Block, PositiveInt


class RecordBlock(Block):
    """The recording: rows that have ended, as Parquet."""

    to: str | None = Field(
        default=None,
        description="Where recordings go: a URL of pyarrow.fs (s3://bucket/folder), below which each run has a "
        "folder of its name; none: the run's folder.",
    )
    segment_mb: PositiveInt = Field(
        default=64,
        description="Files of single claims become one segment when they have so many MiB together, or are 256.",
    )
    fingerprints: bool = Field(
        default=True,
        description="Hash each step's gradients and weights, by which `rlmq replay` names the first that differs.",
    )
