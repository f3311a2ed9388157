"""A dataflow in Python: nodes that say what they read and write, and the edges between them.

Example:
    >>> rollout = Node("rollout", model="tiny_model.py:folder")
    >>> safety = Node("safety", reads=["response_text"], writes={"safe": bool}, keep="safe", reason="unsafe",
    ...               forward_fn=lambda rows: ["bomb" not in row.response_text for row in rows])
    >>> reward = Node("reward", forward_fn=lambda completions, **_: [float(len(c)) for c in completions])
    >>> flow = DataFlow([rollout, safety, reward])
    >>> [edge.target for edge in flow.graph().edges if edge.source == "safety"]
    ['reward']
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlmq.common.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS
from rlmq.common.errors import UsageError
from rlmq.common.graph import Graph, GraphNode, graph_of
from rlmq.common.lazy_model import HfModel

BUILT_IN: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prompts": ((), tuple(column.name for column in PROMPT_COLUMNS)),
    "rollout": (("prompt_ids",), tuple(column.name for column in ROLLOUT_COLUMNS)),
    "reward": (("response_text",), ("reward",)),
    "reference": (("response_ids",), ("ref_logprobs",)),
    "critic": (("response_ids",), ("values",)),
    "actor": (("response_ids", "rollout_logprobs", "reward"), ("advantages",)),
}
"""What the roles that come with rlmq read and write, by name."""


@dataclass(frozen=True, slots=True)
class Port:
    """`node.output` or `node.input`, for `DataFlow.connect`."""

    node: Node
    side: Literal["output", "input"]


@dataclass(eq=False, slots=True)
class Node:
    """A stage of a flow. Nodes named `prompts rollout reward reference critic actor` are the roles of that name,
    with their own columns; every other one is the user's, and its function runs in workers of its own.

    Attributes:
        name: of the node; also its role.
        reads: columns that it waits for; its function sees no other.
        writes: columns that it returns, and their types: `bool int float str`, or `list[int]`, `list[float]`.
        forward_fn: function of the rows, or with a model of model and rows; of a `reward` node a reward function.
        model: of the node: `load_hf_model(...)` or a name; of a `rollout` node what it generates with.
        keep: a bool column that it writes; rows where it is false end as `filtered(reason)`.
        scope: `row` or `group`: what is never handed out in parts.
    """

    name: str
    reads: Sequence[str] = ()
    writes: Mapping[str, Any] | None = None
    forward_fn: Callable[..., Any] | None = None
    model: HfModel | str | None = None
    keep: str | None = None
    reason: str = "not_kept"
    scope: Literal["row", "group"] = "row"
    workers: int = 1
    min_batch: int = 1

    @property
    def output(self) -> Port:
        """Where edges begin."""
        return Port(self, "output")

    @property
    def input(self) -> Port:
        """Where edges end."""
        return Port(self, "input")

    @property
    def built_in(self) -> bool:
        """Whether it is one of the roles that come with rlmq."""
        return self.name in BUILT_IN

    def graph_node(self, after: Sequence[str]) -> GraphNode:
        """What the graph knows of it."""
        reads, writes = BUILT_IN.get(self.name, ((), ()))
        reads = tuple(dict.fromkeys((*reads, *self.reads)))
        return GraphNode(self.name, reads, (*writes, *(self.writes or {})), tuple(after), self.keep or "")


class DataFlow:
    """Nodes and edges. Where one node reads what another one writes there is an edge already.

    Args:
        nodes: the nodes; prompts are there without being named.
        edges: more edges, as pairs of nodes or of their names.
    """

    def __init__(self, nodes: Iterable[Node] = (), edges: Iterable[tuple[Node | str, Node | str]] = ()) -> None:
        self._nodes: list[Node] = []
        self._edges: list[tuple[str, str, bool]] = []
        for node in nodes:
            self.add_node(node)
        for source, target in edges:
            self.add_edge(source, target)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as they were added."""
        return tuple(self._nodes)

    def add_node(self, node: Node) -> None:
        """Add a node; its name must be new."""
        if any(one.name == node.name for one in self._nodes):
            raise UsageError("the nodes", got=f"two of the name {node.name!r}", expected="a name for each")
        self._nodes.append(node)

    def add_edge(self, source: Node | str, target: Node | str, *, next_step: bool = False) -> None:
        """`target` waits for `source`; with `next_step`, for what it did in the step before."""
        self._edges.append((_name(source), _name(target), next_step))

    def connect(self, output: Port, into: Port, *, next_step: bool = False) -> None:
        """`connect(a.output, b.input)` is `add_edge(a, b)`."""
        if (output.side, into.side) != ("output", "input"):
            raise UsageError("connect", got=f"{output.side}, {into.side}", expected="a.output, b.input")
        self.add_edge(output.node, into.node, next_step=next_step)

    def node(self, name: str) -> Node:
        """The node of this name.

        Raises:
            UsageError: there is none.
        """
        for one in self._nodes:
            if one.name == name:
                return one
        raise UsageError(
            "flow", got=f"no node {name!r}", expected=f"one of {', '.join(n.name for n in self._nodes)}"
        )

    def edges_to(self, name: str) -> list[str]:
        """Names of the nodes from which an edge inside the step was added."""
        return [source for source, target, later in self._edges if target == name and not later]

    def graph(self) -> Graph:
        """The checked graph.

        Raises:
            UsageError: a cycle inside a step, a missing or doubly written column, an edge to nobody.
        """
        nodes = list(self._nodes)
        if not any(node.name == "prompts" for node in nodes):
            nodes.insert(0, Node("prompts"))
        names = [node.name for node in nodes]
        for source, target, _ in self._edges:
            for name in (source, target):
                if name not in names:
                    raise UsageError("an edge", got=f"no node {name!r}", expected=f"one of {', '.join(names)}")
        later = [(source, target) for source, target, next_step in self._edges if next_step]
        return graph_of([node.graph_node(self.edges_to(node.name)) for node in nodes], next_step=later)

    def __call__(self, **columns: Any) -> Any:
        """The verdicts of the flow's reward function: so a flow can be named as one, `my_flow.py:flow`."""
        function = self.node("reward").forward_fn
        if function is None:
            raise UsageError("node reward", got="no forward_fn", expected="a reward function")
        parameters = inspect.signature(function).parameters.values()
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return function(**columns)
        named = {one.name for one in parameters}
        return function(**{name: value for name, value in columns.items() if name in named})

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run the flow on the prompts of the command line, print a line per node and the rewards, and exit."""
        import importlib
        import sys

        sys.exit(importlib.import_module("rlmq.flow_script").flow_main(self, arguments))


def _name(node: Node | str) -> str:
    return node.name if isinstance(node, Node) else node
