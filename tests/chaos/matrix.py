"""`make matrix`: each role, in each of its activities, killed (`kill -9`) and stopped (SIGSTOP, SIGCONT).

Several faults share a run: the next one waits for the recovery from the one before, and for a process that is in
an activity which is still wanted. Controller and server have no activity of their own; theirs is that of the run.
Runs follow each other until every cell is met; each must end with exit code 0, with every sample accounted for by
its files and the weights of an undisturbed run. Printed: seconds from the fault (from SIGCONT) to the next progress
of the run, with the process back.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos.chaos import Budget, judge, recovered, run_to_end, tell, timed
from chaos.live import ROOT, SLOW_REWARD, SLOW_TASK, LiveRun, Seen, until

RUN_ACTIVITIES = ("generating", "scoring", "training", "syncing", "checkpointing", "evaluating")
_IDLE_OR_SCORING = ("scoring", "idle")
CELLS = {
    "controller": RUN_ACTIVITIES,
    "redis": RUN_ACTIVITIES,
    "prompts": ("idle",),
    "rollout": ("generating", "syncing", "idle"),
    "reward": _IDLE_OR_SCORING,
    "actor": ("training", "syncing", "checkpointing", "idle"),
    "recorder": ("evaluating", "idle"),
    "critic": ("scoring", "training", "checkpointing", "idle"),
    "reference": _IDLE_OR_SCORING,
    "safety": _IDLE_OR_SCORING,
}
_SAFETY = {
    "name": "safety",
    "function": f"{SLOW_TASK}:safe",
    "reads": ["response_text"],
    "writes": {"safe": "bool"},
    "keep": "safe",
    "reason": "unsafe",
}
_OFTEN = (SLOW_REWARD, "checkpoint.keep=1000", "checkpoint.every_steps=2", "evaluate.every_steps=2")
FAULTS = ("kill -9", "stop")
_RECOVERY_S, _RUNS, _RUN_S = 120.0, 14, 600.0


@dataclass(frozen=True)
class Part:
    """A recipe, and the roles that are disturbed in its runs."""

    recipe: str
    roles: tuple[str, ...]
    overrides: tuple[str, ...] = _OFTEN


PARTS = (
    Part("tiny.yaml", ("controller", "redis", "prompts", "rollout", "reward", "actor", "recorder")),
    Part(
        "algorithms/ppo.yaml",
        ("critic", "reference", "safety"),
        # Slowly: a policy that has learned to say next to nothing leaves no group to train on.
        (*_OFTEN, "train.lr=1e-3", "critic.lr=1e-3", "algorithm.kl_coef=0.01", f"nodes={json.dumps([_SAFETY])}"),
    ),
)


@dataclass(frozen=True)
class Cell:
    """What is to be disturbed, when, and how."""

    role: str
    activity: str
    fault: str


@dataclass
class Done:
    """A cell that was met. `recovered_s` is None when the run did not get further in time."""

    cell: Cell
    name: str
    step: int
    recovered_s: float | None


class Sweep:
    """Meets cells in one run after the other."""

    def __init__(self, cells: Sequence[Cell], rng: random.Random) -> None:
        self._rng = rng
        self.open = list(cells)
        self.done: list[Done] = []

    def follow(self, live: LiveRun, limit_s: float) -> None:
        """Disturb this run until it is over, or no cell is left that it can still take."""
        budget = Budget()
        deadline = time.monotonic() + limit_s
        while self.open and not live.over and time.monotonic() < deadline:
            seen = live.seen()
            found = [(cell, name) for cell in self.open for name in _names(seen, cell) if budget.allows(name)]
            if found:
                self._disturb(live, seen, *self._rng.choice(found), budget)
                time.sleep(self._rng.uniform(0.0, 0.3))
            else:
                time.sleep(0.002)

    def _disturb(self, live: LiveRun, seen: Seen, cell: Cell, name: str, budget: Budget) -> None:
        pid = seen.pid[name]
        if cell.fault == "kill -9":
            live.signal(pid, signal.SIGKILL)
            budget.spend(name)
        else:
            live.signal(pid, signal.SIGSTOP)
            time.sleep(self._rng.uniform(1.0, 3.0))
            live.signal(pid, signal.SIGCONT)
        at, before, killed = time.monotonic(), live.progress(), cell.fault == "kill -9"
        back = until(lambda: live.over or recovered(live, name, seen, before, replaced=killed), _RECOVERY_S)
        recovered_s = round(time.monotonic() - at, 2) if back and not live.over else None
        if live.over and live.up.returncode == 0:  # the run ended before it could show progress
            return
        self.open.remove(cell)
        self.done.append(Done(cell, name, seen.step, recovered_s))
        print(f"step {seen.step:3d}  {cell.fault:7} {name} while {cell.activity}: {recovered_s} s", flush=True)


def _names(seen: Seen, cell: Cell) -> list[str]:
    """Processes that are in the cell now."""
    of_role = [name for name in seen.pid if name.rpartition("-")[0] == cell.role]
    return [name for name in of_role if seen.worker and seen.activity(name) == cell.activity]


def table(done: Sequence[Done]) -> str:
    """Seconds to recover by role and activity, `kill -9 / stop`, as Markdown."""
    columns = (*RUN_ACTIVITIES, "idle")
    by_cell = {one.cell: one.recovered_s for one in done}
    lines = ["| kill -9 / stop, s | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for role, activities in CELLS.items():
        cells = []
        for activity in columns:
            times = [by_cell.get(Cell(role, activity, fault)) for fault in FAULTS]
            missing = activity not in activities or not any(Cell(role, activity, f) in by_cell for f in FAULTS)
            cells.append("" if missing else " / ".join("–" if t is None else f"{t:.1f}" for t in times))
        if any(cells):
            lines.append(f"| {role} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def disturb(part: Part, sweep: Sweep, folder: Path, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Runs of a part until every open cell is met, after an undisturbed one: how many, and what was wrong."""
    overrides = [f"train.steps={options.steps}", *part.overrides, *options.set]
    recipe, runs = ROOT / "recipes" / part.recipe, 0
    calm = LiveRun(recipe, folder / "calm", overrides)
    lives = [calm]
    faults: list[str] = []
    try:
        _, code = timed(calm, _RUN_S)
        faults += [] if code == 0 else [f"exit: the undisturbed run ended with {code}\n{calm.output[-2000:]}"]
        while sweep.open and not faults and runs < _RUNS:
            runs += 1
            live = LiveRun(recipe, folder / f"run-{runs}", overrides)
            lives.append(live)
            live.start()
            sweep.follow(live, _RUN_S)
            code = run_to_end(live, _RUN_S)
            faults += [] if code == 0 else [f"exit: {code}\n{live.output[-3000:]}"]
            faults += judge(calm, live, options.steps) if code == 0 else []
    finally:
        for live in lives:
            live.end()
    faults += [f"not recovered: {one.cell}" for one in sweep.done if one.recovered_s is None]
    return runs, [*faults, *(f"not met: {cell}" for cell in sweep.open)]


