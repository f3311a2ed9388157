"""Reward functions run in killable processes of their own: a time-out or a crash is *no verdict*, never 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RewardRow:
    """One sample as a reward function sees it: the prompt as the user wrote it (text or messages), the
    completion in the same form, and the data row's other fields by name."""

    prompt: Any
    response_text: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """One value per row, None where there is no verdict.

    `failure` says why a whole call gave none, `notes` what was wrong with single rows (NaN, a row that raised);
    `timed_out`: some have none because the time was over.
    """

    values: list[float | None]
    failure: str = ""
    notes: tuple[str, ...] = ()
    timed_out: bool = False


class RewardRunner(Protocol):
    """Runs one reward function over rows."""

    @property
    def name(self) -> str:
        """Name of its column (`reward.NAME`)."""

    def score(self, rows: Sequence[RewardRow]) -> Verdicts:
        """Score the rows within the function's time limit; never raises for what the function does."""

    def close(self) -> None:
        """End its process."""
