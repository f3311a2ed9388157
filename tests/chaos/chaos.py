"""`make chaos`: a run in which processes are killed at random ends with the bits of one that nobody disturbed.

Two runs of one deterministic recipe: the first undisturbed, the second with `--kills` times `kill -9` of a random
process (the controller, any worker, the Redis server). When a kill is due is drawn before the run, as a place
between its first and its last step; the exact time is drawn again when it is due. The activity in which a kill
falls is steered towards those that were met least, so that all of them are met.

The run must end with exit code 0, every sample must be accounted for by its files (`recording.py`), and `sha256sum`
of the final weights must be that of the undisturbed run. Exit code 1 otherwise.
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
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos.live import ACTIVITIES, CONTROLLER, ROOT, SERVER, SLOW_REWARD, LiveRun, Seen, final_hash, until
from chaos.recording import broken, differences

_ALL = 20
"""So many kills are enough; from so many on, every activity must be among them."""

_HASTE = 0.15
"""Share of the kills after which the next may come before the run has recovered."""

_RECOVERY_S = 180.0
_BASE_S, _STEP_S = 240.0, 60.0


@dataclass
class Kill:
    """One `kill -9`. `activity` is the worker's; for controller and server what went on in the run."""

    name: str
    step: int
    activity: str
    at_s: float
    at_unix_s: float
    while_recovering: bool
    recovered_s: float | None = None


class Budget:
    """How often each process may still be killed: the supervisor gives up at a sixth restart in ten minutes."""

    def __init__(self, limit: int = 4, window_s: float = 600.0) -> None:
        self._limit, self._window_s = limit, window_s
        self._spent: dict[str, deque[float]] = defaultdict(deque)

    def allows(self, name: str) -> bool:
        """Whether this process may be killed now."""
        spent = self._spent[name]
        while spent and time.monotonic() - spent[0] > self._window_s:
            spent.popleft()
        return len(spent) < self._limit

    def spend(self, name: str) -> None:
        """It was killed."""
        self._spent[name].append(time.monotonic())


class Disturbance:
    """Draws kills over a run, and waits for its recovery in between."""

    def __init__(self, live: LiveRun, rng: random.Random, *, steps: int, kills: int) -> None:
        self._live = live
        self._rng = rng
        self._steps = steps
        self._due = sorted(rng.uniform(0.5, steps - 1.5) for _ in range(kills))
        self._began = time.monotonic()
        self._budget = Budget()
        self.kills: list[Kill] = []

    def follow(self, deadline_s: float) -> None:
        """Kill until all is done or the run is over."""
        deadline = time.monotonic() + deadline_s
        while len(self.kills) < len(self._due) and not self._live.over and time.monotonic() < deadline:
            seen = self._live.seen()
            allowed = sum(due <= seen.step for due in self._due) - len(self.kills)
            late = seen.step >= self._steps - 1
            if (allowed > 0 or late) and seen.worker:
                longest_s = 0.0 if late else 4.0 if allowed > 2 else 15.0
                self._kill(patience_s=self._rng.uniform(0.0, longest_s))
            else:
                time.sleep(0.05)
        self._live.seen()
        for kill in self.kills:  # by all that had arrived until then, not by what was seen when it was decided
            kill.activity = self._live.log.at(kill.name, kill.at_unix_s)

    def _kill(self, *, patience_s: float) -> None:
        """One kill, in an activity that was met least; after `patience_s` in any. Then the wait for recovery."""
        time.sleep(self._rng.uniform(0.0, 1.0))
        name, seen = self._choose(patience_s)
        if name is None or not self._live.signal(seen.pid[name], signal.SIGKILL):
            return
        self._budget.spend(name)
        at, at_unix_s, before = time.monotonic(), time.time(), self._live.progress()
        recovering = bool(self.kills) and self.kills[-1].recovered_s is None
        kill = Kill(name, seen.step, seen.activity(name), round(at - self._began, 2), at_unix_s, recovering)
        self.kills.append(kill)
        print(f"{kill.at_s:7.1f} s  step {kill.step:3d}  kill -9 {name} while {kill.activity}", flush=True)
        patience_s = self._rng.uniform(0.0, 3.0) if self._rng.random() < _HASTE else _RECOVERY_S
        back = until(
            lambda: self._live.over or recovered(self._live, name, seen, before, replaced=True), patience_s
        )
        if back and not self._live.over:
            kill.recovered_s = round(time.monotonic() - at, 2)

    def _choose(self, patience_s: float) -> tuple[str | None, Seen]:
        """A process of the role that was killed least among those that may be, and the run as it is now."""
        met = Counter(kill.activity for kill in self.kills)
        killed = Counter(kill.name.rpartition("-")[0] for kill in self.kills)
        least = min(met[activity] for activity in ACTIVITIES)
        deadline = time.monotonic() + patience_s
        while True:
            seen = self._live.seen()
            free = [name for name in seen.pid if self._budget.allows(name)]
            wanted = [n for n in free if seen.activity(n) and met[seen.activity(n)] == least]
            if wanted or (free and time.monotonic() > deadline):
                return min(wanted or free, key=lambda n: (killed[n.rpartition("-")[0]], self._rng.random())), seen
            if self._live.over:
                return None, seen
            time.sleep(0.002)


