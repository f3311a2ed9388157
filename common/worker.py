"""The worker loop: every role's process runs it.

A role does two kinds of work: *calls* from the controller, and *row work* that it claims from its stage.
The loop takes calls first, then rows, and sleeps until a doorbell rings or rows become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from rlmq.common.calls import Activity, Calls, Desired
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder

CallHandler = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(slots=True)
class WorkerContext:
    """What a role gets from its process.

    `activity` tells the controller (and the metrics) what this worker does from now on;
    `progress` marks that work moved on (leases are extended by progress, not by being alive);
    `serving` tells which policy version a rollout worker generates with from now on;
    `stopping` becomes true when the process was told to end: long work gives up at its next boundary;
    `call` is the id of the call that it works on, for the lineage; "" while it works on rows of its stage;
    `waits` names what it sleeps for ("rows of stage reward"), until work moves on again.
    """

    recipe: Recipe
    recipe_folder: Path
    run: RunFolder
    role: str
    rank: int
    world_size: int
    incarnation: int
    calls: Calls
    log: structlog.stdlib.BoundLogger
    activity: Callable[[Activity], None]
    progress: Callable[[], None]
    serving: Callable[[int], None]
    desired: Callable[[], Desired | None]
    stopping: Callable[[], bool]
    waits: Callable[[str], None] = lambda _: None
    call: Callable[[], str] = lambda: ""


class Role(Protocol):
    """A role's own part of a worker process. All methods run on the compute thread."""

    def handlers(self) -> Mapping[str, CallHandler]:
        """Methods that the controller may call, by name."""

    def work(self) -> bool:
        """Claim and do one unit of row work; False when nothing was ready. Called in phase `run` only."""

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until rows may be ready, `wake_fd` is readable or the time is over."""

    def close(self) -> None:
        """Give back what the role holds; called once, also after errors."""
