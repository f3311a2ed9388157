"""Who is at the end of the wait graph: one verdict, one process, one sentence. A pure function.

The culprit is the one that everything else waits for: a process that cannot move (stopped, gone), else the one at
the end of the controller's chain that made no progress for the longest time. Whether that is a fault or honest long
work a reader of messages cannot know, so it says what the process does and until when it is given.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlmq.common.control import Snapshot, Wait
from rlmq.common.processes import describe_exit
from rlmq.controller.evidence import CONTROLLER, SERVER, SUPERVISOR, Evidence
from rlmq.controller.process_states import ProcessState
from rlmq.controller.wait_graph import WORKERS, Edge, Suspect, age, edges, suspects

Verdict = Literal["moves", "still", "stuck", "paused", "starting", "ended"]

STILL_S = 3.0
"""Without progress for so long, work is called still."""
_STALE_S = 3.0
"""Heartbeats come once a second, snapshots twice."""
_SILENT_HERE_S = 10.0
UNREAPED_S = 2.0
"""A supervisor looks four times a second at its children."""
_BUSY = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """The graph, and one sentence that names the culprit (its name is empty where there is none)."""

    verdict: Verdict
    culprit: str
    sentence: str
    edges: tuple[Edge, ...]
    pid: int | None = None


def explain(evidence: Evidence) -> Answer:
    """The wait graph and its culprit."""
    snapshot = evidence.snapshot
    if snapshot is None:
        found = _over(evidence) or _broken(evidence) or _begins(evidence)
    else:
        found = (
            _over(evidence)
            or _broken(evidence)
            or _without_controller(evidence, snapshot)
            or _without_server(evidence)
            or _silent(evidence, snapshot)
            or _followed(evidence, snapshot)
        )
    return replace(found, edges=tuple(edges(evidence)))


# -- the run is over ---------------------------------------------------------------------------------------------


def _over(evidence: Evidence) -> Answer | None:
    if evidence.alive():
        return None
    ago = f"{age(evidence.age_s)} ago" if evidence.snapshot is not None else "at an unknown time"
    run = f"run {evidence.run_id}"
    if evidence.ended is not None:
        cause = _cause(evidence, evidence.ended)
        step = _step(evidence)
        return _answer("ended", "", f"{run} ended {ago} with exit {evidence.ended}{step}{cause}")
    if evidence.snapshot is None and not evidence.deaths:
        return _answer("ended", "", f"{run} has never had a controller, and none of its processes is there")
    supervisor = evidence.processes.get(SUPERVISOR)
    died = "killed" if supervisor is None else f"killed with its supervisor, process {supervisor.pid},"
    text = f"{run} was {died} and wrote no end; its last word was {ago}{_step(evidence)}{_last_wait(evidence)}"
    name = "" if supervisor is None else SUPERVISOR
    return _answer("ended", name, f"{text}; the command that began it continues it", supervisor)


def _cause(evidence: Evidence, code: int) -> str:
    """What the process said that ended the run."""
    if code == 0:
        return ""
    for death in reversed(evidence.deaths):
        if death.exit_code not in (0, None):
            said = [line.removeprefix("error: ") for line in death.last_lines if line.startswith("error: ")]
            words = said[-1] if said else death.why or describe_exit(death.exit_code or 0)
            return f"; {death.name} said: {words}" if said else f"; {death.name}: {words}"
    return ""


def _last_wait(evidence: Evidence) -> str:
    waits = evidence.snapshot.waits if evidence.snapshot is not None else ()
    return f", when {waits[0].who} waited for {waits[0].what}{_on(waits[0])}" if waits else ""


# -- processes that cannot move ----------------------------------------------------------------------------------


def _broken(evidence: Evidence) -> Answer | None:
    """A process that is stopped or gone: the supervisor first, which would mend the others; then whom most need."""
    chain = {one.name for one in suspects(evidence)}
    names = sorted(evidence.processes, key=lambda name: _place(evidence, chain, name))
    for standing in ("stopped", "gone"):
        for name in names:
            state = evidence.processes[name]
            if state.standing == standing and not _has_left(evidence, name):
                found = _unnoticed(evidence, name, state)
                return found or _answer("stuck", name, _fault(evidence, name, state), state)
    for name in names:
        state = evidence.processes[name]
        if state.stopped_child is not None and name not in (SUPERVISOR, CONTROLLER, SERVER):
            child = f"its child process {state.stopped_child} is stopped (SIGSTOP; kill -CONT lets it go on)"
            return _answer("stuck", name, f"{_task(evidence, name)}: {child}", state)
    return None


def _unnoticed(evidence: Evidence, name: str, state: ProcessState) -> Answer | None:
    """A child of the supervisor that ended, and the supervisor does not look: then that one is stuck."""
    supervisor, last = evidence.processes.get(SUPERVISOR), evidence.last_death(name)
    if supervisor is None or last is None or last.what != "started" or state.unreaped_s < UNREAPED_S:
        return None
    text = f"the supervisor does not notice that {name}, process {state.pid}, has ended"
    return _answer("stuck", SUPERVISOR, f"{text}: {_state(evidence, SUPERVISOR, supervisor)}", supervisor)


def _place(evidence: Evidence, chain: Container[str], name: str) -> tuple[int, float]:
    """The less, the more others need this process."""
    order = (SUPERVISOR, SERVER, CONTROLLER)
    place = order.index(name) if name in order else len(order) + (name not in chain)
    member = evidence.member(name)
    return place, -(member.still_s if member is not None else 0.0)


def _has_left(evidence: Evidence, name: str) -> bool:
    """A worker that ended well is missed by nobody."""
    last = evidence.last_death(name)
    return last is not None and last.what != "started" and last.exit_code == 0


def _fault(evidence: Evidence, name: str, state: ProcessState) -> str:
    effect = {
        SUPERVISOR: "the supervisor starts nothing again that dies, and hears no Ctrl-C",
        SERVER: "the Redis server answers nobody",
        CONTROLLER: f"the controller gives no calls and has written nothing for {age(evidence.age_s)}",
    }.get(name, "")
    return f"{effect or _task(evidence, name)}: {_state(evidence, name, state)}"


def _task(evidence: Evidence, name: str) -> str:
    """What a worker has in hand, as the graph tells it."""
    for suspect in suspects(evidence):
        if suspect.name == name:
            return _words(suspect)
    member = evidence.member(name)
    if member is None:
        return f"{name} has not joined"
    doing = f"works on call {member.call}" if member.call else f"is {member.activity} and nobody waits for it yet"
    return f"{name} {doing}, no progress for {age(member.still_s + evidence.age_s)}"


def _state(evidence: Evidence, name: str, state: ProcessState) -> str:
    process = f"process {state.pid}"
    match state.standing:
        case "stopped":
            return f"{process} is stopped (SIGSTOP; kill -CONT {state.pid} lets it go on)"
        case "gone":
            return f"{process} is gone{_end_of(evidence, name)}"
        case "disk":
            return f"{process} waits for the disk (state D)"
        case "elsewhere":
            return f"{process} is on another host"
        case "runs" | "sleeps":
            if _computes(state):
                return f"{process} computes ({state.busy:.0%} of a core)"
            return f"{process} sleeps" + (f", its child {state.busy_child} computes" if state.busy_child else "")


def _computes(state: ProcessState) -> bool:
    return state.standing == "runs" or state.busy >= _BUSY


def _end_of(evidence: Evidence, name: str) -> str:
    last = evidence.last_death(name)
    if last is None or last.what == "started" or last.exit_code is None:
        return " and its end is not recorded"
    ago = age(evidence.now_unix_s - last.at_unix_s)
    line = f", its last line: {last.last_lines[-1]}" if last.last_lines else ""
    return f" since {ago} with {describe_exit(last.exit_code)}{line}"


# -- processes that say nothing ----------------------------------------------------------------------------------


def _begins(evidence: Evidence) -> Answer:
    state = evidence.processes.get(CONTROLLER)
    where = f": {_state(evidence, CONTROLLER, state)}" if state is not None else ""
    return _answer("starting", CONTROLLER, f"the controller of run {evidence.run_id} is starting{where}", state)


def _without_controller(evidence: Evidence, snapshot: Snapshot) -> Answer | None:
    """A snapshot that is older than a living controller would leave it."""
    if evidence.age_s < _STALE_S:
        return None
    state, last = evidence.processes.get(CONTROLLER), evidence.last_death(CONTROLLER)
    if last is not None and last.what == "started" and last.pid != snapshot.pid:
        return _begins(evidence)
    if evidence.server:
        return None
    quiet = f"the controller has written nothing for {age(evidence.age_s)}"
    if state is None:
        text = f"{quiet}: process {snapshot.pid} of host {snapshot.host} cannot be seen from here"
        return _answer("stuck", CONTROLLER, text)
    return _answer("stuck", CONTROLLER, f"{quiet}: {_state(evidence, CONTROLLER, state)}", state)


def _without_server(evidence: Evidence) -> Answer | None:
    """A server that does not answer here; it answers the controller while that one writes."""
    if not evidence.server or evidence.age_s < _STALE_S:
        return None
    state = evidence.processes.get(SERVER)
    where = f": {_state(evidence, SERVER, state)}" if state is not None else ""
    return _answer("stuck", SERVER, f"everybody waits for the Redis server ({evidence.server}){where}", state)


def _silent(evidence: Evidence, snapshot: Snapshot) -> Answer | None:
    """A worker whose heartbeats have ceased; one whose process is here may merely have had no core for a moment."""
    silent = [
        one
        for one in snapshot.members
        if one.silent_s > (_SILENT_HERE_S if one.name in evidence.processes else _STALE_S)
    ]
    if not silent:
        return None
    one = max(silent, key=lambda member: member.silent_s)
    state = evidence.processes.get(one.name) or ProcessState(one.pid, "elsewhere")
    where = f" of host {one.host}" if state.standing == "elsewhere" else ""
    task = f"on call {one.call}" if one.call else one.activity
    text = f"{one.name} ({task}) has sent no heartbeat for {age(one.silent_s)}"
    return _answer("stuck", one.name, f"{text}: {_state(evidence, one.name, state)}{where}", state)


# -- the chain ---------------------------------------------------------------------------------------------------


def _followed(evidence: Evidence, snapshot: Snapshot) -> Answer:
    if snapshot.missing and all(wait.what == WORKERS for wait in snapshot.waits):
        return _starting(evidence, snapshot.missing)
    found = [one for one in suspects(evidence) if snapshot.phase != "pause" or _has_work(evidence, one.name)]
    worst = max(found, key=lambda one: _guilt(evidence, one), default=None)
    if snapshot.phase == "pause" and (worst is None or worst.still_s < STILL_S):
        text = f"run {evidence.run_id} is paused{_step(evidence)}: `rlmq resume` lets it go on"
        return _answer("paused", "", text)
    if worst is None:
        busy = [f"{one.name} is {one.activity}" for one in snapshot.members if one.activity != "idle"]
        return _moving(evidence, ", ".join(busy[:3]) or "at this moment nobody is busy")
    state = evidence.processes.get(worst.name)
    if worst.name in snapshot.missing:
        return _starting(evidence, (worst.name,))
    if worst.still_s < STILL_S:
        text = f"{worst.name} {worst.doing}, progress {age(worst.still_s)} ago"
        return _moving(evidence, text, worst.name, state)
    text = _words(worst)
    if state is not None:
        text += f": {_state(evidence, worst.name, state)}"
    if worst.left_s is not None:
        text += f"; without progress that ends in {age(worst.left_s)}" if worst.left_s > 0 else ""
    return _answer("still", worst.name, text, state)


def _has_work(evidence: Evidence, name: str) -> bool:
    """In a pause, workers leave everything alone that they have not in hand."""
    member = evidence.member(name)
    return member is not None and member.activity != "idle"


def _moving(evidence: Evidence, text: str, name: str = "", state: ProcessState | None = None) -> Answer:
    waits = evidence.snapshot.waits if evidence.snapshot is not None else ()
    for_what = f"{waits[0].who} waits for {waits[0].what}; " if waits else ""
    return _answer("moves", name, f"run {evidence.run_id} moves{_step(evidence)}: {for_what}{text}", state)


def _starting(evidence: Evidence, missing: Sequence[str]) -> Answer:
    name = missing[0]
    state = evidence.processes.get(name)
    where = _state(evidence, name, state) if state is not None else "it has not joined, and its pid is not known"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    last = evidence.last_death(name)
    since = f", started {age(evidence.now_unix_s - last.at_unix_s)} ago" if last and last.what == "started" else ""
    return _answer("starting", name, f"the run waits for {name}{more} to be ready: {where}{since}", state)


def _guilt(evidence: Evidence, one: Suspect) -> tuple[bool, bool, bool, float]:
    """Who of several is waited for: still, not asleep for something itself, computing, still for the longest."""
    member, state = evidence.member(one.name), evidence.processes.get(one.name)
    computes = state is not None and _computes(state)
    asleep = member is not None and bool(member.wait) and not computes
    return one.still_s >= STILL_S, not asleep, computes, one.still_s


# -- words -------------------------------------------------------------------------------------------------------


def _answer(verdict: Verdict, culprit: str, sentence: str, state: ProcessState | None = None) -> Answer:
    return Answer(verdict, culprit, sentence, (), state.pid if state is not None else None)


def _words(one: Suspect) -> str:
    return f"{one.name} {one.doing}, no progress for {age(one.still_s)}"


def _step(evidence: Evidence) -> str:
    snapshot = evidence.snapshot
    return f", step {snapshot.step} of {snapshot.steps}" if snapshot is not None and snapshot.steps else ""


def _on(wait: Wait) -> str:
    return f" ({', '.join(wait.on)})" if wait.on else ""
