"""Faults planted in the plan, each a small substitution in its source, and the invariant that must notice it."""

from __future__ import annotations

import sys
import types
from pathlib import Path

from model.mutants import Mutant

from rlmq.controller import plan

MUTANTS = (
    Mutant(
        "forgotten_call",
        "a call that the server has forgotten is not submitted again",
        ("never_forgotten",),
        "plan.py",
        "return _with_call(state, event.call_id, _replace(call, told=frozenset())), (submit,)",
        "return _with_call(state, event.call_id, _replace(call, told=frozenset())), ()",
    ),
    Mutant(
        "hasty_resolve",
        "a call is resolved with its first result",
        ("resolved_once",),
        "plan.py",
        "if answered.issuperset(event.ranks):",
        "if answered:",
    ),
    Mutant(
        "resolved_again",
        "a resolved call stays open",
        ("resolved_once", "never_forgotten"),
        "plan.py",
        "return _replace(state, calls=calls), (Resolve(",
        "return state, (Resolve(",
    ),
    Mutant(
        "believed_report",
        "a report counts as a result",
        ("resolved_once",),
        "plan.py",
        "call = _replace(call, told=call.told | {event.rank})",
        "call = _replace(call, told=call.told | {event.rank}, answered=call.answered | {event.rank})",
    ),
    Mutant(
        "old_incarnation",
        "a late heartbeat of a dead process counts",
        ("newest_incarnation",),
        "plan.py",
        "return event.incarnation > known.incarnation",
        "return True",
    ),
    Mutant(
        "old_goodbye",
        "a late goodbye of a dead process counts",
        ("newest_incarnation",),
        "plan.py",
        "if known is not None and (event.incarnation < known.incarnation or known.gone):",
        "if known is not None and known.gone:",
    ),
    Mutant(
        "no_polls",
        "the records are read after reports only",
        ("polls_suffice", "never_forgotten"),
        "plan.py",
        "        yield Look(call_id=call_id)\n",
        "        yield from ()\n",
    ),
    Mutant(
        "released_mesh",
        "a trainer rank that died is not waited for",
        ("mesh_waits",),
        "plan.py",
        "for rank in call.silent if not _fixed(state, call.role) else ():",
        "for rank in call.silent:",
    ),
    Mutant(
        "released_worker",
        "a worker that is there is released",
        ("released_absent",),
        "plan.py",
        "elif worker is not None and not worker.present:",
        "elif worker is not None:",
    ),
    Mutant(
        "never_released",
        "a worker that never came is waited for",
        ("polls_suffice",),
        "plan.py",
        "if worker is None and at - call.since > state.silence_s:",
        "if False:",
    ),
    Mutant(
        "same_version",
        "a changed desired state keeps its version",
        ("versions_grow",),
        "plan.py",
        "version=1 if known is None else known.version + 1,",
        "version=1 if known is None else known.version,",
    ),
    Mutant(
        "old_epoch",
        "a controller of before is listened to",
        ("epoch_fenced",),
        "plan.py",
        "if event.epoch <= state.epoch:",
        "if event.epoch == state.epoch:",
    ),
    Mutant(
        "paused_deadline",
        "deadlines run while the run is paused",
        ("paused_in_peace",),
        "plan.py",
        "return tuple(_replace(wait, until_unix_s=None) for wait in found)",
        "return tuple(found)",
    ),
    Mutant(
        "impatient",
        "progress elsewhere does not count",
        ("paused_in_peace",),
        "plan.py",
        "until_unix_s=max(call.since, moved_at) + call.deadline_s,",
        "until_unix_s=call.since + call.deadline_s,",
    ),
    Mutant(
        "nameless",
        "a deadline does not say who is waited for",
        ("culprit_named", "never_forgotten"),
        "plan.py",
        "f\"{wait.what} waits for {few(wait.on) or 'nobody'}\"",
        'f"{wait.what}"',
    ),
    Mutant(
        "repeated_order",
        "an order that is read again counts again",
        ("orders_once",),
        "plan.py",
        "if event.number != state.orders + 1:",
        "if event.number > state.orders + 1:",
    ),
)


def planted(mutant: Mutant) -> types.ModuleType:
    """`rlmq.controller.plan` with the fault in it, beside the right one."""
    file = Path(plan.__file__)
    module = types.ModuleType(f"mutant_{mutant.name}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # msgspec looks its annotations up there
    exec(compile(mutant.mutated(file.read_text(encoding="utf-8")), str(file), "exec"), module.__dict__)
    return module


def table() -> str:
    """The mutants as a Markdown table."""
    lines = [f"| `{m.name}` | {m.fault} | {', '.join(f'`{one}`' for one in m.killed_by)} |" for m in MUTANTS]
    return "\n".join(["| mutant | fault | killed by |", "|---|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    print(table())
