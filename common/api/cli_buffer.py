"""`rlmq buffer`: what a run's experience buffer holds, asked from the run's own server.

The tables are attached as the server knows them, with their columns and stages; looking changes nothing in them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import NoPermissionError, RedisError
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Lease, Stage, Table, TableCounts, Waiting
from rlmq.buffer.tables import EVAL
from rlmq.common.errors import DependencyError, ExitCode, IntegrityError
from rlmq.common.recipe.load import load_recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.addresses import claim_home, server_url
from rlmq.controller.runs import find_run, read_summary

_REACH_S = 2.0
_PIPE_COLUMNS = 500  # lines for a pipe are not folded
_ENDS_SHOWN, _NAMES_SHOWN = 10, 4


@dataclass(frozen=True, slots=True)
class Buffer:
    """The buffer of one run."""

    run: RunFolder
    store: RedisStore
    tables: Sequence[Table]


@dataclass(frozen=True, slots=True)
class _View:
    """What is shown of a table; `broken` is None when nobody asked to verify it."""

    table: Table
    counts: TableCounts
    leases: Sequence[Lease]
    broken: Sequence[str] | None

    def limits(self) -> dict[str, tuple[int, int | None]]:
        """What is limited → (used, limit)."""
        counts, window = self.counts, self.table.window
        limits: dict[str, tuple[int, int | None]] = {
            "rows": (counts.live, self.table.capacity_rows),
            "bytes": (counts.payload_bytes, self.table.capacity_bytes),
        }
        if window is not None:
            dropped = sum(rows for end, rows in counts.ended.items() if _state(end) != "trained")
            most = window.rows_per_version * (counts.version + 1 + window.versions)
            limits["versions"] = (counts.admitted - dropped, most)
        return limits

    def leases_of(self, stage: Stage) -> list[Lease]:
        """Leases of the stage, the one nearest to its end first."""
        return sorted((one for one in self.leases if one.stage == stage.name), key=lambda one: one.left_s)


def buffer_command(run: str | None, *, folder: Path, verify: bool, as_json: bool) -> int:
    """`rlmq buffer`.

    Raises:
        IntegrityError: an invariant is broken (after all was printed).
    """
    with opened_buffer(folder, run) as buffer:
        store = buffer.store
        views = [
            _View(
                table,
                store.counts(table.name),
                store.leases(table.name),
                store.verify(table.name) if verify else None,
            )
            for table in buffer.tables
        ]
        waiting = store.waiting()
    if as_json:
        tables = [_view_json(view) for view in views]
        print_json({"run": buffer.run.run_id, "tables": tables, "waiting": [_waiting_json(one) for one in waiting]})
    else:
        _print_views(buffer.run, views, waiting)
    broken = sum(len(view.broken or ()) for view in views)
    if broken:
        raise IntegrityError(
            f"the buffer of run {buffer.run.run_id}",
            got=f"{broken} broken invariant{'s' * (broken != 1)}",
            expected="none",
            remedy="Stop the run, keep its folder with redis/, and report what is printed above",
        )
    return int(ExitCode.OK)


# -- finding the run and its server ----------------------------------------------------------------------------


@contextmanager
def opened_buffer(folder: Path, run: str | None) -> Iterator[Buffer]:
    """The buffer of a run that is up.

    Raises:
        UsageError: there is no such run, or the server's records are another run's.
        DependencyError: the run's server is not there, or its processes have not begun.
    """
    with buffer_of(find_run(folder, run)) as buffer:
        yield buffer


@contextmanager
def buffer_of(found: RunFolder) -> Iterator[Buffer]:
    """As `opened_buffer`, of a run that was found already."""
    recipe = load_recipe(found.recipe).recipe
    url = server_url(recipe, found)
    try:
        store = RedisStore(url, run_id=found.run_id, worker="operator", retry_s=_REACH_S)
    except DependencyError as error:
        if recipe.redis.url is not None:
            raise
        raise _no_server(found, error) from error
    try:
        if recipe.redis.url is not None:
            claim_home(found, url)
        yield Buffer(found, store, _attach(found, store, (*recipe.slot_names, EVAL, *recipe.tables)))
    except RedisError as error:
        remedy = "Give its user +scan and +strlen too" if isinstance(error, NoPermissionError) else ""
        raise DependencyError(
            f"the server of run {found.run_id}", got=str(error), expected="an answer", remedy=remedy
        ) from error
    finally:
        store.close()


def _attach(run: RunFolder, store: RedisStore, names: Sequence[str]) -> Sequence[Table]:
    try:
        return store.attach(names)
    except IntegrityError as error:
        raise DependencyError(
            f"the buffer of run {run.run_id}",
            got="a server without its tables",
            expected=f"the tables {', '.join(names)}, which the run's first process makes",
            remedy="Wait a moment if the run is just starting",
        ) from error


def _no_server(run: RunFolder, error: DependencyError) -> DependencyError:
    """The server that `rlmq up` started for the run is not there."""
    ended = read_summary(run).get("exit")
    if ended is None:
        return DependencyError(
            f"the buffer of run {run.run_id}",
            got=f"no server ({error.got})",
            expected="a run that is up",
            remedy="Start it again: the command that began the run continues it",
        )
    continues = "" if ended == 0 else "; the command that began it continues it"
    return DependencyError(
        f"the buffer of run {run.run_id}",
        got=f"a run that has ended (exit {ended}), and its server with it",
        expected="a run that is up",
        remedy=f"`rlmq samples {run.run_id}` shows what it recorded{continues}",
    )


# -- for programs -----------------------------------------------------------------------------------------------


def print_json(value: Mapping[str, Any]) -> None:
    """One object, one line."""
    sys.stdout.write(json.dumps(value) + "\n")


def _view_json(view: _View) -> dict[str, Any]:
    counts = asdict(view.counts)
    by_stage = {key: counts.pop(name) for key, name in _STAGE_COUNTS.items()}
    stages = [
        {
            "stage": stage.name,
            "scope": stage.scope,
            "needs": list(stage.needs),
            **{key: figures.get(stage.name, 0) for key, figures in by_stage.items()},
            "leases": [
                {
                    "lease": one.lease,
                    "worker": one.worker,
                    "rows": one.rows,
                    "idle_s": round(stage.lease_s - one.left_s, 3),
                    "left_s": round(one.left_s, 3),
                }
                for one in view.leases_of(stage)
            ],
        }
        for stage in view.table.stages
    ]
    limits = {name: {"used": used, "limit": limit} for name, (used, limit) in view.limits().items()}
    broken = {} if view.broken is None else {"broken": list(view.broken)}
    return {"table": view.table.name, "limits": limits, **counts, "stages": stages, **broken}


_STAGE_COUNTS = {"waiting": "waiting", "ready": "ready", "leased": "leased", "past": "acked"}


def _waiting_json(one: Waiting) -> dict[str, Any]:
    return {
        "worker": one.worker,
        "table": one.table,
        "stage": one.stage,
        "for": one.for_what,
        "since_s": round(one.since_s, 3),
    }


# -- for people -------------------------------------------------------------------------------------------------


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader of a pipe has seen enough: the command ends well, where rich would exit with 1."""
        raise BrokenPipeError


