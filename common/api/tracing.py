"""What a script's loop steers: a run, or nothing while its settings are read off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rlmq.common.algorithms.algorithm import Steering

TRACED_STEPS = 64
"""Steps of a loop that are looked at before a run begins: settings that only later steps have are refused then."""


class ScriptSteering(Steering, Protocol):
    """What the handles of a script use."""

    open_step: int
    last_train: dict[str, Any]

    @property
    def total_steps(self) -> int:
        """The last step."""

    def passed(self, stage: str, timeout_s: float | None = None) -> None:
        """Wait until no live row of the train table is before this stage, or in it.

        Raises:
            DeadlineExceeded: after `timeout_s`, or `deadlines.step_s` without progress; who has the rows is named.
        """

    def note(self, figures: Mapping[str, Any]) -> None:
        """Add figures to the step's line of metrics."""

    def figures(self, step: int) -> dict[str, Any]:
        """The metrics of a step that has ended; {} where there are none."""


class Unknown(dict[str, Any]):
    """Metrics of a run that has not begun: each is 0."""

    def __missing__(self, key: str) -> float:
        return 0.0


class Nobody:
    """A call that nobody answers."""

    def wait(self) -> list[dict[str, Any]]:
        """No answers, at once."""
        return []


class Tracing:
    """A Steering without a run: every wait is over at once."""

    def __init__(self) -> None:
        self.open_step = 1
        self.total_steps = TRACED_STEPS
        self.last_train: dict[str, Any] = Unknown()

    def steps(self) -> Iterator[int]:
        """The first few steps."""
        for step in range(1, min(self.total_steps, TRACED_STEPS) + 1):
            self.open_step = step
            yield step

    def call(self, *_args: Any, **_keywords: Any) -> list[dict[str, Any]]:
        """Nobody answers."""
        return []

    def submit(self, *_args: Any, **_keywords: Any) -> Nobody:
        """Nobody answers."""
        return Nobody()

    def admit(self, _step: int) -> int:
        """Nothing is admitted."""
        return 0

    def wait_batch(self, _step: int) -> int:
        """Nothing is ready."""
        return 0

    def figures(self, _step: int) -> dict[str, Any]:
        """Each figure is 0."""
        return Unknown()

    def _nothing(self, *_args: Any, **_keywords: Any) -> None:
        """Nothing happens."""

    form = train = train_both = publish = evaluate = checkpoint = passed = note = _nothing
