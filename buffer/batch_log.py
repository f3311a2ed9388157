"""The append-only batch log: what each training step trained on, fsynced before its first micro-batch.

Recovery is the newest checkpoint plus the redo of the entries after it; Redis is only an index of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec


class LoggedRange(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one chunk, and how often they were trained on before: (chunk, first, count, use)."""

    chunk: str
    first: int
    count: int
    use: int = 0


class Update(msgspec.Struct, frozen=True):
    """One optimizer step: `micro_batches[rank][i]` lists indices into the entry's `rows`."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    denominators: tuple[float, ...]


class LoggedLoss(msgspec.Struct, frozen=True):
    """What another loss trained on in the same updates: rows of its own table, in training order.

    Its sum has denominators of its own; the weight is that of its mean.
    """

    table: str
    weight: float
    rows: tuple[str, ...]
    ranges: tuple[LoggedRange, ...]
    updates: tuple[Update, ...]


class BatchEntry(msgspec.Struct, frozen=True):
    """One training step as a pure function of its rows.

    `rows` are sample ids in training order; `ranges` say where the store holds them, in claim order.
    `updates` are its optimizer steps (passes times mini-batches). `policy_version` is the version that the
    step makes; `behaviour_versions` are the least and greatest version that generated its tokens. `state` is what
    the algorithm carries to the next step, `figures` what it tells of this one; `beside` are the steps of
    those who learn beside the actor, by role.
    `prompts`: how many were admitted at first and by each refill, where others come for groups that were dropped.
    `rewards` are those of the rows, where prompts are taken by them (`data.difficulty`).
    `losses` are the other losses of the updates. `table` has the rows: `train`, or the step's slot of it.
    """

    step: int
    policy_version: int
    rows: tuple[str, ...]
    ranges: tuple[LoggedRange, ...]
    updates: tuple[Update, ...]
    behaviour_versions: tuple[int, int]
    seed: int
    state: dict[str, float] = {}
    figures: dict[str, float] = {}
    beside: dict[str, tuple[Update, ...]] = {}
    prompts: tuple[int, ...] = ()
    rewards: tuple[float, ...] = ()
    losses: tuple[LoggedLoss, ...] = ()
    table: str = "train"


class BatchLog(Protocol):
    """Append and read entries; one writer (trainer rank 0)."""

    def append(self, entry: BatchEntry) -> None:
        """Write and fsync one entry.

        Raises:
            IntegrityError: the step is not the next one. DependencyError: the disk is full.
        """

    def entries(self, after_step: int = -1) -> Iterator[BatchEntry]:
        """Entries with a greater step, in order. A torn last line is ignored.

        Raises:
            IntegrityError: a damaged line that is not the last; names file and offset.
        """

    def rewind(self, step: int) -> None:
        """Take back this entry and all after it: their rows are gone, no checkpoint has them, they come again.

        Raises:
            DependencyError: the file cannot be written.
        """

    def last_step(self) -> int:
        """Greatest logged step, or -1."""
