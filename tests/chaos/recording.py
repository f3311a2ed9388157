"""The oracle of whole runs: what must be true of a finished run, from its files alone.

`broken(run)` reads the recipe as it ran, the recording (`samples/`), the batch log and the manifests of the
checkpoints, and names each broken invariant; `differences(run, other)` compares two runs that must be the same.
Nothing of rlmq is imported, so that a mistake in it is not repeated here.

    lost       a sample of the grid (step, prompt, member) was not recorded
    foreign    a recorded or logged sample that is not in the grid, or in another step than its own
    two ends   a sample was recorded twice with different contents
    retrained  a sample is in more than one batch, or a step was logged twice
    unlogged   recorded as trained and not in the batch log, or logged and recorded otherwise
    stale      a token was generated with older weights than the schedule allows
    ancestry   the checkpoints' rows, in order, are not the logged ones up to the last checkpoint
    hash       a file of a checkpoint is not what its manifest says
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

_CHECKPOINT = re.compile(r"step-(\d{6,})")
Row = dict[str, Any]


def broken(run: Path, *, steps: int) -> list[str]:
    """Every broken invariant, as `"name: what"`; empty when all hold.

    The chain of checkpoints is whole when the run kept all of them (`checkpoint.keep`).
    """
    recipe = yaml.safe_load((run / "recipe.yaml").read_text("utf-8"))
    prompts, members = recipe["data"]["prompts_per_step"], recipe["algorithm"]["group_size"]
    grid = {
        f"train-{step:06d}-{group:04d}-{member:02d}": step
        for step in range(1, steps + 1)
        for group in range(prompts)
        for member in range(members)
    }
    log, rows = batch_log(run), recorded(run)
    checks = (
        _recorded(rows, grid),
        _logged(log, rows, grid, steps),
        _versions(rows, _bound(recipe)),
        _ancestry(run, log, steps),
    )
    return [line for check in checks for line in check]


def recorded(run: Path) -> dict[str, list[Row]]:
    """Recorded rows of the train table by sample id; a part that was written twice tells of a row twice.

    Without their lineage: who wrote a column, and when, is another one after a kill.
    """
    rows: dict[str, list[Row]] = {}
    for path in sorted(run.glob("samples/train-*.parquet")):
        for row in pq.read_table(path).drop_columns(["lineage"]).to_pylist():
            rows.setdefault(row["sample_id"], []).append(row)
    return rows


def batch_log(run: Path) -> list[dict[str, Any]]:
    """Entries of the batch log, in the order of the file; a cut last line was never promised."""
    lines = (run / "batch_log.jsonl").read_bytes().split(b"\n")
    return [json.loads(line)["entry"] for line in lines[:-1]]


def checkpoints(run: Path, kind: str = "checkpoints") -> list[tuple[int, Path, dict[str, Any]]]:
    """Step, folder and manifest of every checkpoint, by step."""
    found = []
    for path in sorted(run.glob(f"{kind}/*")):
        match = _CHECKPOINT.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path, json.loads((path / "manifest.json").read_bytes())))
    return found


def differences(run: Path, other: Path) -> list[str]:
    """What differs between two runs of one recipe: batches, samples, metrics of training."""
    found = []
    ours, theirs = batch_log(run), batch_log(other)
    for mine, yours in zip(ours, theirs, strict=False):
        keys = ("step", "rows", "updates", "policy_version", "behaviour_versions", "seed")
        unlike = [key for key in keys if mine[key] != yours[key]]
        if unlike:
            found.append(f"batch log: step {mine['step']} differs in {', '.join(unlike)}")
    if len(ours) != len(theirs):
        found.append(f"batch log: {len(ours)} and {len(theirs)} entries")
    rows, others = recorded(run), recorded(other)
    unlike = [i for i in rows.keys() & others.keys() if rows[i][0] != others[i][0]]
    found += _named("samples", unlike, "samples differ in a column")
    found += _named("samples", rows.keys() ^ others.keys(), "samples are recorded in one run only")
    return found


def _named(name: str, samples: Iterable[Any], what: str) -> Iterator[str]:
    found = sorted(map(str, samples))
    if found:
        yield f"{name}: {len(found)} {what}: {', '.join(found[:5])}{' …' if len(found) > 5 else ''}"


def _recorded(rows: dict[str, list[Row]], grid: dict[str, int]) -> Iterator[str]:
    yield from _named("lost", grid.keys() - rows.keys(), "samples are not in the recording")
    yield from _named("foreign", rows.keys() - grid.keys(), "samples were recorded that nobody admitted")
    wrong = [i for i, found in rows.items() if i in grid and found[0]["step"] != grid[i]]
    yield from _named("foreign", wrong, "samples are recorded under another step")
    unlike = [i for i, found in rows.items() if any(row != found[0] for row in found)]
    yield from _named("two ends", unlike, "samples were recorded twice and differ")


def _logged(
    log: list[dict[str, Any]], rows: dict[str, list[Row]], grid: dict[str, int], steps: int
) -> Iterator[str]:
    if [entry["step"] for entry in log] != list(range(1, steps + 1)):
        yield f"retrained: the batch log has steps {[entry['step'] for entry in log]}, not 1 to {steps} once each"
    uses = Counter(i for entry in log for i in entry["rows"])
    yield from _named("retrained", [i for i, n in uses.items() if n > 1], "samples are in several batches")
    yield from _named("foreign", uses.keys() - grid.keys(), "logged samples were never admitted")
    other = [i for entry in log for i in entry["rows"] if grid.get(i) != entry["step"]]
    yield from _named("foreign", other, "samples were trained in another step than their own")
    trained = {i for i, found in rows.items() if found[0]["advantages"] is not None}
    yield from _named("unlogged", trained - uses.keys(), "samples have advantages and are in no batch")
    yield from _named("unlogged", uses.keys() - trained, "samples are logged and recorded without advantages")
    for entry in log:
        for update in entry["updates"]:
            indices = sorted(i for rank in update["micro_batches"] for micro in rank for i in micro)
            if len(entry["updates"]) == 1 and indices != list(range(len(entry["rows"]))):
                yield f"retrained: the micro-batches of step {entry['step']} do not hold each row once"


def _bound(recipe: dict[str, Any]) -> int:
    """Greatest staleness that the recipe's schedule allows."""
    schedule = recipe.get("schedule") or {}
    most = schedule.get("max_staleness")
    return {"sync": 0, "one_step_off": 1, "async": 1 if most is None else most}[schedule.get("kind", "sync")]


