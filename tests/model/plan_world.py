"""A world around the plan: records that come back older, workers that die and rejoin, a wire that loses reports.

Everything is a plain object; the shell does what `rlmq.controller.dispatch` does, with the same words.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec

from rlmq.common.calls import Desired
from rlmq.common.control import FIXED, Order
from rlmq.controller import events

INVARIANTS = {
    "resolved_once": "a call that was asked for is resolved once, with one result of each of its ranks",
    "asked_only": "no call is resolved that was not asked for, and no result counts that is of another call",
    "never_forgotten": "a call that is not resolved is open, and whoever it waits for is named",
    "newest_incarnation": "an older incarnation never takes the place of a newer one",
    "versions_grow": "a role's desired state only gets greater versions, of the newest epoch",
    "epoch_fenced": "an older epoch changes nothing",
    "mesh_waits": "a rank of a role that cannot come and go is waited for",
    "released_absent": "a rank is released only when its worker is not there",
    "paused_in_peace": "no deadline ends a run that is paused, or one whose workers move on",
    "culprit_named": "a deadline names a rank that has no result",
    "orders_once": "each order counts once, in order",
    "polls_suffice": "with every doorbell and report lost, the loop comes to the same end",
    "replays": "the same events give the same commands",
}
WORKERS = {"prompts": 1, "rollout": 2, "reward": 2, "actor": 2}
SILENCE_S, DEADLINE_S, POLL_S = 5.0, 12.0, 1.0
LOOP: tuple[tuple[tuple[str, str, tuple[int, ...] | None], ...], ...] = (
    (("prompts", "admit", None),),
    (("actor", "train", None),),
    (("actor", "send", (0,)), ("rollout", "receive", (0, 1))),
    (("reward", "failures", None),),
)
STEPS = 2


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, detail: object) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant}: {INVARIANTS[invariant]}: {detail}")


def holds(invariant: str, condition: bool, detail: object = "") -> None:
    """Raise `Broken` unless the condition holds."""
    if not condition:
        raise Broken(invariant, detail)


@dataclass
class Records:
    """The server's truth."""

    epoch: int = 0
    step: int = 1
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    results: dict[str, dict[int, str]] = field(default_factory=dict)
    desired: dict[str, Desired] = field(default_factory=dict)
    incarnations: dict[tuple[str, int], int] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    wishes: dict[str, Any] = field(default_factory=dict)

    def next(self, role: str, rank: int) -> str | None:
        """The oldest call without a result of this rank."""
        for call_id, ranks in self.ranks.items():
            if self.roles[call_id] == role and rank in ranks and rank not in self.results[call_id]:
                return call_id
        return None


@dataclass
class Process:
    """A worker process; one that is stopped keeps the call that it had in hand."""

    role: str
    rank: int
    incarnation: int
    hand: str | None = None
    moves: bool = True


