"""The plan: what the controller knows and decides, as a pure function of what it hears.

::

    (state, event) -> (state, commands)          no clock, no wire, no file: times come in events

    records, reports, time --events--> plan --commands--> records, doorbells, the loop

It owns membership, the versions of desired states, the life of calls, the operators' phase, and who waits for whom.
`rlmq.controller.dispatch` turns the world into events and carries commands out; `control_log.jsonl` has both, so
that `replay` can say whether a run was steered as its code says.

    asked --Submit--> open --told, looked--> every rank answered --Resolve--> the loop has the results
                       |  the record is gone (the server came back older) --Submit--> open
                       |  a rank of a role that may come and go is not there --Release--> answered
                       +--no progress until the deadline--> Fail, with the names of the silent ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from rlmq.common.calls import Desired, Phase
from rlmq.common.control import FIXED, Wait
from rlmq.common.errors import ExitCode, IntegrityError
from rlmq.controller.events import (
    Asked,
    Began,
    Command,
    Ended,
    Event,
    Fail,
    Heard,
    Keep,
    Left,
    Line,
    Look,
    Looked,
    Lost,
    Opened,
    Ordered,
    Refuse,
    Release,
    Resolve,
    Served,
    Settings,
    Silent,
    Submit,
    Tick,
    Told,
    Waits,
    Want,
    Wanted,
)

CONTROLLER = "controller-0"
OWN_SETTINGS: Mapping[str, type] = {
    "checkpoint.every_steps": int,
    "evaluate.every_steps": int,
    "deadlines.step_s": float,
    "train.steps": int,
}
"""Recipe keys that an operator may set for the loop itself."""

_FEW = 12
_replace = msgspec.structs.replace


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process: `gone` after its goodbye, with `exit_code`; `lost` when it was silent for too long."""

    role: str
    rank: int
    incarnation: int
    activity: str = "idle"
    ready: bool = False
    serving: int = -1
    call: str = ""
    gone: bool = False
    exit_code: int = 0
    lost: bool = False

    @property
    def name(self) -> str:
        """`role-rank`."""
        return f"{self.role}-{self.rank}"

    @property
    def present(self) -> bool:
        """Whether it can be counted on."""
        return not self.gone and not self.lost


class OpenCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the loop waits for: which ranks say that they answered, and which did by the records."""

    role: str
    method: str
    ranks: tuple[int, ...]
    since: float
    deadline_s: float
    told: frozenset[int] = frozenset()
    answered: frozenset[int] = frozenset()

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks without a result."""
        return tuple(rank for rank in self.ranks if rank not in self.answered)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the controller knows. `still_from`: deadlines do not count from before this time."""

    epoch: int = 0
    workers: dict[str, int] = {}
    quorum: dict[str, int] = {}
    fixed: tuple[str, ...] = ()
    silence_s: float = 0.0
    members: dict[tuple[str, int], Worker] = {}
    calls: dict[str, OpenCall] = {}
    desired: dict[str, Desired] = {}
    phase: Phase = "run"
    orders: int = 0
    settings: Settings = {}
    step: int = 0
    wait: Waits | None = None
    still_from: float = 0.0


Advanced: TypeAlias = tuple[State, tuple[Command, ...]]


def advance(state: State, event: Event) -> Advanced:
    """What an event changes, and what is to be done about it. The same state object: nothing changed."""
    return _RULES[type(event)](state, event)


def replay(lines: Iterable[Line], state: State | None = None) -> State:
    """Follow a recorded log.

    Raises:
        IntegrityError: the plan would have ordered something else; the line is named.
    """
    state = state or State()
    for number, line in enumerate(lines, 1):
        state, commands = advance(state, line.event)
        if commands != line.commands:
            raise IntegrityError(
                f"line {number} of the control log, {type(line.event).__name__}",
                got=f"commands {msgspec.json.encode(line.commands).decode()}",
                expected=msgspec.json.encode(commands).decode(),
            )
    return state


# -- membership -------------------------------------------------------------------------------------------------


def _began(state: State, event: Began) -> Advanced:
    """What an earlier epoch knew of workers and calls does not count: both come again."""
    if event.epoch <= state.epoch:
        return state, ()
    fresh = State(
        epoch=event.epoch,
        workers=event.workers,
        quorum=event.quorum,
        fixed=event.fixed,
        silence_s=event.silence_s,
        desired={one.role: one for one in event.desired},
        phase=event.phase,
        orders=event.orders,
        settings=event.settings,
        step=event.step,
        still_from=event.at,
    )
    return _want(fresh, dict.fromkeys((*fresh.workers, *fresh.desired)))


def tells(state: State, event: Heard) -> bool:
    """Whether a heartbeat has something new."""
    known = state.members.get((event.role, event.rank))
    if known is None:
        return True
    if event.incarnation != known.incarnation or known.gone:
        return event.incarnation > known.incarnation
    return known != _heard_of(event)


def _heard_of(event: Heard) -> Worker:
    return Worker(
        role=event.role,
        rank=event.rank,
        incarnation=event.incarnation,
        activity=event.activity,
        ready=event.ready,
        serving=event.serving,
        call=event.call,
    )


def _heard(state: State, event: Heard) -> Advanced:
    if not tells(state, event):
        return state, ()
    state = _with_member(state, _heard_of(event))
    joined = bool(state.workers) and event.role not in state.desired
    return _want(state, (event.role,)) if joined else (state, ())


def _with_member(state: State, worker: Worker) -> State:
    return _replace(state, members={**state.members, (worker.role, worker.rank): worker})


def _silent(state: State, event: Silent) -> Advanced:
    known = state.members.get((event.role, event.rank))
    silent_s = event.at - event.since
    if known is None or known.incarnation != event.incarnation or not known.present or silent_s <= state.silence_s:
        return state, ()
    state = _with_member(state, _replace(known, lost=True, ready=False))
    lost = Lost(role=known.role, rank=known.rank, incarnation=known.incarnation, silent_s=round(silent_s, 3))
    return state, (lost, *_releases(state, event.at))


def _left(state: State, event: Left) -> Advanced:
    known = state.members.get((event.role, event.rank))
    if known is not None and (event.incarnation < known.incarnation or known.gone):
        return state, ()
    gone = Worker(
        role=event.role, rank=event.rank, incarnation=event.incarnation, gone=True, exit_code=event.exit_code
    )
    state = _with_member(state, gone)
    commands = tuple(_releases(state, event.at))
    if event.fatal and state.phase != "stop" and event.role in state.workers:
        text = event.error or f"{gone.name} ended with exit code {event.exit_code}"
        return state, (*commands, Fail(error=text, exit_code=event.exit_code))
    return state, commands


def _served(state: State, event: Served) -> Advanced:
    members = dict(state.members)
    for rank in event.ranks:
        if (known := members.get((event.role, rank))) is not None:
            members[event.role, rank] = _replace(known, serving=event.version)
    return _replace(state, members=members), ()


def present(state: State, role: str | None = None) -> list[Worker]:
    """Members (of a role) that are there, by rank."""
    found = [one for one in state.members.values() if one.present and role in (None, one.role)]
    return sorted(found, key=lambda one: one.rank)


def missing(state: State) -> tuple[str, ...]:
    """Places of the recipe without a ready worker."""
    places = ((role, rank) for role, count in state.workers.items() for rank in range(count))
    return tuple(f"{role}-{rank}" for role, rank in places if not _is_ready(state, role, rank))


def lacking(state: State) -> tuple[str, ...]:
    """The missing workers of those roles that have no quorum."""
    ready: dict[str, int] = dict.fromkeys(state.workers, 0)
    for one in state.members.values():
        if one.ready and one.present and one.role in ready:
            ready[one.role] += 1
    short = {role for role, count in state.quorum.items() if ready.get(role, 0) < count}
    return tuple(name for name in missing(state) if name.rpartition("-")[0] in short)


def few(names: Sequence[str]) -> str:
    """The names, or the first of many and how many more."""
    more = len(names) - _FEW
    return ", ".join([*names[:_FEW], f"{more} more"] if more > 0 else names)


def _fixed(state: State, role: str) -> bool:
    return role in FIXED or role in state.fixed


def _is_ready(state: State, role: str, rank: int) -> bool:
    known = state.members.get((role, rank))
    return known is not None and known.present and known.ready


# -- calls ------------------------------------------------------------------------------------------------------


def _asked(state: State, event: Asked) -> Advanced:
    ranks = event.ranks if event.ranks is not None else _everyone(state, event.role)
    call = OpenCall(role=event.role, method=event.method, ranks=ranks, since=event.at, deadline_s=event.deadline_s)
    submit = Submit(call_id=event.call_id, role=event.role, method=event.method, ranks=ranks)
    return _with_call(state, event.call_id, call), (submit,)


def _everyone(state: State, role: str) -> tuple[int, ...]:
    """Of a role that may come and go those that are ready now, if any; else every rank of the recipe."""
    ready = tuple(one.rank for one in present(state, role) if one.ready) if not _fixed(state, role) else ()
    return ready or tuple(range(state.workers.get(role, 0)))


def _with_call(state: State, call_id: str, call: OpenCall) -> State:
    return _replace(state, calls={**state.calls, call_id: call})


def _told(state: State, event: Told) -> Advanced:
    """The records are read when the last rank has answered, not for each."""
    call = state.calls.get(event.call_id)
    if call is None or event.rank not in call.ranks or event.rank in call.told | call.answered:
        return state, ()
    call = _replace(call, told=call.told | {event.rank})
    look = (Look(call_id=event.call_id),) if call.told.issuperset(call.silent) else ()
    return _with_call(state, event.call_id, call), look


def _looked(state: State, event: Looked) -> Advanced:
    call = state.calls.get(event.call_id)
    if call is None:
        return state, ()
    if not event.known:
        submit = Submit(call_id=event.call_id, role=call.role, method=call.method, ranks=call.ranks)
        return _with_call(state, event.call_id, _replace(call, told=frozenset())), (submit,)
    answered = call.answered | (frozenset(event.answered) & frozenset(event.ranks))
    if answered.issuperset(event.ranks):
        calls = {name: one for name, one in state.calls.items() if name != event.call_id}
        return _replace(state, calls=calls), (Resolve(call_id=event.call_id, ranks=event.ranks),)
    if (event.ranks, answered) == (call.ranks, call.answered):
        return state, ()
    return _with_call(state, event.call_id, _replace(call, ranks=event.ranks, answered=answered)), ()


def _releases(state: State, at: float) -> Iterator[Release]:
    """Ranks of open calls whose workers may come and go, and are not there: gone, lost, or never heard."""
    for call_id, call in state.calls.items():
        for rank in call.silent if not _fixed(state, call.role) else ():
            worker = state.members.get((call.role, rank))
            if worker is None and at - call.since > state.silence_s:
                yield Release(call_id=call_id, rank=rank, why="never heard")
            elif worker is not None and not worker.present:
                yield Release(call_id=call_id, rank=rank, why="left" if worker.gone else "lost")


def _polls(state: State, at: float) -> Iterator[Command]:
    """Reports may be lost: the records have the truth."""
    yield from _releases(state, at)
    for call_id in state.calls:
        yield Look(call_id=call_id)


# -- waits ------------------------------------------------------------------------------------------------------


def waits(state: State, moved_at: float) -> tuple[Wait, ...]:
    """What the loop waits for, on whom, since when, and when it gives up."""
    moved_at = max(moved_at, state.still_from)
    found = [
        Wait(
            who=CONTROLLER,
            what=f"call {call_id}",
            on=tuple(f"{call.role}-{rank}" for rank in call.silent),
            since_unix_s=call.since,
            until_unix_s=max(call.since, moved_at) + call.deadline_s,
        )
        for call_id, call in state.calls.items()
    ]
    if (wait := state.wait) is not None:
        until = wait.until
        if until is None and wait.deadline_s is not None:
            until = max(wait.since, moved_at) + wait.deadline_s
        found.append(Wait(who=CONTROLLER, what=wait.what, on=wait.on, since_unix_s=wait.since, until_unix_s=until))
    if state.phase == "pause":
        return tuple(_replace(wait, until_unix_s=None) for wait in found)
    return tuple(found)


def _overdue(state: State, event: Tick) -> Iterator[Fail]:
    """One failure that names everybody who is waited for for too long."""
    late = [
        wait
        for wait in waits(state, event.moved_at)
        if wait.until_unix_s is not None and event.at > wait.until_unix_s
    ]
    if late:
        still = few([name for name in missing(state) if all(name not in wait.on for wait in late)])
        lines = "; ".join(f"{wait.what} waits for {few(wait.on) or 'nobody'}" for wait in late)
        silent_s = event.at - max(event.moved_at, state.still_from)
        text = f"the run: got no progress for {silent_s:.0f} s: {lines}{'; missing: ' + still if still else ''}"
        yield Fail(
            error=f"{text}. Read the log of who is waited for, or raise the deadline", exit_code=ExitCode.DEADLINE
        )


# -- what operators and the loop want -----------------------------------------------------------------------------


def _want(state: State, roles: Iterable[str], *, policy_version: int | None = None) -> Advanced:
    """New versions of these roles' desired states, where they differ from the newest."""
    desired = dict(state.desired)
    commands = []
    for role in roles:
        known = desired.get(role)
        made = Desired(
            role=role,
            version=1 if known is None else known.version + 1,
            phase="run" if state.phase == "drain" else state.phase,
            policy_version=(known.policy_version if known else 0) if policy_version is None else policy_version,
            epoch=state.epoch,
            settings={key: steps for key, steps in state.settings.items() if role_of(key) == role},
        )
        if known is None or _replace(made, version=known.version) != known:
            desired[role] = made
            commands.append(Want(desired=made))
    return _replace(state, desired=desired), tuple(commands)


