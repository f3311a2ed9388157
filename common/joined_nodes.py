"""Nodes that joined a run after it began: one file each in the run's folder, which every process of it can read.

The columns of the run's tables are fixed, so such a node adds none: it sees rows when they have ended, with all
their columns, and what it says of them is a recording of its own, `samples/NAME-STEP-PART.parquet`. Nobody waits
for it.
"""

from __future__ import annotations

from rlmq.common.recipe.node_block import NodeBlock
from rlmq.common.run_folder import RunFolder


def joined_nodes(run: RunFolder) -> dict[str, NodeBlock]:
    """Their items by name."""
    found = [NodeBlock.model_validate_json(path.read_bytes()) for path in sorted(run.nodes.glob("*.json"))]
    return {block.name: block for block in found}


def join(run: RunFolder, block: NodeBlock) -> None:
    """Write the item, whole."""
    run.nodes.mkdir(exist_ok=True)
    temporary = run.nodes / f".{block.name}.tmp"
    temporary.write_text(block.model_dump_json(indent=1))
    temporary.rename(run.nodes / f"{block.name}.json")
