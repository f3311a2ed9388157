"""`rlmq rescore`: recorded samples by another reward, beside the one that they were trained with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlmq.buffer.recording import Recording, RecordingWriter, place_of
from rlmq.cli_replay import recipe_of, run_and_overrides
from rlmq.common.errors import UsageError
from rlmq.common.run_folder import RunFolder

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Rescored:
    """One sample: its row, and its new reward."""

    row: Mapping[str, Any]
    new: float | None
    parts: Mapping[str, float | None]

    @property
    def old(self) -> float | None:
        """The recorded reward."""
        value: float | None = self.row["reward"]
        return value

    @property
    def change(self) -> float:
        """New less old; 0 where one has no verdict."""
        return self.new - self.old if self.new is not None and self.old is not None else 0.0


def rewards_of(overrides: Sequence[str], reward: str | None) -> list[str]:
    """Overrides that make this function the only reward."""
    return [*overrides, *([f"reward=[{{function: {json.dumps(reward)}}}]"] if reward is not None else [])]


def rescored(run: RunFolder, overrides: Sequence[str], table: str, steps: Sequence[int] | None) -> list[Rescored]:
    """The recorded samples with the rewards of the run's recipe under these overrides.

    Raises:
        UsageError: no such rows, or a reward function that cannot be used.
    """
    from rlmq.producers.rescoring import rescore

    loaded = recipe_of(run, overrides)
    rows = Recording(place_of(run)).read(table, steps=steps).to_pylist()
    scored = rescore(loaded.recipe, loaded.folder, rows)
    return [Rescored(row, *new) for row, new in zip(rows, scored, strict=True)]


def rescore_command(
    words: Sequence[str],
    *,
    folder: Path,
    reward: str | None,
    step: int | None,
    table: str,
    to: str | None,
    show: int,
    as_json: bool,
) -> int:
    """`rlmq rescore`."""
    run, overrides = run_and_overrides(words, folder)
    found = rescored(run, rewards_of(overrides, reward), table, None if step is None else [step])
    figures = compared(found)
    changed = sorted(found, key=lambda one: (-abs(one.change), one.row["sample_id"]))
    if to is not None:
        _write(run, table, found, to)
    if as_json:
        samples = [{"sample_id": one.row["sample_id"], "old": one.old, "new": one.new} for one in changed]
        print(json.dumps({"run": run.run_id, **figures, "samples": samples}))
        return 0
    for name, value in figures.items():
        print(f"{name:24} {value if isinstance(value, int) else format(value, '.6g')}")
    for one in changed[:show] if changed and changed[0].change else ():
        text = " ".join(str(one.row["response_text"]).split())[:80]
        print(f"  {one.row['sample_id']}  {one.old:g} -> {one.new:g}  {text!r}")
    return 0


def compared(found: Sequence[Rescored]) -> dict[str, float]:
    """Old and new reward over the rows that have both: means, correlation, and whether they order pairs alike."""
    both = [one for one in found if one.old is not None and one.new is not None]
    old, new = [float(one.old or 0.0) for one in both], [float(one.new or 0.0) for one in both]
    groups: dict[str, list[Rescored]] = {}
    for one in both:
        groups.setdefault(one.row["group_id"], []).append(one)
    alike = opposite = 0
    for members in groups.values():
        for index, a in enumerate(members):
            for b in members[index + 1 :]:
                product = ((a.old or 0.0) - (b.old or 0.0)) * ((a.new or 0.0) - (b.new or 0.0))
                alike, opposite = alike + (product > 0), opposite + (product < 0)
    return {
        "samples": len(found),
        "without_verdict_before": sum(one.old is None for one in found),
        "without_verdict_now": sum(one.new is None for one in found),
        "changed": sum(abs(one.change) > _EPSILON for one in both),
        "mean_before": _mean(old),
        "mean_now": _mean(new),
        "correlation": _correlation(old, new),
        "pairs_in_the_same_order": alike,
        "pairs_in_the_other_order": opposite,
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's; nan where one does not vary."""
    x, y = [v - _mean(a) for v in a], [v - _mean(b) for v in b]
    norm = math.sqrt(math.fsum(v * v for v in x) * math.fsum(v * v for v in y))
    return math.fsum(v * w for v, w in zip(x, y, strict=True)) / norm if norm else math.nan


def _write(run: RunFolder, table: str, found: Sequence[Rescored], to: str) -> None:
    """A recording of the same rows with the new rewards, to be trained on."""
    if Recording(to).tables():
        raise UsageError("--to", got=f"{to}, where a recording is", expected="a new place")
    old = Recording(place_of(run)).read(table, steps={one.row["step"] for one in found})
    names = [name for name in old.column_names if name.startswith("reward.")]
    rows = old.drop_columns(names)
    by_id = {one.row["sample_id"]: one for one in found}
    mine = [by_id[name] for name in old["sample_id"].to_pylist()]
    place = rows.schema.get_field_index("reward")
    rows = rows.set_column(place, "reward", pa.array([one.new for one in mine], pa.float64()))
    for name in found[0].parts if found else ():
        rows = rows.append_column(f"reward.{name}", pa.array([one.parts[name] for one in mine], pa.float64()))
    writer = RecordingWriter(to)
    for step in sorted(set(rows["step"].to_pylist())):
        writer.add(table, step, rows.filter(pc.equal(rows["step"], step)))
