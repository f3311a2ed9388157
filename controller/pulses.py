"""What changes with every heartbeat and is no event of the plan: when a worker was heard, when anything moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlmq.common.control import Member
from rlmq.common.messages import Heartbeat
from rlmq.controller.events import Silent
from rlmq.controller.plan import State


@dataclass(slots=True)
class Pulses:
    """The newest heartbeat of each worker, and when it came. Times are those of events."""

    moved_at: float
    _newest: dict[tuple[str, int], tuple[Heartbeat, float]] = field(default_factory=dict)

    def heard(self, beat: Heartbeat, at: float) -> None:
        """Take a heartbeat in. Progress, another activity and a new process are moves of the run."""
        before = self._newest.get((beat.role, beat.rank))
        if before is not None and beat.incarnation < before[0].incarnation:
            return
        if before is None or _moves(beat) != _moves(before[0]):
            self.moved_at = at
        self._newest[beat.role, beat.rank] = (beat, at)

    def forgive(self, at: float) -> None:
        """Nobody was silent: this process was not there to listen."""
        self._newest = {who: (beat, at) for who, (beat, _) in self._newest.items()}

    def silent(self, at: float, silence_s: float) -> Iterator[Silent]:
        """Workers that were not heard for longer than `silence_s`."""
        for (role, rank), (beat, heard_at) in self._newest.items():
            if at - heard_at > silence_s:
                yield Silent(at=at, role=role, rank=rank, incarnation=beat.incarnation, since=heard_at)

    def activity_s(self, role: str) -> dict[str, float]:
        """Seconds by activity, summed over a role's workers."""
        total: dict[str, float] = {}
        for (of, _), (beat, _at) in self._newest.items():
            for activity, seconds in beat.activity_s.items() if of == role else ():
                total[activity] = total.get(activity, 0.0) + seconds
        return total

    def members(self, state: State, at: float) -> tuple[Member, ...]:
        """Workers that have not left, for the snapshot."""
        return tuple(
            Member(
                role=worker.role,
                rank=worker.rank,
                incarnation=worker.incarnation,
                pid=beat.pid,
                host=beat.host,
                activity=beat.activity,
                ready=worker.ready,
                serving=worker.serving,
                silent_s=round(at - heard_at, 3),
                still_s=round(beat.still_s + at - heard_at, 3),
                call=beat.call,
                wait=beat.wait,
                wait_s=round(beat.wait_s + at - heard_at, 3) if beat.wait else 0.0,
                lost=worker.lost,
            )
            for who, (beat, heard_at) in sorted(self._newest.items())
            if (worker := state.members.get(who)) is not None and not worker.gone
        )


def _moves(beat: Heartbeat) -> tuple[int, int, str, bool]:
    return beat.incarnation, beat.progress, beat.activity, beat.ready