def recovered(live: LiveRun, name: str, before: Seen, progress: tuple[int, ...], *, replaced: bool) -> bool:
    """Whether the process is there (`replaced`: a new one) and ready, and the run got further."""
    now = live.seen()
    if name not in now.pid or (replaced and now.pid[name] == before.pid[name]) or live.progress() == progress:
        return False
    if name == CONTROLLER:
        return now.epoch > before.epoch or not replaced
    known = before.worker[name].incarnation if name in before.worker and replaced else 0
    return name == SERVER or (now.ready(name) and now.worker[name].incarnation > known)


def run_to_end(live: LiveRun, timeout_s: float) -> int | None:
    """Wait for the end; its exit code."""
    code = live.wait(timeout_s)
    if code is None:
        print(f"not over after {timeout_s:.0f} s", file=sys.stderr)
        live.end()
    return code


def timed(live: LiveRun, limit_s: float) -> tuple[float, int | None]:
    """Start a run and wait for its end: seconds and exit code."""
    began = time.monotonic()
    live.start()
    code = run_to_end(live, limit_s)
    return round(time.monotonic() - began, 1), code


def judge(calm: LiveRun, wild: LiveRun, steps: int) -> list[str]:
    """What is wrong with the files that a disturbed run left behind."""
    faults = [f"oracle: {line}" for line in broken(wild.run, steps=steps)]
    faults += [f"oracle, undisturbed run: {line}" for line in broken(calm.run, steps=steps)]
    faults += [f"unlike the undisturbed run: {line}" for line in differences(wild.run, calm.run)]
    ours, theirs = final_hash(wild.run), final_hash(calm.run)
    return faults if ours == theirs else [*faults, f"weights: {ours}, undisturbed {theirs}"]


def tell(text: str, faults: Sequence[str], folder: Path, *, keep: bool) -> None:
    """The result for people."""
    print(f"\n{text}")
    for line in faults:
        print(line, file=sys.stderr)
    print("result: " + ("failed" if faults else "passed") + (f"; files in {folder}" if faults or keep else ""))


