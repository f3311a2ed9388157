"""How a table's columns and stages lie in the server: units of columns, the configuration, the fingerprints.

A *unit* is a set of columns that one role writes and the same stages need: it travels as one piece of
payload, and readiness is tracked per unit, so that a claim moves only what it asks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import pyarrow as pa

from rlmq.buffer.store import Stage, Table
from rlmq.common.columns import arrow_schema, fingerprint
from rlmq.common.errors import SchemaMismatch, UsageError

END_COLUMNS = pa.schema([("end_state", pa.string()), ("end_reason", pa.string()), ("end_step", pa.int64())])
MAX_DELIVERIES = 40  # the functions keep deliveries in one character
MAX_CAPACITY_ROWS = 2**31


@dataclass(frozen=True)
class Layout:
    """A table with everything derived from it."""

    table: Table

    def __post_init__(self) -> None:
        _check(self.table)

    @cached_property
    def schema(self) -> pa.Schema:
        """All columns, in order."""
        return arrow_schema(self.table.columns)

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """Column names by unit, units by their first column."""
        units: dict[tuple[str, frozenset[str]], list[str]] = {}
        for column in self.table.columns:
            stages = frozenset(s.name for s in self.table.stages if column.name in s.needs)
            units.setdefault((column.writer, stages), []).append(column.name)
        return tuple(tuple(names) for names in units.values())

    @cached_property
    def place(self) -> dict[str, tuple[int, int]]:
        """Column name to (index of its unit, index in the unit)."""
        return {name: (u, k) for u, names in enumerate(self.units) for k, name in enumerate(names)}

    @cached_property
    def schema_fingerprint(self) -> str:
        """Changes with any column."""
        return fingerprint(self.table.columns)

    @cached_property
    def shape_fingerprint(self) -> str:
        """Changes with what rows in the server depend on: stages by name, needs, scope, ended."""
        stages = [(s.name, sorted(s.needs), s.scope, s.ended) for s in self.table.stages]
        return hashlib.sha256(repr((self.units, stages)).encode()).hexdigest()[:16]

    @cached_property
    def config(self) -> bytes:
        """What the functions know of the table (msgpack)."""
        stages = [
            {
                "name": s.name,
                "scope": s.scope,
                "ended": s.ended,
                "needs": sorted({self.place[name][0] + 1 for name in s.needs}),
                "lease_ms": int(s.lease_s * 1000),
                "max_deliveries": s.max_deliveries,
            }
            for s in self.table.stages
        ]
        unit_columns = [len(names) for names in self.units]
        config = {"capacity": self.table.capacity_rows, "units": len(self.units), "stages": stages}
        return msgspec.msgpack.encode({**config, "unit_columns": unit_columns})

    @cached_property
    def version(self) -> str:
        """Fingerprint of `config`."""
        return hashlib.sha256(self.config).hexdigest()[:16]

    def stage_index(self, name: str) -> int:
        """1-based, as the functions count."""
        for index, stage in enumerate(self.table.stages, start=1):
            if stage.name == name:
                return index
        known = ", ".join(s.name for s in self.table.stages)
        raise UsageError(f"stage of table '{self.table.name}'", got=repr(name), expected=f"one of {known}")

    def stage(self, name: str) -> Stage:
        """The stage of this name."""
        return self.table.stages[self.stage_index(name) - 1]

    def select(self, columns: Sequence[str] | None) -> pa.Schema:
        """Schema of the asked-for columns (None: all of the table); `END_COLUMNS` may be among them."""
        if columns is None:
            return self.schema
        for name in columns:
            if name not in self.place and name not in END_COLUMNS.names:
                raise SchemaMismatch(
                    f"column of table '{self.table.name}'", got=repr(name), expected=f"one of {self.schema.names}"
                )
        return pa.schema([(self.schema if name in self.place else END_COLUMNS).field(name) for name in columns])

    def units_of(self, schema: pa.Schema) -> list[int]:
        """1-based units that hold the schema's columns."""
        return sorted({self.place[name][0] + 1 for name in schema.names if name in self.place})

    def checked(self, rows: pa.RecordBatch, *, prefix: bool) -> pa.RecordBatch:
        """`rows`, when its columns are of this table with the right types; with `prefix`, its first ones.

        Raises:
            SchemaMismatch: another name, type or order.
        """
        names = rows.schema.names
        if len(set(names)) != len(names) or not names:
            raise SchemaMismatch(f"columns for table '{self.table.name}'", got=names, expected="distinct columns")
        if prefix and names != self.schema.names[: len(names)]:
            expected = f"the table's first columns {self.schema.names[: len(names)]}"
            raise SchemaMismatch(f"columns put into table '{self.table.name}'", got=names, expected=expected)
        wanted = self.select([name for name in names if name not in END_COLUMNS.names or name in self.place])
        for field in rows.schema:
            if field.name not in self.place or field.type != wanted.field(field.name).type:
                expected = (
                    str(wanted.field(field.name).type) if field.name in self.place else "a column of the table"
                )
                raise SchemaMismatch(
                    f"column '{field.name}' of '{self.table.name}'", got=field.type, expected=expected
                )
        return rows


def _check(table: Table) -> None:
    names = [c.name for c in table.columns]
    subject = f"table '{table.name}'"
    if len(set(names)) != len(names):
        raise UsageError(subject, got=names, expected="distinct column names")
    if not 0 < table.capacity_rows <= MAX_CAPACITY_ROWS:
        raise UsageError(f"capacity_rows of {subject}", got=table.capacity_rows, expected="at least 1")
    if len({s.name for s in table.stages}) != len(table.stages):
        raise UsageError(subject, got=[s.name for s in table.stages], expected="distinct stage names")
    for stage in table.stages:
        missing = [name for name in stage.needs if name not in names]
        if missing:
            raise UsageError(
                f"stage '{stage.name}' of {subject}", got=f"needs {missing}", expected=f"columns of {names}"
            )
        if not 1 <= stage.max_deliveries <= MAX_DELIVERIES or stage.lease_s <= 0:
            got = f"max_deliveries {stage.max_deliveries}, lease_s {stage.lease_s}"
            expected = f"1 to {MAX_DELIVERIES} deliveries and a positive lease"
            raise UsageError(f"stage '{stage.name}' of {subject}", got=got, expected=expected)
