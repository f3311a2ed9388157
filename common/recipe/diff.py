"""What changed between two recipes, and whether a run may go on with the change.

A change is *harmless* when the finished run could have been made with the new recipe from its beginning:
ends, rhythm of checkpoints, waits, leases, the control plane's address, trackers, worker counts, how many rows a
stage hands out at once. In deterministic mode what moves the last bits (trainer ranks, threads, micro-batches) or
lets the clock decide (a reward's time limit) is not.

Not harmless, though one might think so: `rollout.batch_size_per_device` and `evaluate.samples` (rows of the
open step were already cut into chunks with the old value), `evaluate.temperature` and `data.eval` (the
evaluations before and after could no longer be compared), `redis.url` (the rows are on the old server).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rlmq.common.recipe.schema import Recipe

_HARMLESS = (
    "run.name",
    "run.folder",
    "data.passes",
    "placement.rollout.workers",
    "placement.reward.*",
    "placement.reference.workers",
    "evaluate.every_steps",
    "checkpoint.*",
    "record.segment_mb",
    "record.fingerprints",
    "stages.*",
    "deadlines.*",
    "control.*",
    "track",
)
_WITHIN_TOLERANCE = (
    "placement.*",
    "train.micro_batch_tokens",
    "train.activation_checkpointing",
    "reward.*.timeout_s",
)
_SCHEDULE = ("train.steps", "train.lr_steps")


@dataclass(frozen=True, slots=True)
class Change:
    """One key with another value; `old` or `new` is None where the key is absent."""

    path: str
    old: Any
    new: Any
    harmless: bool

    def __str__(self) -> str:
        """`train.lr: 0.0001 -> 5e-05`."""
        return f"{self.path}: {self.old} -> {self.new}" + (" (harmless)" if self.harmless else "")


def changes(old: Recipe, new: Recipe) -> list[Change]:
    """Every key that differs, in the recipe's order."""
    before, after = dict(_flat(old.model_dump(mode="json"), "")), dict(_flat(new.model_dump(mode="json"), ""))
    return [
        Change(path, before.get(path), after.get(path), _is_harmless(path, old, new))
        for path in dict.fromkeys([*before, *after])
        if (path in before, before.get(path)) != (path in after, after.get(path))
    ]


def harmless(change: Change) -> bool:
    """Whether a run may be continued with this change."""
    return change.harmless


def _is_harmless(path: str, old: Recipe, new: Recipe) -> bool:
    if path in _SCHEDULE:
        return _schedule_steps(old) == _schedule_steps(new)
    if any(fnmatchcase(path, pattern) for pattern in _HARMLESS):
        return True
    exact = old.deterministic or new.deterministic
    return not exact and any(fnmatchcase(path, pattern) for pattern in _WITHIN_TOLERANCE)


def _schedule_steps(recipe: Recipe) -> int | None:
    """The length of the learning rate's schedule; a constant one has none, so `train.steps` is free."""
    train = recipe.train
    return None if train.lr_schedule == "constant" else train.lr_steps or train.steps


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Dotted leaves; lists of blocks (`reward`) by index, other lists as one value."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, item in value.items():
        yield from _flat(item, f"{path}.{key}" if path else str(key))
