"""`rlmq sql`: DuckDB over the recordings and figures of runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlmq.buffer.layout import TOLD
from rlmq.buffer.recording import Recording, place_of
from rlmq.cli_buffer import buffer_of
from rlmq.common.columns import arrow_schema
from rlmq.common.errors import DependencyError, UsageError
from rlmq.common.run_folder import RunFolder
from rlmq.consumers.report import metrics_of
from rlmq.controller.runs import find_run


def sql_command(query: str, runs: Sequence[str], *, folder: Path, live: bool, as_json: bool) -> int:
    """`rlmq sql`."""
    found = [find_run(folder, one) for one in runs] or [find_run(folder, None)]
    tables = tables_of(found) | ({"live": live_rows(found)} if live else {})
    answer = query_tables(tables, query)
    if as_json:
        for row in answer.to_pylist():
            print(json.dumps(row, default=str))
        return 0
    _print(answer)
    return 0


def query_tables(tables: Mapping[str, pa.Table], query: str) -> pa.Table:
    """What a query answers over these tables; nothing else can be reached by it.

    Raises:
        DependencyError: there is no DuckDB. UsageError: a query that it refuses.
    """
    try:
        import duckdb
    except ModuleNotFoundError as error:
        remedy = "Install it: pip install 'rlmq[analysis]'"
        raise DependencyError("rlmq sql", got="no package duckdb", remedy=remedy) from error
    with duckdb.connect(config={"enable_external_access": "false"}) as connection:
        for name, table in tables.items():
            connection.register(name, table)
        try:
            found = connection.sql(query)
            return pa.table({}) if found is None else found.to_arrow_table()
        except duckdb.Error as error:
            raise UsageError("the query", got=str(error), expected="SQL of DuckDB") from error


def tables_of(runs: Sequence[RunFolder]) -> dict[str, pa.Table]:
    """The recorded tables and `metrics` of the runs, those of one name together."""
    parts: dict[str, list[pa.Table]] = {}
    for run in runs:
        recording = Recording(place_of(run))
        own = {table: recording.read(table) for table in recording.tables()}
        if lines := metrics_of(run):
            own["metrics"] = pa.Table.from_struct_array(pa.array(lines))
        for name, table in own.items():
            named = table.add_column(0, "run", pa.array([run.run_id] * table.num_rows, pa.string()))
            parts.setdefault(name, []).append(named)
    return {name: pa.concat_tables(tables, promote_options="permissive") for name, tables in parts.items()}


def live_rows(runs: Sequence[RunFolder]) -> pa.Table:
    """The rows that the servers of live runs hold, of all tables, with `run` and `table`; absent columns are null.

    Raises:
        DependencyError: a run's server does not answer.
    """
    parts = []
    for run in runs:
        with buffer_of(run) as buffer:
            for table in buffer.tables:
                ranges = buffer.store.held(table.name)
                schema = pa.schema([*arrow_schema(table.columns), *TOLD])
                read = [buffer.store.read(table.name, ranges, schema.names)] if ranges else []
                rows = pa.Table.from_batches(read, schema=schema)
                for name, value in (("table", table.name), ("run", run.run_id)):
                    rows = rows.add_column(0, name, pa.array([value] * rows.num_rows, pa.string()))
                parts.append(rows)
    return pa.concat_tables(parts, promote_options="permissive")


def _print(answer: pa.Table) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in answer.column_names:
        table.add_column(name)
    for row in answer.to_pylist():
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    Console(file=sys.stdout).print(table)


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() else "�" for c in text)
