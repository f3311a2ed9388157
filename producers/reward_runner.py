"""What scores rows. Functions run in killable processes of their own: a time-out or a crash is no verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlmq.common.errors import DeadlineExceeded


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
    `timed_out`: some have none because the time was over. `fields`: by row, what the function's dicts had beside
    their scores; () where no row had anything. `raised`: of rows for which the function raised again and again when
    it was called with the row alone, the traceback.
    """

    values: list[float | None]
    failure: str = ""
    notes: tuple[str, ...] = ()
    timed_out: bool = False
    fields: tuple[dict[str, Any], ...] = ()
    raised: Mapping[int, str] = field(default_factory=dict)


def reward_row(record: Mapping[str, Any], more: Sequence[str] = ()) -> RewardRow:
    """A stored row as the user wrote it, with these columns among its fields; without a record, the text."""
    fields = json.loads(record["record"]) if record["record"] else {}
    prompt = fields.pop("prompt", record["prompt_text"])
    fields.update((name, record[name]) for name in more)
    return RewardRow(prompt, record["response_text"], fields)


def refuse_the_clock(verdicts: Verdicts, subject: str, timeout_s: float) -> None:
    """In deterministic mode no verdict depends on the clock.

    Raises:
        DeadlineExceeded: some rows have none because the time was over.
    """
    if verdicts.timed_out:
        raise DeadlineExceeded(
            subject,
            got=f"no answer within {timeout_s:g} s",
            expected="a verdict for every row: in deterministic mode the clock decides none",
            remedy="Raise its timeout_s and start anew; after a passing load the same command goes on",
        )


class ColumnRunner:
    """A column that is a reward as it stands; nothing runs."""

    def __init__(self, name: str, column: str) -> None:
        self.name = name
        self._column = column

    def score(self, rows: Sequence[RewardRow]) -> Verdicts:
        """The column's numbers; null is no verdict."""
        found = [row.fields[self._column] for row in rows]
        return Verdicts([None if value is None else float(value) for value in found])

    def close(self) -> None:
        """There is no process."""


class RewardRunner(Protocol):
    """Runs one reward function over rows."""

    @property
    def name(self) -> str:
        """Name of its column (`reward.NAME`)."""

    def score(self, rows: Sequence[RewardRow]) -> Verdicts:
        """Score the rows within the function's time limit; never raises for what the function does."""

    def close(self) -> None:
        """End its process."""
