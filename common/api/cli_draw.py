"""`rlmq draw`: the flow of a recipe or of a script, as text or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlmq.common.dataflow import DataFlow
from rlmq.common.errors import UsageError
from rlmq.common.flow import flow_of
from rlmq.common.flow_drawing import as_svg, as_text
from rlmq.common.flow_nodes import flow_graph
from rlmq.common.graph import Graph
from rlmq.common.recipe.load import load_recipe
from rlmq.common.user_code import is_spec, load_function, load_module


def draw_command(flow: str, overrides: Sequence[str], svg: Path | None) -> int:
    """`rlmq draw`."""
    graph = _graph(flow, overrides)
    if svg is None:
        print(as_text(graph))
        return 0
    svg.write_text(as_svg(graph))
    print(svg)
    return 0


def _graph(flow: str, overrides: Sequence[str]) -> Graph:
    if not flow.endswith(".py") and not is_spec(flow):
        recipe = load_recipe(Path(flow), overrides).recipe
        return flow_graph(flow_of(recipe), recipe.nodes)
    if overrides:
        raise UsageError("draw", got=f"{overrides[0]} with a script", expected="KEY=VALUE with a recipe only")
    if is_spec(flow):
        found = load_function(flow, Path.cwd(), subject="flow")
        if isinstance(found, DataFlow):
            return found.graph()
        raise UsageError(f"flow {flow}", got=f"a {type(found).__name__}", expected="a DataFlow")
    flows = [one for one in vars(load_module(Path(flow), subject="flow")).values() if isinstance(one, DataFlow)]
    if len({id(one) for one in flows}) != 1:
        raise UsageError(f"flow {flow}", got=f"{len(flows)} flows", expected="one", remedy=f"Name it: {flow}:NAME")
    return flows[0].graph()
