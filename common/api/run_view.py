"""Looking at a run from outside: its records, its processes on this machine, and its server where one answers.

Every source may be missing; what remains is shown. Nothing here waits for longer than about two seconds.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.buffer.store import Lease, Table, TableCounts, Waiting
from rlmq.cli_buffer import buffer_of
from rlmq.common.control import OBEYED, Death, Order, Snapshot
from rlmq.common.errors import RlmqError
from rlmq.common.recipe.load import load_recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.addresses import server_url
from rlmq.controller.culprit import UNREAPED_S
from rlmq.controller.evidence import CONTROLLER, SERVER, SUPERVISOR, Evidence, StageRows
from rlmq.controller.process_states import ProcessState, ProcessTable
from rlmq.controller.records import read_deaths, read_snapshot, supervisor_of
from rlmq.controller.runs import find_run, read_summary

_PING_S = 1.0
_SILENT = ("gone", "stopped")


@dataclass(frozen=True, slots=True)
class Stored:
    """What the run's server told; `server` says why it told nothing."""

    tables: Sequence[Table] = ()
    counts: Mapping[str, TableCounts] = field(default_factory=dict)
    leases: Mapping[str, Sequence[Lease]] = field(default_factory=dict)
    waiting: Sequence[Waiting] = ()
    open_orders: Sequence[Order] = ()
    server: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a run."""

    run: RunFolder
    stored: Stored
    evidence: Evidence


def look_at(folder: Path, run: str | None) -> Look:
    """Look at a run, live or over.

    Raises:
        UsageError: there is no such run.
    """
    found = find_run(folder, run)
    known = known_processes(found, read_snapshot(found), read_deaths(found))
    table = ProcessTable(known)
    stored = _stored(found, known)
    states = table.states()
    if _unnoticed(states, read_deaths(found)):
        states = table.states(after_s=UNREAPED_S)
    snapshot, deaths = read_snapshot(found), read_deaths(found)
    newer = known_processes(found, snapshot, deaths)
    if fresh := {name: one for name, one in newer.items() if one[0] != known.get(name, (0,))[0]}:
        states |= ProcessTable(fresh).states()
    evidence = Evidence(
        now_unix_s=time.time(),
        run_id=found.run_id,
        snapshot=snapshot,
        processes=states,
        stages=tuple(_stage_rows(stored)),
        waiting=stored.waiting,
        deaths=deaths,
        server=stored.server,
        ended=_ended(found, snapshot),
    )
    return Look(found, stored, evidence)


def _unnoticed(states: Mapping[str, ProcessState], deaths: Sequence[Death]) -> bool:
    """Whether a process has ended and its supervisor, which lives, has not said so yet: it needs a moment."""
    newest = {death.name: death.what for death in deaths}
    gone = [name for name, state in states.items() if state.standing == "gone" and newest.get(name) == "started"]
    return bool(gone) and SUPERVISOR in states and states[SUPERVISOR].standing not in _SILENT


def _ended(run: RunFolder, snapshot: Snapshot | None) -> int | None:
    code = snapshot.ended if snapshot is not None else None
    return code if code is not None else read_summary(run).get("exit")


def known_processes(
    run: RunFolder, snapshot: Snapshot | None, deaths: Sequence[Death]
) -> dict[str, tuple[int, float]]:
    """Name → (pid, when it was known to run; 0: it ended) of the run's processes here, by whoever told last."""
    known: dict[str, tuple[int, float]] = {}
    for death in deaths:
        known[death.name] = (death.pid, death.at_unix_s if death.what == "started" else 0.0)
    if snapshot is not None:
        members = [(one.name, one.pid, one.host) for one in snapshot.members]
        for name, pid, host in ((CONTROLLER, snapshot.pid, snapshot.host), *members):
            if pid and host == platform.node() and known.get(name, (0, 0.0))[1] < snapshot.at_unix_s:
                known[name] = (pid, snapshot.at_unix_s)
    supervisor = supervisor_of(run)
    if supervisor is not None and supervisor[0] not in {pid for pid, _ in known.values()}:
        known.setdefault(SUPERVISOR, supervisor)
    return known


def _stored(run: RunFolder, known: Mapping[str, tuple[int, float]]) -> Stored:
    """What the server tells; a server that is not there, or is stopped, is not asked."""
    state = ProcessTable({SERVER: known[SERVER]}).states()[SERVER] if SERVER in known else None
    if state is not None and state.standing in _SILENT:
        return Stored(server=f"its process {state.pid} is {state.standing}")
    try:
        url = server_url(load_recipe(run.recipe).recipe, run)
        with redis.Redis.from_url(url, socket_timeout=_PING_S, socket_connect_timeout=_PING_S) as client:
            client.ping()
        with buffer_of(run) as buffer:
            store, names = buffer.store, [table.name for table in buffer.tables]
            return Stored(
                buffer.tables,
                {name: store.counts(name) for name in names},
                {name: store.leases(name) for name in names},
                store.waiting(),
                _open_orders(url, run),
            )
    except (redis.RedisError, RlmqError) as error:
        return Stored(server=str(error.got) if isinstance(error, RlmqError) else str(error))


def _open_orders(url: str, run: RunFolder) -> Sequence[Order]:
    calls = RedisCalls(url, run_id=run.run_id, retry_s=_PING_S)
    try:
        obeyed = calls.noted(OBEYED) or {}
        return calls.orders(int(obeyed.get("orders", 0)))
    finally:
        calls.close()


def _stage_rows(stored: Stored) -> Iterator[StageRows]:
    for table in stored.tables:
        counts = stored.counts[table.name]
        for stage in table.stages:
            if stage.ended:
                continue
            yield StageRows(
                table.name,
                stage.name,
                table.before(stage.name),
                counts.ready.get(stage.name, 0),
                counts.leased.get(stage.name, 0),
                stage.lease_s,
                tuple(one for one in stored.leases[table.name] if one.stage == stage.name),
            )
