"""The flow of a sample: nodes that read and write its columns. Tables, stages and processes follow from it.

::

    prompts -> rollout -> reward    -> actor -> recorder     table train
                       -> reward -> groups ->                where the algorithm judges whole groups
                       -> reference ->
                       -> critic    ->
    prompts -> rollout -> reward_model -> reward             where the run trains a reward model
    prompts -> rollout -> reward -> evaluation               table eval

    prompts -> reference -> critic -> actor -> recorder      where recorded rows are trained on again
    prompts -> reference -> actor -> recorder                where the data bring the responses: table train,
                                                             and one table for each item of `losses`

No node is wired to another one: a row is ready for a node when the columns are there that the node needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from rlmq.common.columns import (
    DATA_COLUMNS,
    KEPT_COLUMNS,
    LEARNED_COLUMNS,
    PROMPT_COLUMNS,
    REFERENCE_COLUMNS,
    ROLLOUT_COLUMNS,
    Column,
    actor_columns,
    critic_columns,
    group_columns,
    reward_columns,
)
from rlmq.common.critics import critic_heads, members
from rlmq.common.errors import UsageError

if TYPE_CHECKING:
    from rlmq.common.algorithms.algorithm import Algorithm
    from rlmq.common.recipe.schema import Recipe
    from rlmq.common.recipe.stage_block import StageBlock

TRAIN = "train"
EVAL = "eval"
BOTH = (TRAIN, EVAL)


def slot_of(step: int, slots: int) -> str:
    """The table of a step's rows, where so many steps may be in flight; see `rlmq.buffer.slots`."""
    return TRAIN if slots == 1 else f"{TRAIN}.{step % slots}"


def flow_table(table: str) -> str:
    """The flow's name of a table: `train` for each of its slots."""
    return TRAIN if table.startswith(f"{TRAIN}.") else table


Scope = Literal["row", "group", "chunk", "batch"]


@dataclass(frozen=True, slots=True)
class Handing:
    """How a node is handed rows; see `rlmq.buffer.store.Stage`."""

    min_batch: int = 1
    max_wait_s: float | None = None
    lease_s: float = 60.0
    max_deliveries: int = 3

    @classmethod
    def of(cls, block: StageBlock) -> Handing:
        """As a stage or a node of the recipe says."""
        return cls(block.min_batch, block.max_wait_s, block.lease_s, block.max_deliveries)


@dataclass(frozen=True, slots=True)
class FlowNode:
    """One stage of the sample tables, and the role whose workers do its work.

    `needs` are the columns without which a row is not ready; `writes` are the columns that it adds (those of
    `prompts` come with the row). `ended`: it gets rows that have reached an end state.
    """

    name: str
    role: str
    needs: tuple[str, ...]
    writes: tuple[Column, ...] = ()
    tables: tuple[str, ...] = BOTH
    scope: Scope = "row"
    ended: bool = False
    handing: Handing = field(default_factory=Handing)


def flow_of(recipe: Recipe) -> tuple[FlowNode, ...]:
    """The nodes of a recipe, in the order in which a sample's columns stand.

    Raises:
        UsageError: no such algorithm.
    """
    from rlmq.common.algorithms import algorithm_of, spec_of
    from rlmq.common.flow_nodes import with_nodes

    algorithm = algorithm_of(recipe)
    referee = Handing.of(recipe.stages.reference)
    if not spec_of(recipe.algorithm.name).online:
        flow = offline_flow(algorithm.needs, reference=algorithm.needs_reference, referee=referee)
        return _judged(with_nodes(flow, recipe.nodes), recipe)
    flow = sample_flow(
        recipe.reward_names,
        cost=recipe.has_cost,
        actor_needs=algorithm.needs,
        reference=algorithm.needs_reference,
        critics=critic_heads(recipe, algorithm.critics),
        groups=algorithm.group_columns,
        generator="actor" if recipe.placement.actor.hybrid else "rollout",
        learned=recipe.reward_model.learns is not None,
        rewarded=tuple(block.column for block in recipe.reward if block.column is not None),
        reward=Handing.of(recipe.stages.reward),
        referee=referee,
    )
    flow = recorded_flow(flow) if recipe.data.recorded is not None else with_nodes(flow, recipe.nodes)
    return _judged(flow, recipe)


def recorded_flow(flow: Sequence[FlowNode]) -> tuple[FlowNode, ...]:
    """The flow where recorded rows bring their responses and rewards: what would write these is not there."""
    brought = ("rollout", "reward_model", "reward", "groups")
    columns = [replace(c, writer="prompts") for node in flow if node.name in brought for c in node.writes]
    prompts, *others = (node for node in flow if node.name not in brought)
    return (replace(prompts, writes=(*prompts.writes, *columns)), *others)


def _judged(flow: tuple[FlowNode, ...], recipe: Recipe) -> tuple[FlowNode, ...]:
    """Where the actor is its own reference, that is its work."""
    if not recipe.own_reference:
        return flow
    return tuple(replace(node, role="actor") if node.name == "reference" else node for node in flow)


