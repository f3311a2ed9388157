"""The store of an asynchronous run: each step in flight has its rows in a table of its own, a *slot* of `train`.

A step's slot is `step % slots` (`train.0`, `train.1`, …): it is free when the step that had it before is trained.
So all that holds of a table's rows (settled, flushed, counted) holds of a step's. Who works on rows as they come
claims from `train`, which is all slots, and gets rows of one; who means a step names its slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, Interest, Table, TableCounts
from rlmq.common.flow import TRAIN, slot_of

_EVERYWHERE = ("durable", "version")  # told to all slots alike


class SlottedStore(RedisStore):
    """A `RedisStore` whose table `train` is `slots` tables; with one it is a plain one.

    Args:
        slots: steps that may be in flight.
        others: as those of `RedisStore`.
    """

    def __init__(self, *args: Any, slots: int, **others: Any) -> None:
        super().__init__(*args, **others)
        self._slots = slots
        self.first_step = 0
        """Claims of `train` look for rows of this step first, then of those after it."""

    def open(self, tables: Sequence[Table]) -> None:
        """Open them, `train` as its slots."""
        super().open([replace(table, name=name) for table in tables for name in self._names_of(table.name)])

    def claim(self, table: str, stage: str, **how: Any) -> Claim | None:
        """As `ExperienceStore.claim`, of the first slot that has rows; without waiting for them."""
        claims = (super(SlottedStore, self).claim(name, stage, **how) for name in self._names_of(table))
        return next((claim for claim in claims if claim is not None), None)

    def wait(self, interests: Sequence[Interest], *, timeout_s: float, wake_fd: int | None = None) -> bool:
        """As `ExperienceStore.wait`: rows of any slot meet an interest in `train`."""
        each = [replace(one, table=name) for one in interests for name in self._names_of(one.table)]
        return super().wait(each, timeout_s=timeout_s, wake_fd=wake_fd)

    def set_version(self, table: str, version: int) -> None:
        """As `ExperienceStore.set_version`, of every slot."""
        for name in self._names_of(table):
            super().set_version(name, version)

    def counts(self, table: str) -> TableCounts:
        """As `ExperienceStore.counts`; those of `train` are the sums over its slots."""
        first, *more = [super(SlottedStore, self).counts(name) for name in self._names_of(table)]
        return replace(first, **{name: _sum([getattr(one, name) for one in (first, *more)]) for name in _SUMMED})

    def _names_of(self, table: str) -> Iterator[str]:
        if table != TRAIN:
            yield table
            return
        for ahead in range(self._slots):
            yield slot_of(self.first_step + ahead, self._slots)


_SUMMED = [name for name in TableCounts.__dataclass_fields__ if name not in _EVERYWHERE]


def _sum(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], dict):
        return sum(values)
    return {key: sum(one.get(key, 0) for one in values) for key in {key for one in values for key in one}}
