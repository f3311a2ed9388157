"""`rlmq diff`, `report` and `sweep`: runs beside each other."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmq.common.errors import UsageError
from rlmq.common.recipe.diff import changes
from rlmq.common.recipe.load import load_recipe
from rlmq.common.run_folder import RunFolder
from rlmq.consumers.fingerprints import read_fingerprints
from rlmq.consumers.report import metrics_of
from rlmq.controller.runs import find_run, newest_run, write_atomically

_FIGURES = ("reward_mean", "loss", "grad_norm", "response_tokens_mean", "step_s")
_CLOCK = re.compile(r".*(_s|_per_s|_unix_s)$|time_shares|seconds")


def diff_command(first: str, second: str, *, folder: Path, as_json: bool) -> int:
    """`rlmq diff`."""
    a, b = find_run(folder, first), find_run(folder, second)
    different = changes(load_recipe(a.recipe).recipe, load_recipe(b.recipe).recipe)
    step, what = first_divergence(a, b)
    last, figures = _last_common(a, b)
    if as_json:
        config = {change.path: [change.old, change.new] for change in different}
        diverges = None if step is None else {"step": step, "what": what}
        print(json.dumps({"config": config, "diverges": diverges, "step": last, "figures": figures}))
        return 0
    print(f"{a.run_id} and {b.run_id}")
    for change in different:
        print(f"  {change.path}: {change.old} | {change.new}")
    print(f"  step {step} is the first that differs: {what}" if step is not None else f"  {what}")
    for name, (own, other) in figures.items():
        print(f"  {name} at step {last}: {own:.6g} | {other:.6g}")
    return 0


def first_divergence(a: RunFolder, b: RunFolder) -> tuple[int | None, str]:
    """The first step that differs, and what of it: by fingerprints where both runs have them, else by figures."""
    prints = read_fingerprints(a.fingerprints), read_fingerprints(b.fingerprints)
    common = sorted(prints[0].keys() & prints[1].keys())
    for step in common:
        if what := prints[0][step].differs_from(prints[1][step]):
            return step, what
    lines = [{line["step"]: line for line in metrics_of(run, "train")} for run in (a, b)]
    shared = sorted(lines[0].keys() & lines[1].keys())
    for step in shared if not common else ():
        for name in lines[0][step]:
            if not _CLOCK.fullmatch(name) and lines[0][step][name] != lines[1][step].get(name):
                return step, name
    said = "to the bit" if common else "in their figures"
    return None, f"steps {shared[0]} to {shared[-1]} are the same {said}" if shared else "no step in common"


def _last_common(a: RunFolder, b: RunFolder) -> tuple[int | None, dict[str, tuple[float, float]]]:
    lines = [{line["step"]: line for line in metrics_of(run, "train")} for run in (a, b)]
    shared = lines[0].keys() & lines[1].keys()
    if not shared:
        return None, {}
    step = max(shared)
    pairs = {name: (lines[0][step].get(name), lines[1][step].get(name)) for name in _FIGURES}
    return step, {
        name: (own, other) for name, (own, other) in pairs.items() if own is not None and other is not None
    }


def report_command(words: Sequence[str], *, folder: Path, output: Path | None) -> int:
    """`rlmq report`: runs, each a group of its own; runs of one recipe with other seeds are one."""
    runs = [find_run(folder, word) for word in words] or [find_run(folder, None)]
    print(_report(grouped(runs), output or runs[0].path / "report.html"))
    return 0


def grouped(runs: Sequence[RunFolder]) -> dict[str, list[RunFolder]]:
    """Runs by what their recipes have in common: all but the seed and the name."""
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        values = load_recipe(run.recipe).recipe.model_dump(mode="json")
        del values["run"]
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(run)
    return {members[0].run_id if len(members) == 1 else _named(members): members for members in groups.values()}


def _named(members: Sequence[RunFolder]) -> str:
    return f"{members[0].run_id} and {len(members) - 1} more"


def _report(groups: dict[str, list[RunFolder]], output: Path) -> Path:
    from rlmq.consumers.run_report import write_report

    write_atomically(output, write_report(groups))
    return output


def sweep_command(recipe: Path, words: Sequence[str], *, output: Path | None) -> int:
    """`rlmq sweep`: a run for each combination, one after the other; those that are finished are not made again."""
    loaded = load_recipe(recipe, [])
    axes = [_axis(word) for word in words]
    made: dict[str, list[RunFolder]] = {}
    for chosen in itertools.product(*(values for _, values in axes)):
        overrides = [f"{key}={value}" for (key, _), value in zip(axes, chosen, strict=True)]
        varied = [pair for pair, (_, values) in zip(overrides, axes, strict=True) if len(values) > 1]
        name = "-".join([loaded.recipe.run.name, *(re.sub(r"[^A-Za-z0-9.]+", "_", pair) for pair in varied)])
        overrides.append(f"run.name={name}")
        print(f"sweep: {' '.join(varied) or name}", flush=True)
        code = subprocess.call([sys.executable, "-P", "-m", "rlmq.cli", "up", str(recipe), *overrides])
        if code != 0:
            print(f"sweep: run {name} ended with exit {code}", file=sys.stderr)
            return code
        run = newest_run(load_recipe(recipe, overrides).recipe)
        group = " ".join(pair for pair in varied if not pair.startswith("run.seed=")) or loaded.recipe.run.name
        made.setdefault(group, []).extend([run] if run is not None else [])
    for group, runs in made.items():
        rewards = [_last_reward(run) for run in runs]
        print(f"{group:40} reward {', '.join('-' if one is None else format(one, '.4g') for one in rewards)}")
    folder = Path(loaded.recipe.run.folder)
    print(_report(made, output or folder / f"sweep-{loaded.recipe.run.name}.html"))
    return 0


def _last_reward(run: RunFolder) -> Any:
    lines = [line for line in metrics_of(run, "train") if line.get("reward_mean") is not None]
    return lines[-1]["reward_mean"] if lines else None


def _axis(word: str) -> tuple[str, list[str]]:
    """`key=a,b,c` as key and values; a value with a comma is written in brackets or quotes."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise UsageError(f"sweep {word!r}", expected="key=value,value,…, for example train.lr=1e-5,1e-4")
    values = re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|\"[^\"]*\"|[^,])+", text)
    return key, [value.strip() for value in values] or [""]