def table(kills: Sequence[Kill]) -> str:
    """Kills by role and activity, and the time to recover, as Markdown."""
    lines = ["| killed | " + " | ".join(ACTIVITIES) + " | kills | time to recover: median, longest |"]
    lines.append("|---" * (len(ACTIVITIES) + 3) + "|")
    by_role: dict[str, list[Kill]] = defaultdict(list)
    for kill in kills:
        by_role[kill.name.rpartition("-")[0]].append(kill)
    for role, own in [*sorted(by_role.items()), ("all", list(kills))]:
        met = Counter(kill.activity for kill in own)
        times = sorted(kill.recovered_s for kill in own if kill.recovered_s is not None)
        cells = [str(met[a] or "") for a in ACTIVITIES]
        spent = f"{times[len(times) // 2]:.1f} s, {times[-1]:.1f} s" if times else ""
        lines.append(f"| {role} | " + " | ".join(cells) + f" | {len(own)} | {spent} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run both, compare, tell."""
    options = _options(argv)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed} (--seed {seed} repeats the draws)", flush=True)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="rlmq-chaos-"))
    overrides = [f"train.steps={options.steps}", "checkpoint.keep=1000", SLOW_REWARD, *options.set]
    limit_s = _BASE_S + _STEP_S * options.steps
    calm = LiveRun(options.recipe, folder / "calm", overrides)
    wild = LiveRun(options.recipe, folder / "disturbed", overrides)
    result: dict[str, Any] = {"seed": seed, "steps": options.steps, "recipe": options.recipe.name}
    faults: list[str] = []
    disturbance = None
    try:
        result["calm_s"], code = timed(calm, limit_s)
        faults += [] if code == 0 else [f"exit: the undisturbed run ended with {code}\n{calm.output[-2000:]}"]
        if not faults:
            began = time.monotonic()
            wild.start()
            disturbance = Disturbance(wild, random.Random(seed), steps=options.steps, kills=options.kills)
            disturbance.follow(limit_s)
            code = run_to_end(wild, limit_s)
            result["disturbed_s"] = round(time.monotonic() - began, 1)
            faults += [] if code == 0 else [f"exit: {code}\n{wild.output[-3000:]}"]
            faults += judge(calm, wild, options.steps) if code == 0 else []
            faults += _too_few(disturbance.kills, options.kills)
    finally:
        for live in (calm, wild):
            live.end()
    for name, live in (("sha256", calm), ("sha256_disturbed", wild)):
        if live.path is not None and list(live.path.glob("checkpoints/step-*")):
            result[name] = final_hash(live.path)
    kills = disturbance.kills if disturbance is not None else []
    text = f"{table(kills)}\n\n{_summary(result, len(kills))}"
    tell(text, faults, folder, keep=options.folder is not None)
    if options.json is not None:
        told = {**result, "faults": faults, "kills": [asdict(kill) for kill in kills]}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")
    if not faults and options.folder is None:
        shutil.rmtree(folder)
    return 1 if faults else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "chaos.yaml")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", type=int, default=26)
    parser.add_argument("--seed", type=int, help="of the draws; none: a new one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    parser.add_argument(
        "--folder", type=Path, help="where the runs go; none: a temporary one, kept after a failure"
    )
    parser.add_argument("--json", type=Path, help="write every kill and figure there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    return parser.parse_args(argv)


def _too_few(kills: Sequence[Kill], wanted: int) -> list[str]:
    """A run that was disturbed less than asked proves less."""
    missed = sorted(set(ACTIVITIES) - {kill.activity for kill in kills})
    few = [f"kills: {len(kills)} of {wanted}"] if len(kills) < min(wanted, _ALL) else []
    return [*few, f"kills: none while {', '.join(missed)}"] if wanted >= _ALL and missed else few


def _summary(result: dict[str, Any], kills: int) -> str:
    parts = [f"{result['recipe']}, {result['steps']} steps, seed {result['seed']}: {kills} kills"]
    if "calm_s" in result:
        parts.append(f"undisturbed {result['calm_s']:.0f} s")
    if "disturbed_s" in result:
        parts.append(f"disturbed {result['disturbed_s']:.0f} s")
    if "sha256_disturbed" in result:
        same = result["sha256"] == result["sha256_disturbed"]
        parts.append(f"weights {'equal' if same else 'DIFFERENT'} (sha256 {result['sha256'][:16]}…)")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