def flows_of(recipe: Recipe) -> tuple[tuple[FlowNode, ...], ...]:
    """The flow of the samples, and one for the table of each item of `losses`.

    Raises:
        UsageError: as `flow_of`.
    """
    from rlmq.common.algorithms import algorithm_of

    referee = Handing.of(recipe.stages.reference)
    return (
        flow_of(recipe),
        *(
            _judged(_loss_flow(table, own.algorithm.online, algorithm_of(own), referee), recipe)
            for table, own in recipe.tables.items()
        ),
    )


def _loss_flow(table: str, online: bool, algorithm: Algorithm, referee: Handing) -> tuple[FlowNode, ...]:
    needs, reference = algorithm.needs, algorithm.needs_reference
    if online:
        groups = algorithm.group_columns
        flow = recorded_flow(
            sample_flow((), actor_needs=needs, reference=reference, groups=groups, referee=referee)
        )
    else:
        flow = offline_flow(needs, reference=reference, referee=referee)
    return tuple(replace(node, tables=(table,)) for node in flow if node.name != "evaluation")


def sample_flow(
    reward_names: Sequence[str],
    *,
    cost: bool = False,
    actor_needs: Sequence[str] = ("reward",),
    reference: bool = False,
    critics: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    groups: Sequence[str] = (),
    generator: str = "rollout",
    learned: bool = False,
    rewarded: Sequence[str] = (),
    reward: Handing = Handing(),
    referee: Handing = Handing(),
) -> tuple[FlowNode, ...]:
    """The flow of reinforcement learning.

    Args:
        reward_names: columns `reward.NAME`.
        cost: whether some of them are costs, whose sum is the column `cost`.
        actor_needs: columns without which the algorithm cannot train on a row; none: there is no actor.
        reference: whether a reference policy scores the rows of `train`.
        critics: see `rlmq.common.critics.Heads`; none: there is no critic.
        groups: columns that are made of whole scored groups; none: no stage judges groups.
        generator: the role that generates.
        learned: whether the run trains a reward model.
        rewarded: columns that are rewards themselves.
        reward: how the reward workers are handed rows, in both tables.
        referee: how the reference workers are.
    """
    nodes = [
        FlowNode("prompts", "prompts", (), PROMPT_COLUMNS),
        FlowNode("rollout", generator, ("prompt_ids",), ROLLOUT_COLUMNS, scope="chunk"),
        *([FlowNode("reward_model", "reward_model", ("response_ids",), LEARNED_COLUMNS)] if learned else []),
        FlowNode(
            "reward",
            "reward",
            ("response_text", *rewarded),
            reward_columns(reward_names, cost=cost),
            handing=reward,
        ),
    ]
    if groups:
        made = (*group_columns(groups), *KEPT_COLUMNS)
        handing = replace(reward, min_batch=1, max_wait_s=None)
        nodes.append(FlowNode("groups", "reward", ("reward",), made, (TRAIN,), scope="group", handing=handing))
        actor_needs = (*actor_needs, "kept")
    if reference:
        nodes.append(_reference(referee))
    for name, columns in critics.items():
        if name in (node.name for node in nodes) or name in ("actor", "recorder", "evaluation"):
            raise UsageError("critics", got=f"the name {name!r}", expected="one that no other role has")
        nodes.append(FlowNode(name, name, ("response_ids",), critic_columns(columns, name), (TRAIN,)))
    if actor_needs:
        values = members(critics)
        needs = tuple(column for need in actor_needs for column in values.get(need, [need]))
        nodes.append(FlowNode("actor", "actor", needs, actor_columns(values), (TRAIN,), scope="batch"))
    return (
        *nodes,
        FlowNode("recorder", "recorder", (), tables=(TRAIN,), ended=True),
        FlowNode("evaluation", "recorder", ("reward",), tables=(EVAL,)),
    )


def offline_flow(
    actor_needs: Sequence[str], *, reference: bool = False, referee: Handing = Handing()
) -> tuple[FlowNode, ...]:
    """The flow of rows that have their responses already: nothing is generated or scored.

    The table `eval` stays empty.
    """
    return (
        FlowNode("prompts", "prompts", (), DATA_COLUMNS),
        *((_reference(referee),) if reference else ()),
        FlowNode("actor", "actor", tuple(actor_needs), actor_columns(), (TRAIN,), scope="batch"),
        FlowNode("recorder", "recorder", (), tables=(TRAIN,), ended=True),
        FlowNode("evaluation", "recorder", ("response_ids",), tables=(EVAL,)),
    )


def _reference(handing: Handing) -> FlowNode:
    return FlowNode("reference", "reference", ("response_ids",), REFERENCE_COLUMNS, (TRAIN,), handing=handing)


def sample_columns(flow: Sequence[FlowNode]) -> tuple[Column, ...]:
    """All columns of the sample tables, in the order in which a sample collects them."""
    return tuple(column for node in flow for column in node.writes)
