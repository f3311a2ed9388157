"""The user's nodes in the flow of a sample: what they wait for, and what waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from rlmq.common.columns import Column
from rlmq.common.errors import UsageError
from rlmq.common.flow import FlowNode, Handing
from rlmq.common.graph import Graph, GraphNode, graph_of
from rlmq.common.recipe.node_block import NodeBlock

COLUMN_TYPES: Mapping[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "list[int]": pa.list_(pa.field("item", pa.int64())),
    "list[float]": pa.list_(pa.field("item", pa.float64())),
    "tensor": pa.string(),  # where it is; the ranks that made it hold it
}
"""Arrow types of a node's columns by the name of the Python type."""
_UNGATED = ("prompts", "recorder")
"""Stages that no node can hold up: rows come from the one, and end before the other."""
_LAST = ("actor", "evaluation")
_RESERVED = ("controller", "operator", "redis", "critic", "reference", "reward_model", *_LAST, *_UNGATED)


def node_columns(block: NodeBlock) -> tuple[Column, ...]:
    """The columns that a node writes."""
    return tuple(Column(name, COLUMN_TYPES[kind], block.name) for name, kind in block.writes.items())


def with_nodes(flow: Sequence[FlowNode], blocks: Sequence[NodeBlock]) -> tuple[FlowNode, ...]:
    """The flow with the user's nodes between the rollout and the actor.

    A row is trained on, or its evaluation over, when every node has seen it. What does not feed a node that keeps
    rows waits for its verdict; see `rlmq.common.graph`.

    Raises:
        UsageError: a taken name, a missing or doubly written column, a cycle.
    """
    if not blocks:
        return tuple(flow)
    for block in blocks:
        if block.name in (*_RESERVED, *(node.name for node in flow)):
            raise UsageError("nodes", got=f"the name {block.name!r}", expected="one that no role has")
        bulk = [name for one in blocks for name in block.reads if one.writes.get(name) == "tensor"]
        if bulk and block.method is None:
            raise UsageError(f"node {block.name}", got=f"tensor column {bulk[0]}", expected="`method`, to read it")
    own = [
        FlowNode(
            block.name,
            block.name,
            block.reads,
            node_columns(block),
            scope=block.scope,
            handing=Handing.of(block),
        )
        for block in blocks
    ]
    place = next(index for index, node in enumerate(flow) if node.name in _LAST)
    nodes = [*flow[:place], *own, *flow[place:]]
    graph = flow_graph(nodes, blocks)
    return tuple(replace(node, needs=_needs(node, graph)) for node in nodes)


def flow_graph(flow: Sequence[FlowNode], blocks: Sequence[NodeBlock] = ()) -> Graph:
    """The graph of a flow; new weights go from the actor to the next step's rollout.

    Raises:
        UsageError: see `graph_of`.
    """
    by_name = {block.name: block for block in blocks}
    after: dict[str, list[str]] = {node.name: [] for node in flow}
    for block in blocks:
        for name in (*block.before, *(one for one in _LAST if one in after)):
            if name not in after or name in _UNGATED:
                known = ", ".join(one for one in after if one not in _UNGATED)
                raise UsageError(f"nodes: before of {block.name}", got=repr(name), expected=f"one of {known}")
            after[name].append(block.name)
    nodes = [
        GraphNode(
            node.name,
            node.needs,
            tuple(column.name for column in node.writes),
            tuple(after[node.name]),
            (by_name[node.name].keep or "") if node.name in by_name else "",
        )
        for node in flow
        if node.name != "recorder"
    ]
    closes = {"actor", "rollout"} <= after.keys()
    return graph_of(nodes, next_step=[("actor", "rollout")] if closes else [])


def _needs(node: FlowNode, graph: Graph) -> tuple[str, ...]:
    asked = (column for edge in graph.edges if edge.target == node.name for column in edge.columns)
    return tuple(dict.fromkeys((*node.needs, *asked)))
