"""`rlmq node add`: a node joins a run that goes on."""

from __future__ import annotations

from pathlib import Path

from rlmq.buffer.layout import TOLD
from rlmq.common.errors import ExitCode, UsageError
from rlmq.common.flow import EVAL, TRAIN, flow_of, sample_columns
from rlmq.common.joined_nodes import join, joined_nodes
from rlmq.common.node_function import node_function
from rlmq.common.recipe.load import load_joined
from rlmq.common.recipe.node_block import NodeBlock
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.runs import find_run


def node_add_command(file: Path, run: str | None, *, folder: Path) -> int:
    """`rlmq node add`: checks the item, then leaves it in the run's folder, where the supervisor finds it."""
    found = find_run(folder, run)
    recipe, block = load_joined(found.recipe, file)
    _check(recipe, block, found)
    node_function(block, file.resolve().parent)
    join(found, block)
    place = found.samples / f"{block.name}-*.parquet"
    print(f"run {found.run_id}: node {block.name} sees the rows that end from now on, see {place}")
    return int(ExitCode.OK)


def _check(recipe: Recipe, block: NodeBlock, run: RunFolder) -> None:
    subject = f"node {block.name}"
    taken = {"controller", "redis", "operator", TRAIN, EVAL, *recipe.workers(), *joined_nodes(run), *recipe.tables}
    if block.name in taken:
        raise UsageError("node add", got=f"the name {block.name!r}", expected="one that nothing in the run has")
    known = [*(column.name for column in sample_columns(flow_of(recipe))), *TOLD.names]
    missing = [name for name in block.reads if name not in known]
    if missing:
        raise UsageError(f"{subject} reads", got=repr(missing[0]), expected=f"one of {', '.join(known)}")
    if block.keep is not None or block.before or block.scope != "row":
        raise UsageError(
            subject,
            got="keep, before or scope: group",
            expected="none of them in a node that joins: it sees rows that have ended",
            remedy="Put it into the recipe of a new run",
        )
