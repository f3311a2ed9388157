"""The table that the machine drives, and the dimensions in which it varies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from rlmq.buffer.store import Stage, Table, VersionWindow
from rlmq.common.columns import Column

LATER_S, SOON_S = 600.0, 0.001  # times are over when the machine says so

COLUMNS = (
    Column("x", pa.int64(), "source"),
    Column("y", pa.int64(), "a"),
    Column("y2", pa.int64(), "a"),
    Column("z", pa.int64(), "b"),
)
NEEDS = {"a": ("x",), "b": ("y", "y2"), "end": ("x", "z"), "recorder": (), "late": ("y", "y2")}
WRITES = {"a": ("y", "y2"), "b": ("z",)}

DIMENSIONS: dict[str, list[Any]] = {
    "a_scope": ["row", "group", "chunk"],
    "b_scope": ["row", "group"],
    "end_scope": ["row", "group", "batch"],
    "a_selector": ["fifo", "fresh_first"],
    "end_selector": ["fifo", "fresh_first", "uniform", "prioritized"],
    "min_batch": [1, 3],
    "max_wait_s": [None, LATER_S],
    "min_size": [0, 4],
    "group_deadline_s": [None, SOON_S],
    "max_staleness": [None, 1],
    "max_uses": [1, 2],
    "max_deliveries": [1, 2, 3],
    "capacity_rows": [16, 40],
    "window": [None, None, VersionWindow(12, 1)],
    "samples_per_insert": [None, None, 1.0],
    "max_dead_rows": [0, 2, 100],
    "recorder": [True, False],
}


def table_of(d: Mapping[str, Any], *, late: bool = False, lease_s: float = LATER_S, seed: int = 7) -> Table:
    """The table with these dimensions; `late` with the stage that comes later."""

    def stage(name: str, **options: Any) -> Stage:
        return Stage(name, NEEDS[name], lease_s=lease_s, max_deliveries=d["max_deliveries"], **options)

    deadline = {"group_deadline_s": d["group_deadline_s"], "group_min": 2} if d["b_scope"] == "group" else {}
    end = {name: d[name] for name in ("min_size", "max_staleness", "samples_per_insert")}
    stages = [
        stage("a", scope=d["a_scope"], selector=d["a_selector"]),
        stage("b", scope=d["b_scope"], min_batch=d["min_batch"], max_wait_s=d["max_wait_s"], **deadline),
        stage("end", scope=d["end_scope"], selector=d["end_selector"], error_buffer=6.0, **end),
    ]
    if d["recorder"]:
        stages.append(stage("recorder", ended=True))
    if late:
        stages.append(stage("late"))
    limits = {name: d[name] for name in ("capacity_rows", "max_uses", "window", "max_dead_rows")}
    return Table("train", COLUMNS, tuple(stages), seed=seed, **limits)


def batch_of(columns: Mapping[str, list[int]]) -> pa.RecordBatch:
    """int64 columns."""
    return pa.record_batch({name: pa.array(values, pa.int64()) for name, values in columns.items()})
