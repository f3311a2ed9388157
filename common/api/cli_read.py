"""The reading commands: samples, benchmarks, algorithms."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rlmq.common.errors import DependencyError, UsageError
from rlmq.common.run_folder import RunFolder
from rlmq.controller.runs import find_run, write_atomically


def samples_command(
    run: str | None,
    *,
    folder: Path,
    step: int | None,
    table: str,
    best: int,
    worst: int,
    random: int,
    as_json: bool,
    where: str | None,
    ratio: bool,
) -> int:
    """`rlmq samples`."""
    if table not in ("train", "eval"):
        raise UsageError("--table", got=repr(table), expected="train or eval")
    from rlmq.consumers.samples_view import show_samples

    found = find_run(folder, run)
    show_samples(
        found,
        step=step,
        table=table,
        best=best,
        worst=worst,
        random=random,
        as_json=as_json,
        keep=partial(_where, where) if where is not None else None,
        ratios=partial(_ratios, found) if ratio else None,
    )
    return 0


def _where(condition: str, rows: Any) -> Any:
    from rlmq.cli_sql import query_tables

    return query_tables({"rows": rows}, f"select * from rows where {condition}")


def _ratios(run: RunFolder, rows: Sequence[dict[str, Any]]) -> Any:
    """By the newest checkpoint."""
    from rlmq.cli_replay import replay_at

    return replay_at(run).ratios(rows)


def algorithms_command() -> int:
    """`rlmq algorithms`."""
    from rlmq.common.algorithms import ALGORITHMS

    width = max(map(len, ALGORITHMS))
    for name, spec in ALGORITHMS.items():
        print(f"{name:{width}} {spec.sentence}")
    return 0


def bench_command(name: str | None, arguments: list[str], *, json_file: Path | None, markdown: bool) -> int:
    """`rlmq bench`."""
    folder = _benchmarks_folder()
    known = sorted(path.stem for path in folder.glob("*.py") if "def run(" in path.read_text())
    if name is None:
        print("\n".join(known))
        return 0
    if name not in known:
        raise UsageError("benchmark", got=repr(name), expected=f"one of {', '.join(known) or 'none yet'}")
    benchmark = _load(folder, name).run
    takes_arguments = bool(inspect.signature(benchmark).parameters)
    if arguments and not takes_arguments:
        raise UsageError(f"arguments of benchmark '{name}'", got=" ".join(arguments), expected="none")
    result: Any = benchmark(arguments) if takes_arguments else benchmark()
    if markdown or not sys.stdout.isatty():
        print("\n".join(result.markdown() if markdown else result.lines()))
    else:
        _print_result(result)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(json_file, result.to_json() + "\n")
    return 0


def _benchmarks_folder() -> Path:
    """`benchmarks/` of the checkout that holds this package, or of the working directory."""
    import rlmq.common

    for folder in (Path(rlmq.common.__file__).parent.parent / "benchmarks", Path.cwd() / "benchmarks"):
        if (folder / "result.py").is_file():
            return folder
    raise DependencyError(
        "benchmarks",
        got="an installed package without them",
        expected="a checkout of the repository",
        remedy="Clone the repository and run `rlmq bench` in it",
    )


def _load(folder: Path, name: str) -> ModuleType:
    """Import a benchmark as the module `benchmarks.NAME`, so that benchmarks can import each other."""
    if str(folder.parent) not in sys.path:
        sys.path.append(str(folder.parent))
    return importlib.import_module(f"benchmarks.{name}")


def _print_result(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=result.name)
    titles = list(dict.fromkeys(title for row in result.rows for title in row))
    for title in titles:
        table.add_column(title)
    for row in result.rows:
        table.add_row(*(_cell(row.get(title)) for title in titles))
    console.print(table)
    shown = set()
    for line in result.lines():
        if line.startswith(("ratio ", "machine: ")) or line in result.notes:
            shown.add(line)
            console.print(line, markup=False, highlight=False)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