def role_of(key: str) -> str:
    """The role that an operator's setting is for: `controller`, `reward`, or "" when it cannot be set."""
    if key in OWN_SETTINGS:
        return "controller"
    parts = key.split(".")
    return "reward" if len(parts) >= 3 and parts[0] == "reward" and parts[-1] == "weight" else ""


def setting(state: State, key: str, step: int) -> float | None:
    """What operators set a key of the loop to for this step; None: nothing."""
    newest = [value for first, value in state.settings.get(key, ()) if first <= step]
    return OWN_SETTINGS[key](newest[-1]) if newest else None


def _ordered(state: State, event: Ordered) -> Advanced:
    if event.number != state.orders + 1:
        return state, ()  # known, or read too early: the records give them in order
    state = _replace(state, orders=event.number)
    order, commands = event.order, list[Command]()
    match order.verb:
        case "pause" if state.phase == "run":
            state = _replace(state, phase="pause")
        case "resume" if state.phase == "pause":
            state = _replace(state, phase="run", still_from=event.at)
        case "drain" if state.phase in ("run", "pause"):
            state = _replace(state, phase="drain", still_from=event.at)
        case "set":
            state, commands = _set(state, order.settings, event.number)
        case "stop" if state.phase != "stop":
            by = f" by {order.by}" if order.by else ""
            text = f"run: got the order to stop{by}. The same command goes on"
            commands.append(Fail(error=text, exit_code=ExitCode.TERMINATED))
        case verb:
            commands.append(Refuse(number=event.number, why=f"{verb} in phase {state.phase}"))
    state, wants = _want(state, state.desired)
    return state, (_kept(state), *wants, *commands)