def main(argv: Sequence[str] | None = None) -> int:
    """Undisturbed runs, and disturbed ones until every cell is met."""
    options = _options(argv)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed} (--seed {seed} repeats the draws)", flush=True)
    rng = random.Random(seed)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="rlmq-matrix-"))
    result: dict[str, Any] = {"seed": seed, "steps": options.steps, "runs": 0}
    began, done, faults = time.monotonic(), list[Done](), list[str]()
    for part in PARTS:
        roles = [role for role in part.roles if not options.roles or role in options.roles]
        cells = [Cell(role, activity, fault) for role in roles for activity in CELLS[role] for fault in FAULTS]
        rng.shuffle(cells)
        sweep = Sweep(cells[: options.cells], rng)
        if sweep.open and not faults:
            runs, faults = disturb(part, sweep, folder / Path(part.recipe).stem, options)
            done += sweep.done
            result["runs"] += runs
    result["wall_s"] = round(time.monotonic() - began, 1)
    summary = f"Runs of {options.steps} steps, seed {seed}: {len(done)} faults in {result['runs']} runs, "
    summary += f"{result['wall_s']:.0f} s, {'see above' if faults else 'weights equal'}"
    text = f"{table(done)}\n\n{summary}"
    tell(text, faults, folder, keep=options.folder is not None)
    if options.json is not None:
        options.json.write_text(json.dumps({**result, "faults": faults, "cells": [asdict(d) for d in done]}))
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")
    if not faults and options.folder is None:
        shutil.rmtree(folder)
    return 1 if faults else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make matrix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cells", type=int, help="so many of each recipe's cells, drawn; none: all")
    parser.add_argument("--roles", nargs="*", default=[], help="cells of these roles only")
    parser.add_argument("--seed", type=int, help="of the draws; none: a new one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides of the recipes")
    parser.add_argument(
        "--folder", type=Path, help="where the runs go; none: a temporary one, kept after a failure"
    )
    parser.add_argument("--json", type=Path, help="write every cell and figure there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
