"""`rlmq status`: what a run does now, or how it ended, in one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from rlmq.buffer.store import TableCounts
from rlmq.cli_buffer import new_console, new_grid, plain, print_json
from rlmq.cli_log import order_words
from rlmq.common.control import Death, Member, Snapshot
from rlmq.common.errors import ExitCode
from rlmq.controller.culprit import explain
from rlmq.controller.wait_graph import age
from rlmq.run_view import Look, look_at

_WORKERS_SHOWN = 16
_ASKED_TO_END = frozenset({0, 130, 143, -2, -15})
"""Exit codes of processes that ended because they were told to."""


def status_command(run: str | None, *, folder: Path, as_json: bool) -> int:
    """`rlmq status`: 0 for a run that is up or ended well, its own exit code where it ended otherwise, 3 when it is
    neither up nor ended."""
    look = look_at(folder, run)
    if as_json:
        print_json(_status_json(look))
    else:
        _print_status(look)
    evidence = look.evidence
    if evidence.alive():
        return int(ExitCode.OK)
    return int(ExitCode.DEPENDENCY) if evidence.ended is None else evidence.ended


def restarts(deaths: Sequence[Death]) -> dict[str, int]:
    """How often each process was started again because it had ended although nobody asked it to."""
    found: dict[str, int] = {}
    last: dict[str, Death] = {}
    for death in deaths:
        before = last.get(death.name)
        if death.what == "started" and before is not None and before.what != "started":
            found[death.name] = found.get(death.name, 0) + (before.exit_code not in _ASKED_TO_END)
        last[death.name] = death
    return found


def _status_json(look: Look) -> dict[str, Any]:
    evidence, snapshot = look.evidence, look.evidence.snapshot
    answer = explain(evidence)
    return {
        "run": look.run.run_id,
        "up": evidence.alive(),
        "ended": None if evidence.alive() else evidence.ended,
        "as_of_s": round(evidence.age_s, 3) if snapshot is not None else None,
        "verdict": answer.verdict,
        "why": answer.sentence,
        "control": msgspec.to_builtins(snapshot) if snapshot is not None else None,
        "processes": {name: [state.pid, state.standing] for name, state in evidence.processes.items()},
        "restarts": restarts(evidence.deaths),
        "buffer": {name: _counts_json(counts) for name, counts in look.stored.counts.items()},
        "open_orders": [msgspec.to_builtins(order) for order in look.stored.open_orders],
    }


def _counts_json(counts: TableCounts) -> dict[str, Any]:
    stages = {name: {"ready": rows, "leased": counts.leased.get(name, 0)} for name, rows in counts.ready.items()}
    return {"live": counts.live, "stages": stages}


def _print_status(look: Look) -> None:
    console = new_console()
    evidence, snapshot = look.evidence, look.evidence.snapshot
    answer = explain(evidence)
    if snapshot is None:
        console.print(Text(plain(answer.sentence), style="bold"))
        return
    console.print(Text(_headline(look, snapshot), style="bold"))
    if evidence.alive():
        again = restarts(evidence.deaths)
        console.print(_controller(look, snapshot, again.get("controller-0", 0)))
        _print_members(snapshot.members, again, evidence.age_s)
        if snapshot.missing:
            console.print(f"missing: {', '.join(snapshot.missing)}")
        for line in _buffer(look):
            console.print(line)
        for order in look.stored.open_orders:
            console.print(f"open order: {order_words(order)}, {age(evidence.now_unix_s - order.at_unix_s)} ago")
    elif snapshot.members:
        last = ", ".join(f"{one.name} {one.activity}" for one in snapshot.members[:_WORKERS_SHOWN])
        console.print(f"at the end: {last}")
    console.print(Text(plain(answer.sentence)), soft_wrap=True)


def _headline(look: Look, snapshot: Snapshot) -> str:
    phase = snapshot.phase if look.evidence.alive() else "over"
    step = f"step {snapshot.step} of {snapshot.steps}"
    return f"{look.run.run_id}: phase {phase}, {step}, policy version {snapshot.policy_version}"


def _controller(look: Look, snapshot: Snapshot, restarted: int) -> str:
    started_again = f", started again {restarted} times" if restarted else ""
    where = f"process {snapshot.pid} on {snapshot.host}"
    return f"controller: epoch {snapshot.epoch}, {where}, wrote {age(look.evidence.age_s)} ago{started_again}"


def _print_members(members: Sequence[Member], again: dict[str, int], older_s: float) -> None:
    figures = ("serves", "heartbeat", "progress", "restarts")
    grid = new_grid("worker", "activity", "call", *figures, "waits for", right=figures)
    for one in members[:_WORKERS_SHOWN]:
        activity = one.activity if one.ready else "starting"
        grid.add_row(
            one.name,
            "lost" if one.lost else activity,
            one.call,
            str(one.serving) if one.serving >= 0 else "",
            age(one.silent_s + older_s),
            age(one.still_s + older_s),
            str(again.get(one.name, 0)),
            plain(one.wait),
        )
    console = new_console()
    console.print(grid)
    if len(members) > _WORKERS_SHOWN:
        console.print(f"and {len(members) - _WORKERS_SHOWN} more (--json has all)")


def _buffer(look: Look) -> Iterator[str]:
    if look.stored.server:
        yield f"buffer: the server does not answer ({look.stored.server})"
    for name, counts in look.stored.counts.items():
        stages = [
            f"{stage} {rows} ready {counts.leased.get(stage, 0)} leased" for stage, rows in counts.ready.items()
        ]
        yield f"buffer {name}: {counts.live} live rows; {', '.join(stages)}"
