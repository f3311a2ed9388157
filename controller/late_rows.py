"""Who has the rows that do not come: what an error of a deadline says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlmq.buffer.store import ExperienceStore
from rlmq.buffer.tables import sample_tables
from rlmq.common.flow import flow_of, flow_table
from rlmq.common.recipe.schema import Recipe
from rlmq.controller.plan import Worker


def late_rows(
    recipe: Recipe, store: ExperienceStore, members: Sequence[Worker], table: str, stage: str, *, itself: bool
) -> str:
    """Who holds the rows that have not reached a stage, or leaves them unclaimed.

    Args:
        recipe: of the run.
        store: of the run.
        members: workers that are there.
        table: of the rows.
        stage: that lacks them.
        itself: whether the rows must also have passed the stage.
    """
    return "; ".join(_lines(recipe, store, members, table, stage, itself)) or "nobody has them"


def _lines(
    recipe: Recipe, store: ExperienceStore, members: Sequence[Worker], table: str, stage: str, itself: bool
) -> Iterator[str]:
    flow = flow_of(recipe)
    found = next(one for one in sample_tables(flow, capacity_rows=1) if one.name == flow_table(table))
    role = {node.name: node.role for node in flow}
    counts, leases = store.counts(table), store.leases(table)
    for one in (*found.before(stage), *((stage,) if itself else ())):
        held = [lease for lease in leases if lease.stage == one]
        lease_s = next(known.lease_s for known in found.stages if known.name == one)
        for lease in held:
            still_s = lease_s - lease.left_s
            yield f"{lease.worker} holds {lease.rows} rows of stage {one}, no progress for {still_s:.1f} s"
        if not held and (ready := counts.ready.get(one, 0)):
            there = [f"{member.name} ({member.activity})" for member in members if member.role == role[one]]
            by = ", ".join(there) or f"{role[one]}, of which nobody is there"
            yield f"{ready} rows of stage {one} are left unclaimed by {by}"
