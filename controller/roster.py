"""The roster: which worker processes are there, what they do, and which policy version they serve."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmq.common.messages import Goodbye, Heartbeat


@dataclass(slots=True)
class Member:
    """One worker process as its newest heartbeat tells it."""

    role: str
    rank: int
    incarnation: int
    activity: str = "idle"
    ready: bool = False
    serving: int = -1
    progress: int = 0
    activity_s: dict[str, float] = field(default_factory=dict)
    last_seen: float = field(default_factory=time.monotonic)
    gone: bool = False

    @property
    def name(self) -> str:
        """`role-rank`."""
        return f"{self.role}-{self.rank}"


class Roster:
    """Members by role and rank. A newer incarnation replaces an older one; older reports are ignored."""

    def __init__(self, workers: Mapping[str, int]) -> None:
        self._workers = dict(workers)
        self._members: dict[tuple[str, int], Member] = {}
        self._moved_at = time.monotonic()

    def heard(self, beat: Heartbeat) -> None:
        """Take a heartbeat in."""
        key = (beat.role, beat.rank)
        member = self._members.get(key)
        if member is not None and beat.incarnation < member.incarnation:
            return
        if member is None or beat.incarnation > member.incarnation:
            member = self._members[key] = Member(beat.role, beat.rank, beat.incarnation)
            self._moved_at = time.monotonic()
        if (beat.progress, beat.activity, beat.ready) != (member.progress, member.activity, member.ready):
            self._moved_at = time.monotonic()
        member.activity, member.ready = beat.activity, beat.ready
        member.serving, member.progress = beat.serving, beat.progress
        member.activity_s, member.last_seen = beat.activity_s, time.monotonic()

    def left(self, goodbye: Goodbye) -> None:
        """Take a goodbye in."""
        member = self._members.get((goodbye.role, goodbye.rank))
        if member is not None and member.incarnation == goodbye.incarnation:
            member.gone, member.ready = True, False

    def moved(self) -> None:
        """Note progress that the controller saw elsewhere (in the store)."""
        self._moved_at = time.monotonic()

    @property
    def still_s(self) -> float:
        """Seconds without any progress of any worker."""
        return time.monotonic() - self._moved_at

    def missing(self) -> list[str]:
        """Workers that should be there and are not ready."""
        return [
            f"{role}-{rank}"
            for role, count in self._workers.items()
            for rank in range(count)
            if (role, rank) not in self._members or not self._members[role, rank].ready
        ]

    def all_gone(self) -> bool:
        """Whether every member that was ever seen has left."""
        return all(m.gone for m in self._members.values())

    def present(self) -> list[Member]:
        """Members that have not left."""
        return [m for m in self._members.values() if not m.gone]

    def of(self, role: str) -> list[Member]:
        """Present members of a role, by rank."""
        return sorted((m for m in self.present() if m.role == role), key=lambda m: m.rank)

    def activity_s(self, role: str) -> dict[str, float]:
        """Seconds by activity, summed over a role's members."""
        total: dict[str, float] = {}
        for member in self.of(role):
            for activity, seconds in member.activity_s.items():
                total[activity] = total.get(activity, 0.0) + seconds
        return total
