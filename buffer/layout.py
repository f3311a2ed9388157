"""How a table's columns and stages lie in the server: units of columns, the configuration, the fingerprints.

A *unit* (column group) is a set of columns that one role writes and the same stages need: it travels as one
piece of payload, and readiness is tracked per unit, so that a claim moves only what it asks for. Units are
fixed when the table is created; a stage that is added later needs the units that hold its columns.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import pyarrow as pa

from rlmq.buffer.store import Stage, Table, VersionWindow
from rlmq.common.columns import Column, arrow_schema, fingerprint
from rlmq.common.errors import SchemaMismatch, UsageError

END_COLUMNS = pa.schema([("end_state", pa.string()), ("end_reason", pa.string()), ("end_step", pa.int64())])
LINEAGE = pa.field("lineage", pa.string())
TOLD = pa.schema([*END_COLUMNS, LINEAGE])  # columns that the store itself tells
MAX_DELIVERIES = 40  # the functions keep deliveries and uses in one character each
MAX_CAPACITY_ROWS = 2**31
_MIN_BATCH_LIMIT = 2**31
_SCHEMAS = 16  # remembered as right


# A unit (1-based), and where its columns are in a batch (None: it has just them, in order).
Part = tuple[int, list[int] | None]


@dataclass(frozen=True)
class Layout:
    """A table with everything derived from it. `fixed_units` is empty until the server has the table."""

    table: Table
    fixed_units: tuple[tuple[str, ...], ...] = field(default=())
    identity: str = field(
        default_factory=lambda: secrets.token_hex(5)
    )  # of this table, not of one made after a loss

    def __post_init__(self) -> None:
        _check(self.table)

    @classmethod
    def stored(cls, name: str, blobs: Sequence[bytes]) -> Layout:
        """The layout of a table as the server has it: columns, limits, one blob per stage."""
        columns, limits, *stages = (msgspec.msgpack.decode(blob) for blob in blobs)
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(columns["columns"])))
        return cls(
            Table(
                name,
                tuple(Column(f.name, f.type, w) for f, w in zip(schema, columns["writers"], strict=True)),
                tuple(_stage(one) for one in stages),
                capacity_rows=limits["capacity_rows"],
                capacity_bytes=limits["capacity_bytes"],
                max_uses=limits["max_uses"],
                window=VersionWindow(**limits["window"]) if limits["window"] else None,
                seed=limits["seed"],
                max_dead_rows=limits["max_dead_rows"],
            ),
            tuple(tuple(names) for names in columns["units"]),
            columns["identity"],
        )

    @cached_property
    def schema(self) -> pa.Schema:
        """All columns, in order."""
        return arrow_schema(self.table.columns)

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """Column names by unit, units by their first column."""
        if self.fixed_units:
            return self.fixed_units
        units: dict[tuple[str, frozenset[str]], list[str]] = {}
        for column in self.table.columns:
            stages = frozenset(s.name for s in self.table.stages if column.name in s.needs)
            units.setdefault((column.writer, stages), []).append(column.name)
        return tuple(tuple(names) for names in units.values())

    @cached_property
    def unit_schemas(self) -> tuple[pa.Schema, ...]:
        """Schema of each unit's pieces."""
        return tuple(pa.schema([self.schema.field(name) for name in names]) for names in self.units)

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
        """Changes with what rows in the server depend on: stages by name, needs, scope, selector, ended."""
        stages = [(s.name, sorted(s.needs), s.scope, s.selector, s.ended) for s in self.table.stages]
        return hashlib.sha256(repr(stages).encode()).hexdigest()[:16]

    @cached_property
    def blobs(self) -> list[bytes]:
        """What the functions know of the table (msgpack): columns, limits, one per stage."""
        table = self.table
        columns = {
            "schema": self.schema_fingerprint,
            "identity": self.identity,
            "units": self.units,
            "columns": base64.b64encode(self.schema.serialize()).decode(),
            "writers": [c.writer for c in table.columns],
        }
        limits = {
            "capacity_rows": table.capacity_rows,
            "capacity_bytes": table.capacity_bytes,
            "max_uses": table.max_uses,
            "window": msgspec.to_builtins(table.window),
            "seed": table.seed,
            "max_dead_rows": table.max_dead_rows,
        }
        return [msgspec.msgpack.encode(one) for one in (columns, limits, *map(_stage_record, table.stages))]

    def stage_index(self, name: str) -> int:
        """1-based, as the functions count."""
        index = self._stage_indexes.get(name)
        if index is None:
            known = ", ".join(self._stage_indexes)
            raise UsageError(f"stage of table '{self.table.name}'", got=repr(name), expected=f"one of {known}")
        return index

    @cached_property
    def _stage_indexes(self) -> dict[str, int]:
        return {stage.name: index for index, stage in enumerate(self.table.stages, start=1)}

    def stage(self, name: str) -> Stage:
        """The stage of this name."""
        return self.table.stages[self.stage_index(name) - 1]

    def select(self, columns: Sequence[str] | None) -> Selection:
        """The asked-for columns (None: all of the table); those of `TOLD` may be among them."""
        key = None if columns is None else tuple(columns)
        found = self._selections.get(key)
        if found is None:
            names = self.schema.names if key is None else key
            for name in names:
                if name not in self.place and name not in TOLD.names:
                    raise SchemaMismatch(
                        f"column of table '{self.table.name}'",
                        got=repr(name),
                        expected=f"one of {self.schema.names}",
                    )
            fields = [(self.schema if name in self.place else TOLD).field(name) for name in names]
            units = sorted({self.place[name][0] + 1 for name in names if name in self.place})
            if "lineage" in names and "lineage" not in self.place:
                units = list(range(1, len(self.units) + 1))
            one_unit = len(units) == 1 and tuple(names) == self.units[units[0] - 1]
            places = [self.place.get(name) for name in names]
            found = Selection(
                pa.schema(fields),
                tuple(units),
                one_unit,
                tuple(place and (place[0] + 1, place[1]) for place in places),
                "lineage" in names and "lineage" not in self.place,
            )
            self._selections[key] = found
        return found

    @cached_property
    def _selections(self) -> dict[tuple[str, ...] | None, Selection]:
        return {}

    def checked(self, rows: pa.RecordBatch, *, prefix: bool) -> list[Part]:
        """What `rows` brings, when they are whole units of this table with the right types.

        With `prefix`, `rows` begins with the table's first column and follows its order.

        Raises:
            SchemaMismatch: another name, type or order, or a part of a unit.
        """
        schema = rows.schema
        for known, known_prefix, parts in self._checked:  # comparing costs a hundredth of hashing
            if known_prefix == prefix and known.equals(schema):
                return parts
        parts = self._check_schema(schema, prefix)
        if len(self._checked) < _SCHEMAS:
            self._checked.append((schema, prefix, parts))
        return parts

    @cached_property
    def _checked(self) -> list[tuple[pa.Schema, bool, list[Part]]]:
        return []

    def _check_schema(self, schema: pa.Schema, prefix: bool) -> list[Part]:
        names = schema.names
        if len(set(names)) != len(names) or not names:
            raise SchemaMismatch(f"columns for table '{self.table.name}'", got=names, expected="distinct columns")
        if prefix and names != self.schema.names[: len(names)]:
            expected = f"the table's first columns {self.schema.names[: len(names)]}"
            raise SchemaMismatch(f"columns put into table '{self.table.name}'", got=names, expected=expected)
        for one in schema:
            if one.name not in self.place or one.type != self.schema.field(one.name).type:
                known = one.name in self.place
                expected = str(self.schema.field(one.name).type) if known else f"one of {self.schema.names}"
                raise SchemaMismatch(f"column '{one.name}' of '{self.table.name}'", got=one.type, expected=expected)
        units = sorted({self.place[name][0] for name in names})
        for unit in units:
            missing = [name for name in self.units[unit] if name not in names]
            if missing:
                raise SchemaMismatch(
                    f"columns for table '{self.table.name}'",
                    got=f"{names} without {missing}",
                    expected=f"the whole column group {list(self.units[unit])}",
                    remedy="Write columns of one writer that the same stages need together",
                )
        indexes = [[names.index(name) for name in self.units[unit]] for unit in units]
        whole = list(range(len(names)))
        return [(unit + 1, None if at == whole else at) for unit, at in zip(units, indexes, strict=True)]


