"""A graph of nodes that read and write columns: its edges, its order, and what is wrong with it.

An edge is there because a column that one node writes is read by the other, because it was asked for, or because
a node keeps some rows only: whatever does not feed such a node waits for its verdict, so that a row that was not
kept reaches nothing after it. Of two such nodes the later one waits for the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlmq.common.errors import UsageError


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node. `after` are nodes that it waits for beside those that write what it reads; `keep` is the column by
    which it keeps rows, or empty."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    keep: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """`target` waits for these columns of `source`; with `next_step`, for those of the step before."""

    source: str
    target: str
    columns: tuple[str, ...] = ()
    next_step: bool = False


@dataclass(frozen=True, slots=True)
class Graph:
    """A checked graph.

    Attributes:
        order: names of the nodes, each after all that it waits for.
        edges: in the order of their sources, then of their targets.
        unread: columns that no node reads or waits for.
    """

    order: tuple[str, ...]
    edges: tuple[Edge, ...]
    unread: tuple[str, ...] = field(default=())


def graph_of(nodes: Sequence[GraphNode], *, next_step: Iterable[tuple[str, str]] = ()) -> Graph:
    """Find the edges and check the graph. Where nodes are equal, their given order counts.

    Args:
        nodes: the nodes.
        next_step: pairs of names, edges from one step to the next; they may close a cycle.

    Raises:
        UsageError: two nodes of a name, two writers of a column, a column or node that nobody is, or a cycle inside
            a step.
    """
    writers = _writers(nodes)
    needed: dict[str, dict[str, list[str]]] = {node.name: {} for node in nodes}
    for node in nodes:
        for column in node.reads:
            if column not in writers:
                known = ", ".join(writers)
                raise UsageError(f"node {node.name} reads", got=repr(column), expected=f"one of {known}")
            needed[node.name].setdefault(writers[column], []).append(column)
        for source in node.after:
            _known(source, needed, f"an edge to {node.name}")
            needed[node.name].setdefault(source, [])
    _gate(nodes, needed)
    order = _ordered(needed)
    later = [(_known(a, needed, "an edge"), _known(b, needed, "an edge")) for a, b in next_step]
    own = {node.name: node for node in nodes}
    edges = [
        Edge(source, name, tuple(columns) or own[source].writes[:1])
        for name in order
        for source, columns in needed[name].items()
    ]
    place = {name: index for index, name in enumerate(order)}
    edges.sort(key=lambda edge: (place[edge.source], place[edge.target]))
    used = {column for edge in edges for column in edge.columns}
    unread = tuple(column for column in writers if column not in used)
    return Graph(order, (*edges, *(Edge(a, b, (), next_step=True) for a, b in later)), unread)


def _writers(nodes: Sequence[GraphNode]) -> dict[str, str]:
    writers: dict[str, str] = {}
    names: set[str] = set()
    for node in nodes:
        if node.name in names:
            raise UsageError("the nodes", got=f"two of the name {node.name!r}", expected="a name for each")
        names.add(node.name)
        if node.keep and node.keep not in node.writes:
            raise UsageError(f"node {node.name} keeps by", got=repr(node.keep), expected="a column that it writes")
        for column in node.writes:
            if column in writers:
                raise UsageError(
                    f"column {column}", got=f"two writers, {writers[column]} and {node.name}", expected="one"
                )
            writers[column] = node.name
    return writers


def _known(name: str, names: Iterable[str], subject: str) -> str:
    if name not in names:
        raise UsageError(subject, got=f"no node {name!r}", expected=f"one of {', '.join(names)}")
    return name


def _gate(nodes: Sequence[GraphNode], needed: dict[str, dict[str, list[str]]]) -> None:
    """Whatever does not feed a node that keeps rows waits for it."""
    gates = [node for node in nodes if node.keep]
    for place, gate in enumerate(gates):
        feeding = _feeding(gate.name, needed)
        earlier = {one.name for one in gates[:place]}
        for node in nodes:
            if node.name not in feeding | earlier | {gate.name}:
                columns = needed[node.name].setdefault(gate.name, [])
                if gate.keep not in columns:
                    columns.append(gate.keep)


def _feeding(name: str, needed: Mapping[str, Mapping[str, Sequence[str]]]) -> set[str]:
    """Every node that this one waits for, directly or not."""
    found: set[str] = set()
    open_ = list(needed[name])
    while open_:
        one = open_.pop()
        if one not in found:
            found.add(one)
            open_ += needed[one]
    return found


def _ordered(needed: Mapping[str, Mapping[str, Sequence[str]]]) -> tuple[str, ...]:
    """Each name after all that it needs; the first that is free comes first."""
    order: list[str] = []
    left = list(needed)
    while left:
        free = next((name for name in left if all(source in order for source in needed[name])), None)
        if free is None:
            raise UsageError(
                "the flow inside a step",
                got=f"a cycle {' -> '.join(_cycle(left, needed))}",
                expected="nodes that wait for earlier ones",
                remedy="Remove one of these edges, or let it cross the step (next_step=True)",
            )
        order.append(free)
        left.remove(free)
    return tuple(order)


def _cycle(left: Sequence[str], needed: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    """Names along one cycle, in the direction of the edges."""
    path = [left[0]]
    while path.count(path[-1]) == 1:
        path.append(next(source for source in needed[path[-1]] if source in left))
    return path[path.index(path[-1]) :][::-1]
