"""The sample tables of a run and their stages, made from its flows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rlmq.buffer.store import Stage, Table
from rlmq.common.flow import EVAL, TRAIN, FlowNode, sample_columns

__all__ = ["EVAL", "TRAIN", "sample_tables"]


def sample_tables(flow: Sequence[FlowNode], *, capacity_rows: int) -> tuple[Table, ...]:
    """The tables of a flow: `train` and `eval`, or that of another loss.

    Args:
        flow: nodes of the run; every one that claims rows of a table is a stage of it.
        capacity_rows: live rows beyond which producers wait, per table.
    """
    columns = sample_columns(flow)

    def table(name: str) -> Table:
        stages = tuple(_stage(node) for node in flow if name in node.tables and (node.needs or node.ended))
        return Table(name, columns, stages, capacity_rows)

    return tuple(table(name) for name in dict.fromkeys(name for node in flow for name in node.tables))


def _stage(node: FlowNode) -> Stage:
    return Stage(node.name, needs=node.needs, scope=node.scope, ended=node.ended, **asdict(node.handing))