@dataclass(frozen=True, slots=True)
class Selection:
    """Columns that a reader asks for, and the 1-based units that are needed for them;

    `one_unit`: just all of one. `places`: unit and index in it of each column (None: the store tells it).
    """

    schema: pa.Schema
    units: tuple[int, ...]
    one_unit: bool
    places: tuple[tuple[int, int] | None, ...]
    lineage: bool


def _stage_record(stage: Stage) -> dict[str, Any]:
    return {
        "name": stage.name,
        "scope": stage.scope,
        "ended": stage.ended,
        "needs": sorted(stage.needs),
        "lease_ms": max(1, int(stage.lease_s * 1000)),
        "max_deliveries": stage.max_deliveries,
        "selector": stage.selector,
        "min_batch": stage.min_batch,
        "max_wait_ms": None if stage.max_wait_s is None else int(stage.max_wait_s * 1000),
        "min_size": stage.min_size,
        "samples_per_insert": stage.samples_per_insert,
        "error_buffer": stage.error_buffer,
        "max_staleness": stage.max_staleness,
        "group_deadline_ms": None if stage.group_deadline_s is None else int(stage.group_deadline_s * 1000),
        "group_min": stage.group_min,
    }


def _stage(record: dict[str, Any]) -> Stage:
    fields = dict(record)
    fields["needs"] = tuple(fields["needs"])
    fields["lease_s"] = fields.pop("lease_ms") / 1000
    for name in ("max_wait", "group_deadline"):
        value = fields.pop(f"{name}_ms")
        fields[f"{name}_s"] = None if value is None else value / 1000
    return Stage(**fields)