def _versions(rows: dict[str, list[Row]], max_staleness: int) -> Iterator[str]:
    old = [
        i
        for i, found in rows.items()
        if any(not 0 <= row["step"] - 1 - v <= max_staleness for row in found for v in row["policy_versions"] or ())
    ]
    yield from _named("stale", old, "samples have tokens of older weights than the schedule allows")


def _ancestry(run: Path, log: list[dict[str, Any]], steps: int) -> Iterator[str]:
    for kind in ("checkpoints", "critic_checkpoints"):
        if kind == "checkpoints" or (run / kind).is_dir():
            yield from _chain(checkpoints(run, kind), log, steps, kind)


def _chain(
    chain: list[tuple[int, Path, dict[str, Any]]], log: list[dict[str, Any]], steps: int, kind: str
) -> Iterator[str]:
    if not chain or chain[-1][0] != steps:
        yield f"ancestry: {kind} {[step for step, _, _ in chain]}, expected one of step {steps}"
        return
    covered = [i for _, _, manifest in chain for i in manifest["rows"]]
    logged = [i for entry in log for i in entry["rows"]]
    if covered != logged:
        twice = [i for i, n in Counter(covered).items() if n > 1]
        yield from _named("ancestry", twice, "samples are covered by several checkpoints")
        yield from _named("ancestry", set(logged) - set(covered), "logged samples are covered by no checkpoint")
        yield f"ancestry: the rows of {kind} are not the batch log's"
    for _, path, manifest in chain:
        for name, expected in manifest["files"].items():
            if hashlib.sha256((path / name).read_bytes()).hexdigest() != expected:
                yield f"hash: {path / name} is not what its manifest says"