class World:
    """One run: records, worker processes, reports under way, and the controller's shell around a plan."""

    def __init__(self, plan: ModuleType) -> None:
        self.plan = plan
        self.at = 1000.0
        self.records = Records()
        self.older = [copy.deepcopy(self.records)]
        self.processes = {(role, rank): self._join(role, rank) for role, n in WORKERS.items() for rank in range(n)}
        self.ghosts: list[Process] = []
        self.wire: list[events.Event] = []
        self.versions: dict[str, int] = {}
        self.moved_at = self.at
        self.broken = False
        self.begin()

    # -- the controller ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A controller begins: the next epoch, its loop at the open step."""
        self.records.epoch += 1
        self.epoch = self.records.epoch
        self.state = self.plan.State()
        self.lines: list[events.Line] = []
        self.asked: dict[str, tuple[str, str, tuple[int, ...] | None]] = {}
        self.values: dict[str, dict[int, str]] = {}
        self.resolved: dict[str, dict[int, str]] = {}
        self.heard_at: dict[tuple[str, int], float] = {}
        self.place = 0
        self.failed = ""
        wishes = self.records.wishes
        self.feed(
            events.Began(
                at=self.at,
                epoch=self.epoch,
                step=self.records.step,
                workers=WORKERS,
                quorum=dict.fromkeys(WORKERS, 1),
                silence_s=SILENCE_S,
                desired=tuple(self.records.desired.values()),
                **wishes,
            )
        )

    def ask(self) -> None:
        """The loop goes on when nothing is open."""
        if self.asked or self.finished or self.state.phase == "pause":
            return
        if self.place == 0:
            self.feed(events.Opened(at=self.at, step=self.records.step))
        for ordinal, (role, method, ranks) in enumerate(LOOP[self.place]):
            call_id = f"{self.records.step}/{self.place}.{ordinal}/{role}.{method}"
            self.asked[call_id] = (role, method, ranks)
            self.feed(
                events.Asked(
                    at=self.at, call_id=call_id, role=role, method=method, ranks=ranks, deadline_s=DEADLINE_S
                )
            )
        self._step_on()

    def _step_on(self) -> None:
        """The calls of the place are resolved: the next place, the next step."""
        if self.asked or self.failed:
            return
        self.place += 1
        if self.place == len(LOOP):
            self.place, self.records.step = 0, self.records.step + 1

    @property
    def finished(self) -> bool:
        """Whether the loop is at its end."""
        return self.records.step > STEPS

    def feed(self, event: events.Event) -> None:
        """As the dispatch does: advance, carry out, and so on."""
        try:
            self._feed(event)
        except Broken:
            self.broken = True
            raise

    def _feed(self, event: events.Event) -> None:
        waiting = deque((event,))
        while waiting:
            event = waiting.popleft()
            state, commands = self.plan.advance(self.state, event)
            if state is not self.state or any(not isinstance(one, events.Look) for one in commands):
                self.lines.append(events.Line(at=event.at, epoch=self.epoch, event=event, commands=commands))
            self._watch(state)
            self.state = state
            waiting.extend(follows for one in commands if (follows := self._carry_out(one)) is not None)

    def _carry_out(self, command: events.Command) -> events.Event | None:
        records = self.records
        records.epoch = max(records.epoch, self.epoch)
        match command:
            case events.Submit(call_id=call_id, role=role, ranks=ranks):
                holds("asked_only", call_id in self.asked, call_id)
                records.ranks.setdefault(call_id, ranks)
                records.roles.setdefault(call_id, role)
                records.results.setdefault(call_id, {})
                return self._looked(call_id)
            case events.Look(call_id=call_id):
                return self._looked(call_id)
            case events.Release(call_id=call_id, rank=rank):
                self._judge_release(call_id, rank)
                if call_id in records.results:
                    records.results[call_id].setdefault(rank, f"{call_id}:{rank}:released")
                return self._looked(call_id)
            case events.Resolve(call_id=call_id, ranks=ranks):
                self._resolve(call_id, ranks)
            case events.Want(desired=desired):
                newest = self.versions.get(desired.role, 0)
                holds("versions_grow", desired.version > newest, f"{desired.version} after {newest}")
                holds("versions_grow", desired.epoch == self.epoch, f"epoch {desired.epoch} in {self.epoch}")
                self.versions[desired.role] = desired.version
                records.desired[desired.role] = desired
            case events.Keep(phase=phase, orders=orders, settings=settings):
                before = records.wishes.get("orders", 0)
                holds("orders_once", orders == before + 1, f"order {orders} after {before}")
                records.wishes = {"phase": phase, "orders": orders, "settings": settings}
                self._judge_settings(settings)
            case events.Fail(error=error, exit_code=code):
                self._judge_failure(error, code)
                self.failed = error
        return None

    def _looked(self, call_id: str) -> events.Looked:
        ranks = self.records.ranks.get(call_id)
        if ranks is None:
            return events.Looked(at=self.at, call_id=call_id, known=False)
        results = self.records.results[call_id]
        for rank, value in results.items():
            self.values.setdefault(call_id, {}).setdefault(rank, value)
        return events.Looked(at=self.at, call_id=call_id, known=True, ranks=ranks, answered=tuple(results))

    def _resolve(self, call_id: str, ranks: tuple[int, ...]) -> None:
        holds("resolved_once", call_id not in self.resolved, f"{call_id} again")
        holds("asked_only", call_id in self.asked, call_id)
        values = self.values.pop(call_id, {})
        holds("resolved_once", all(rank in values for rank in ranks), f"{call_id} of {ranks} with {values}")
        holds("resolved_once", ranks == self.records.ranks[call_id], f"{call_id}: {ranks}")
        holds("asked_only", all(values[rank].startswith(f"{call_id}:{rank}:") for rank in ranks), values)
        self.resolved[call_id] = values
        del self.asked[call_id]

    def tick(self, moved: bool = False) -> None:
        """Time goes by; the shell looks at the records."""
        self.at += POLL_S
        if moved:
            self.moved_at = self.at
        for number, order in enumerate(self.records.orders[self.state.orders :], self.state.orders + 1):
            self.feed(events.Ordered(at=self.at, number=number, order=order))
        for (role, rank), since in self.heard_at.items():
            incarnation = self.state.members[role, rank].incarnation
            self.feed(events.Silent(at=self.at, role=role, rank=rank, incarnation=incarnation, since=since))
        self.feed(events.Tick(at=self.at, moved_at=self.moved_at))
        for call_id in self.asked:
            holds("never_forgotten", call_id in self.records.ranks, f"{call_id} is not in the records")
        self._step_on_if_begun()

    def _step_on_if_begun(self) -> None:
        if self.resolved and not self.asked and self._place_was_asked():
            self._step_on()

    def _place_was_asked(self) -> bool:
        prefix = f"{self.records.step}/{self.place}."
        return any(call_id.startswith(prefix) for call_id in self.resolved)

    def deliver(self, report: events.Event) -> None:
        """A report arrives."""
        if isinstance(report, events.Heard):
            known = self.state.members.get((report.role, report.rank))
            if known is None or report.incarnation >= known.incarnation:
                self.heard_at[report.role, report.rank] = self.at
        self.feed(events_at(report, self.at))
        self._step_on_if_begun()

    # -- judgement -----------------------------------------------------------------------------------------------

    def _watch(self, state: Any) -> None:
        """What must hold between one state and the next."""
        for who, worker in state.members.items():
            before = self.state.members.get(who)
            if before is not None and state.epoch == self.state.epoch:
                grows = worker.incarnation >= before.incarnation
                holds("newest_incarnation", grows, f"{worker} after {before}")
        holds("epoch_fenced", state.epoch >= self.state.epoch, f"{state.epoch} after {self.state.epoch}")

    def _judge_release(self, call_id: str, rank: int) -> None:
        role = self.asked[call_id][0]
        holds("mesh_waits", role not in FIXED, f"{call_id} {rank}")
        worker = self.state.members.get((role, rank))
        there = worker is not None and worker.incarnation and not worker.gone and not worker.lost
        holds("released_absent", not there, f"{call_id} {rank}: {worker}")

    def _judge_failure(self, error: str, code: int) -> None:
        if code != 5:
            return
        holds("paused_in_peace", self.state.phase != "pause", error)
        holds("paused_in_peace", self.at - self.moved_at > DEADLINE_S, error)
        silent = [
            f"{call.role}-{rank}"
            for call in self.state.calls.values()
            for rank in call.ranks
            if rank in call.silent
        ]
        holds("culprit_named", any(name in error for name in silent), f"{error}: {silent}")

    def _judge_settings(self, settings: events.Settings) -> None:
        told = [order.settings["train.steps"] for order in self.records.orders if order.verb == "set"]
        kept = [value for _, value in settings.get("train.steps", [])]
        holds("orders_once", len(set(kept)) == len(kept) and set(kept) <= set(told), f"{kept} of {told}")
        steps = [step for step, _ in settings.get("train.steps", [])]
        holds("orders_once", steps == sorted(steps), settings)

    def check(self) -> None:
        """What must hold at rest."""
        self.broken = True
        open_calls = set(self.state.calls)
        holds("never_forgotten", open_calls == set(self.asked), f"{open_calls} of {set(self.asked)}")
        named = {wait.what: wait.on for wait in self.plan.waits(self.state, self.moved_at)}
        for call_id, call in self.state.calls.items():
            on = named.get(f"call {call_id}", ())
            holds("never_forgotten", bool(on) == bool(call.silent), f"{call_id} waits for {on}")
        self.broken = False

    # -- workers --------------------------------------------------------------------------------------------------

    def _join(self, role: str, rank: int) -> Process:
        number = self.records.incarnations.get((role, rank), 0) + 1
        self.records.incarnations[role, rank] = number
        return Process(role, rank, number)

    def work(self, process: Process) -> None:
        """Take the next call, or finish the one in hand; the report may be lost."""
        if process.hand is None:
            process.hand = self.records.next(process.role, process.rank)
            return
        call_id, process.hand = process.hand, None
        newest = self.records.incarnations[process.role, process.rank]
        if process.incarnation < newest or process.rank not in self.records.ranks.get(call_id, ()):
            return
        value = f"{call_id}:{process.rank}:{process.incarnation}"
        self.records.results[call_id].setdefault(process.rank, value)
        self.moved_at = self.at
        self.wire.append(events.Told(at=self.at, call_id=call_id, rank=process.rank))

    def beat(self, process: Process) -> None:
        """A heartbeat is sent."""
        doing = "idle" if process.hand is None else "training"
        self.wire.append(
            events.Heard(
                at=self.at,
                role=process.role,
                rank=process.rank,
                incarnation=process.incarnation,
                activity=doing,
                ready=True,
            )
        )

    def restart(self, who: tuple[str, int], *, leaves_ghost: bool) -> None:
        """A process dies, or hangs and comes back later as a ghost; a newer one takes its place."""
        if leaves_ghost:
            self.ghosts.append(self.processes[who])
        self.processes[who] = self._join(*who)

    def go_back(self, which: int) -> None:
        """The server comes back older. Incarnations, step and epochs are asked for again by who lives."""
        old = copy.deepcopy(self.older[which % len(self.older)])
        newer = self.records
        old.incarnations = newer.incarnations
        old.orders, old.wishes, old.desired = newer.orders, newer.wishes, newer.desired
        old.step, old.epoch = newer.step, newer.epoch
        self.records = old
        for process in [*self.processes.values(), *self.ghosts]:
            process.hand = None


def events_at(event: events.Event, at: float) -> events.Event:
    """The same event, arriving now."""
    return msgspec.structs.replace(event, at=at)