def new_console() -> Console:
    """Where text for people goes; a pipe gets long lines and no colours."""
    return _Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False, markup=False
    )


def new_grid(*titles: str, right: Sequence[str] = ()) -> Grid:
    """A table without lines; the columns of `right` are figures."""
    grid = Grid(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in titles:
        grid.add_column(title, justify="right" if title in right else "left", no_wrap=title == "id")
    return grid


def _print_views(run: RunFolder, views: Sequence[_View], waiting: Sequence[Waiting]) -> None:
    console = new_console()
    for view in views:
        _print_view(view, console, run)
    grid = new_grid("who waits", "where", "for", "since", right=("since",))
    by_what: dict[tuple[str, str], list[Waiting]] = {}
    for one in sorted(waiting, key=lambda one: -one.since_s):
        where = f"{one.table}, stage {one.stage}" if one.stage else one.table
        by_what.setdefault((where, one.for_what), []).append(one)
    for (where, what), ones in by_what.items():
        grid.add_row(_some([one.worker for one in ones]), where, what, f"{ones[0].since_s:.1f} s")
    console.print(grid if waiting else "nobody waits")


def _print_view(view: _View, console: Console, run: RunFolder) -> None:
    counts = view.counts
    title = f"{run.run_id}, table {view.table.name}: {counts.live:,} live of {counts.admitted:,} rows admitted"
    console.print(Text(f"{title}, policy version {counts.version}", style="bold"))
    console.print("holds: " + ", ".join(_limit(*one) for one in view.limits().items()))
    grid = new_grid(
        "stage", "waiting", "ready", "leased", "past", "oldest lease", right=("waiting", *_STAGE_COUNTS)
    )
    for stage in view.table.stages:
        by_stage = (counts.waiting, counts.ready, counts.leased, counts.acked)
        figures = [f"{figure.get(stage.name, 0):,}" for figure in by_stage]
        grid.add_row(stage.name, *figures, _oldest(stage, view.leases_of(stage)))
    console.print(grid)
    for line in _ends(counts):
        console.print(line)
    console.print(
        f"redelivered {counts.redelivered:,}, fenced {counts.fenced:,}, dead letters {counts.dead_letters:,}"
        + (f", trained {counts.uses:,} times" if view.table.max_uses > 1 else "")
    )
    if view.broken is not None:
        for broken in view.broken:
            console.print(Text(f"BROKEN: {plain(broken)}", style="bold red"))
        if not view.broken:
            console.print(Text("verify: found no broken invariant", style="green"))
    console.print()


_LIMIT_WORDS = {"rows": "rows", "bytes": "payload", "versions": "rows in the window of versions"}


def _limit(what: str, figures: tuple[int, int | None]) -> str:
    used, limit = figures
    show: Callable[[int], str] = _size if what == "bytes" else "{:,}".format
    name = _LIMIT_WORDS[what]
    if limit is None:
        return f"{show(used)} {name} (no limit)"
    return f"{show(used)} of {show(limit)} {name} ({used / max(1, limit):.0%})"


def _oldest(stage: Stage, leases: Sequence[Lease]) -> str:
    """The lease that made no progress for the longest time, in words."""
    if not leases:
        return ""
    oldest = leases[0]
    end = f"ends in {oldest.left_s:.1f} s" if oldest.left_s >= 0 else f"over since {-oldest.left_s:.1f} s"
    more = f", {len(leases) - 1} more" if len(leases) > 1 else ""
    idle_s = stage.lease_s - oldest.left_s
    return f"{oldest.worker}, {row_count(oldest.rows)}, progress {idle_s:.1f} s ago, {end}{more}"


def _ends(counts: TableCounts) -> Iterator[str]:
    """`ended: 640 trained`, one line per state and reason, most rows first."""
    ends = sorted(counts.ended.items(), key=lambda one: -one[1])
    for label, rows in ends[:_ENDS_SHOWN]:
        state = _state(label)
        reason = label.removeprefix(state).removeprefix("(").removesuffix(")")
        yield f"ended: {rows:,} {state}" + (f" ({plain(reason)})" if reason else "")
    if len(ends) > _ENDS_SHOWN:
        yield f"ended: {sum(rows for _, rows in ends[_ENDS_SHOWN:]):,} for {len(ends) - _ENDS_SHOWN} other reasons"


def _state(label: str) -> str:
    """`filtered` of `filtered(no_verdict)`."""
    return label.partition("(")[0]


def row_count(count: int) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} row{'s' * (count != 1)}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f", {more} more" if more > 0 else "")


def _size(size_bytes: int) -> str:
    """Bytes as `1.3 MB`."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def plain(text: str) -> str:
    """Control characters as one symbol: a traceback must not be able to steer the terminal."""
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else "�" for c in text)
