"""What is known of a run from outside: the controller's last word, the supervisor's log, the kernel, the store."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlmq.buffer.store import Lease, Waiting
from rlmq.common.control import Death, Member, Snapshot
from rlmq.controller.process_states import ProcessState

SUPERVISOR, CONTROLLER, SERVER = "supervisor", "controller-0", "redis-0"
"""Names of the processes that are no workers."""


@dataclass(frozen=True, slots=True)
class StageRows:
    """Rows of one stage that are not past it; `after` are the stages which must have worked on them before."""

    table: str
    stage: str
    after: tuple[str, ...]
    ready: int
    leased: int
    lease_s: float
    leases: tuple[Lease, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a run at the moment `now_unix_s`.

    `processes` are those known by pid, by name (`controller-0`, `redis-0`, `supervisor`, `rollout-1`); `server`
    says why the Redis server gave no answer ("" when it did); `ended` is the exit code of a run that is over.
    """

    now_unix_s: float
    run_id: str
    snapshot: Snapshot | None
    processes: Mapping[str, ProcessState] = field(default_factory=dict)
    stages: Sequence[StageRows] = ()
    waiting: Sequence[Waiting] = ()
    deaths: Sequence[Death] = ()
    server: str = ""
    ended: int | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the controller's last word."""
        return self.now_unix_s - self.snapshot.at_unix_s if self.snapshot is not None else 0.0

    def alive(self) -> bool:
        """Whether any process of the run is there, or may be on another host."""
        snapshot = self.snapshot
        elsewhere = snapshot is not None and snapshot.ended is None and CONTROLLER not in self.processes
        return elsewhere or any(state.standing != "gone" for state in self.processes.values())

    def member(self, name: str) -> Member | None:
        """The worker of this name, as the controller knows it."""
        return self._members.get(name)

    @functools.cached_property
    def _members(self) -> Mapping[str, Member]:
        return {one.name: one for one in self.snapshot.members} if self.snapshot is not None else {}

    def last_death(self, name: str) -> Death | None:
        """The newest line of the supervisor's log about this process."""
        return next((death for death in reversed(self.deaths) if death.name == name), None)
