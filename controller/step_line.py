"""The step's line of metrics, from its first call until its weights are served everywhere."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmq.common.metrics import STEP, set_step_figures
from rlmq.controller import plan
from rlmq.controller.dispatch import Dispatch
from rlmq.controller.trackers import Trackers

_WORK = (("rollout", "generating"), ("reward", "scoring"), ("actor", "training"))


class StepLine:
    """Figures of the open step, which become a line of `metrics.jsonl`."""

    def __init__(self, dispatch: Dispatch, trackers: Trackers) -> None:
        self._dispatch = dispatch
        self._trackers = trackers
        self._began = time.monotonic()
        self._figures: dict[str, Any] = {}
        self._activity_before: dict[str, dict[str, float]] = {}
        self.newest: dict[str, Any] = {}
        """The line of the step that ended last."""

    @property
    def open(self) -> bool:
        """Whether the step has not ended."""
        return bool(self._figures)

    def begin(self, step: int) -> None:
        """The step's first call is about to be made."""
        self._began = time.monotonic()
        self._figures = {"kind": "train", "step": step}
        self._activity_before = self._activities()

    def add(self, figures: Mapping[str, Any]) -> None:
        """Figures of the system; they replace others of their name."""
        self._figures.update(figures)

    def note(self, figures: Mapping[str, Any]) -> None:
        """Figures of the user's; what the line has already stays."""
        self._figures = {**figures, **self._figures}

    def end(self, version: int, sync_s: float) -> None:
        """Write the line: this policy version is served, after a transfer of so many seconds."""
        seconds = time.monotonic() - self._began
        line = self._figures
        tokens = line.get("generated_tokens", line.get("trained_tokens", 0))
        line.update(
            sync_s=round(sync_s, 4),
            policy_version=version,
            step_s=round(seconds, 4),
            ended_unix_s=round(time.time(), 4),
            tokens_per_s=round(tokens / seconds, 1),
            time_shares=self._time_shares(seconds, sync_s),
        )
        self._trackers.log(line)
        set_step_figures({**line, "seconds": seconds})
        STEP.set(line["step"])
        self.newest, self._figures = line, {}

    def _activities(self) -> dict[str, dict[str, float]]:
        return {role: self._dispatch.pulses.activity_s(role) for role, _ in _WORK}

    def _time_shares(self, seconds: float, sync_s: float) -> dict[str, float]:
        """Share of the step's time in each activity (mean over the role's workers, 0 to 1)."""
        shares: dict[str, float] = {}
        now = self._activities()
        for role, activity in _WORK:
            workers = max(1, len(plan.present(self._dispatch.state, role)))
            before = self._activity_before.get(role, {}).get(activity, 0.0)
            spent = now[role].get(activity, 0.0) - before
            shares[activity] = round(min(1.0, max(0.0, spent / workers / seconds)), 4)
        shares["syncing"] = round(min(1.0, sync_s / seconds), 4)
        return shares


def line_of(metrics: Path, step: int) -> dict[str, Any]:
    """The newest line of a step that has ended; {} where there is none."""
    if not metrics.is_file():
        return {}
    lines = (json.loads(line) for line in metrics.read_text("utf-8").splitlines())
    found = [line for line in lines if line["kind"] == "train" and line["step"] == step]
    return found[-1] if found else {}