def _check(table: Table) -> None:
    names = [c.name for c in table.columns]
    subject = f"table '{table.name}'"
    if len(set(names)) != len(names):
        raise UsageError(subject, got=names, expected="distinct column names")
    if not 0 < table.capacity_rows <= MAX_CAPACITY_ROWS:
        raise UsageError(f"capacity_rows of {subject}", got=table.capacity_rows, expected="at least 1")
    if table.capacity_bytes is not None and table.capacity_bytes < 1:
        raise UsageError(f"capacity_bytes of {subject}", got=table.capacity_bytes, expected="at least 1, or None")
    if table.window and (table.window.rows_per_version < 1 or table.window.versions < 0):
        raise UsageError(f"window of {subject}", got=table.window, expected="rows_per_version ≥ 1, versions ≥ 0")
    if table.max_dead_rows < 0:
        raise UsageError(f"max_dead_rows of {subject}", got=table.max_dead_rows, expected="at least 0")
    if not 1 <= table.max_uses <= MAX_DELIVERIES:
        raise UsageError(f"max_uses of {subject}", got=table.max_uses, expected=f"1 to {MAX_DELIVERIES}")
    if len({s.name for s in table.stages}) != len(table.stages):
        raise UsageError(subject, got=[s.name for s in table.stages], expected="distinct stage names")
    for stage in table.stages:
        _check_stage(stage, names, subject)


def _check_stage(stage: Stage, names: list[str], table: str) -> None:
    subject = f"stage '{stage.name}' of {table}"
    missing = [name for name in stage.needs if name not in names]
    if missing:
        raise UsageError(subject, got=f"needs {missing}", expected=f"columns of {names}")
    if not 1 <= stage.max_deliveries <= MAX_DELIVERIES or stage.lease_s <= 0:
        got = f"max_deliveries {stage.max_deliveries}, lease_s {stage.lease_s}"
        raise UsageError(subject, got=got, expected=f"1 to {MAX_DELIVERIES} deliveries and a positive lease")
    if not 1 <= stage.min_batch <= _MIN_BATCH_LIMIT or stage.min_size < 0 or stage.error_buffer < 0:
        got = f"min_batch {stage.min_batch}, min_size {stage.min_size}, error_buffer {stage.error_buffer}"
        raise UsageError(subject, got=got, expected="min_batch ≥ 1, min_size ≥ 0, error_buffer ≥ 0")
    limits = (stage.max_staleness, stage.max_wait_s, stage.group_deadline_s)
    if any(limit is not None and limit < 0 for limit in limits) or stage.group_min < 1:
        got = f"(max_staleness, max_wait_s, group_deadline_s) {limits}, group_min {stage.group_min}"
        raise UsageError(subject, got=got, expected="nothing negative, and group_min ≥ 1")
    if stage.samples_per_insert is not None and stage.samples_per_insert <= 0:
        raise UsageError(subject, got=f"samples_per_insert {stage.samples_per_insert}", expected="more than 0")
    if stage.group_deadline_s is not None and stage.scope not in ("group", "chunk"):
        raise UsageError(subject, got=f"group_deadline_s in scope {stage.scope}", expected="scope group or chunk")
    if stage.ended and (stage.selector != "fifo" or stage.scope not in ("row", "chunk")):
        got = f"selector {stage.selector}, scope {stage.scope}"
        raise UsageError(subject, got=got, expected="fifo rows for a stage of ended rows")
    if stage.selector in ("uniform", "prioritized") and stage.scope == "chunk":
        raise UsageError(subject, got=f"selector {stage.selector} in scope chunk", expected="row, group or batch")
