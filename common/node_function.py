"""The function of a node, found by what the recipe says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlmq.common.dataflow import DataFlow
from rlmq.common.errors import UsageError
from rlmq.common.lazy_model import HfModel, load_hf_model
from rlmq.common.recipe.node_block import NodeBlock
from rlmq.common.user_code import load_function


def node_function(block: NodeBlock, folder: Path) -> tuple[Callable[..., object], HfModel | None]:
    """The function of a node, and its model if it has one, as the recipe or the user's flow names them.

    Raises:
        UsageError: a function that cannot be found or imported, or a flow without this node.
    """
    if block.function is None:
        raise UsageError(f"node {block.name}", got="a scorer", expected="a function")
    found = load_function(block.function, folder, subject=f"node {block.name}")
    if isinstance(found, type):
        found = found()
    model = load_hf_model(block.model) if block.model is not None else None
    function: Callable[..., object] = found
    if isinstance(found, DataFlow):
        node = found.node(block.name)
        if node.forward_fn is None:
            raise UsageError(f"node {block.name} of {block.function}", got="no forward_fn", expected="a function")
        function = node.forward_fn
        model = node.model if isinstance(node.model, HfModel) else model
    if model is not None:
        model.folder = folder
    return function, model