def _kept(state: State) -> Keep:
    """After an end, the next controller begins in phase `run`."""
    phase = "run" if state.phase == "stop" else state.phase
    return Keep(phase=phase, orders=state.orders, settings=state.settings)


def _set(state: State, changes: Mapping[str, str], number: int) -> tuple[State, list[Command]]:
    """They count from the step after the open one: a redo of the open one sees what it saw before."""
    settings, refused = dict(state.settings), list[Command]()
    for key, value in changes.items():
        why = _wrong(key, value)
        if why:
            refused.append(Refuse(number=number, why=why))
        else:
            earlier = [one for one in settings.get(key, []) if one[0] <= state.step]
            settings[key] = [*earlier, (state.step + 1, value)]
    return _replace(state, settings=settings), refused


def _wrong(key: str, value: str) -> str:
    if not role_of(key):
        return f"{key} cannot be set while the run goes on"
    try:
        OWN_SETTINGS.get(key, float)(value)
    except ValueError:
        return f"{key} cannot be {value!r}"
    return ""


def _ended(state: State, _event: Ended) -> Advanced:
    state = _replace(state, phase="stop", calls={}, wait=None)
    state, wants = _want(state, state.desired)
    return state, (_kept(state), *wants)


def _wanted(state: State, event: Wanted) -> Advanced:
    return _want(state, (event.role,), policy_version=event.policy_version)


def _opened(state: State, event: Opened) -> Advanced:
    return _replace(state, step=event.step), ()


def _waits(state: State, event: Waits) -> Advanced:
    return _replace(state, wait=event if event.what else None), ()


def _tick(state: State, event: Tick) -> Advanced:
    return state, (*_polls(state, event.at), *_overdue(state, event))


_RULES: Mapping[type, Callable[[State, Any], Advanced]] = {
    Began: _began,
    Heard: _heard,
    Silent: _silent,
    Left: _left,
    Asked: _asked,
    Told: _told,
    Looked: _looked,
    Wanted: _wanted,
    Served: _served,
    Opened: _opened,
    Waits: _waits,
    Ordered: _ordered,
    Ended: _ended,
    Tick: _tick,
}
