"""What a benchmark hands back: rows for people, ratios by name for programs, the machine beside both."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the figures come from; without it they mean nothing."""

    cores: int
    load_1min: float
    processor: str
    python: str
    torch: str

    @classmethod
    def here(cls) -> Machine:
        """This machine now. `cores` are those that this process may use."""
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(
            cores=usable,
            load_1min=round(os.getloadavg()[0], 2),
            processor=platform.machine(),
            python=platform.python_version(),
            torch=_installed("torch"),
        )


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Result of one benchmark.

    `rows` is a table: one mapping per line, the keys are the column titles (units in the titles: `wall_s`).
    `ratios` are the figures that carry a limit, by name; absolute times are printed and never judged.

    Example:
        >>> result = BenchResult("overhead", [{"loop": "one process", "wall_s": 2.0}], {"tiny": 1.2})
        >>> result.lines()[0]
        'loop         wall_s'
    """

    name: str
    rows: list[dict[str, Cell]]
    ratios: dict[str, float]
    notes: list[str] = field(default_factory=list)
    machine: Machine = field(default_factory=Machine.here)

    def to_json(self) -> str:
        """The whole result as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def markdown(self) -> list[str]:
        """The result for a document: the table, then the ratios, notes and machine as a list."""
        titles = list(dict.fromkeys(title for row in self.rows for title in row))
        cells = [titles, ["---"] * len(titles), *([_text(row, title) for title in titles] for row in self.rows)]
        rest = self.lines()[len(_table(self.rows)) :]
        return [*(f"| {' | '.join(line)} |" for line in cells), "", *(f"* {line}" for line in rest)]

    def lines(self) -> list[str]:
        """The result as text: the table, the ratios, the notes, the machine."""
        machine = self.machine
        return [
            *_table(self.rows),
            *(f"ratio {name}: {value:.3f}" for name, value in self.ratios.items()),
            *self.notes,
            f"machine: {machine.cores} cores, load {machine.load_1min}, {machine.processor}, "
            f"Python {machine.python}, torch {machine.torch}",
        ]


def _table(rows: list[dict[str, Cell]]) -> list[str]:
    titles = list(dict.fromkeys(title for row in rows for title in row))
    if not titles:
        return []
    texts = [titles, *([_text(row, title) for title in titles] for row in rows)]
    widths = [max(len(line[i]) for line in texts) for i in range(len(titles))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in texts]


def _text(row: Mapping[str, Cell], title: str) -> str:
    value = row.get(title)
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
