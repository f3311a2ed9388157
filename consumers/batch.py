"""Forming a batch: rows from the store become sequences, advantages, and the plan of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlmq.buffer.batch_log import BatchEntry, LoggedLoss, LoggedRange, Update
from rlmq.buffer.store import RowRange
from rlmq.common.algorithms.algorithm import Algorithm, Estimates, Floats, ScoredBatch
from rlmq.common.columns import actor_columns, arrow_schema, returns_column
from rlmq.common.critics import Heads, critic_heads, mean_values, members
from rlmq.common.engines.micro_batches import plan_micro_batches
from rlmq.common.recipe.critic_block import CriticBlock
from rlmq.common.recipe.loss_block import LossBlock
from rlmq.common.recipe.schema import Recipe, TrainBlock
from rlmq.consumers.labels import learned_units

_OF_EVERY_ROW = ("sample_id", "group_id", "prompt_ids", "response_ids", "loss_mask", "truncated")
_OF_GENERATED_ROWS = ("rollout_logprobs", "policy_versions", "reward")
COLUMNS = (*_OF_EVERY_ROW, *_OF_GENERATED_ROWS)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in training order (by sample id), whatever order they were claimed in.

    `order[i]` is the claimed index of row i. Ragged lists have one entry per response token; `columns` are those
    that the algorithm needs beside the others. Rows whose responses the data brought have neither
    `rollout_logprobs` nor versions, and no reward (NaN). `losses`: the rows of the other losses, by table.
    """

    order: NDArray[np.int64]
    ids: list[str]
    groups: list[str]
    prompts: list[list[int]]
    responses: list[list[int]]
    loss_masks: list[list[bool]]
    rollout_logprobs: list[list[float]]
    columns: Mapping[str, list[Any]]
    versions: list[list[int]]
    truncated: NDArray[np.bool_]
    rewards: Floats
    estimates: Estimates
    losses: Mapping[str, Batch] = field(default_factory=dict)

    @property
    def counted(self) -> NDArray[np.int64]:
        """Response tokens that count in the loss [rows]."""
        return np.array([sum(mask) for mask in self.loss_masks], dtype=np.int64)

    def ragged(self) -> dict[str, Sequence[Any]]:
        """Numbers per response token, by column: what a loss may read."""
        extra = {name: values for name, values in self.columns.items() if isinstance(values[0], list)}
        generated = {"rollout_logprobs": self.rollout_logprobs} if self.rollout_logprobs else {}
        return {**generated, "advantages": self.estimates.advantages, **extra}

    def actor_columns(self) -> pa.RecordBatch:
        """The actor's columns in claimed order: advantages, and what the critic shall learn."""
        made = {"advantages": self.estimates.advantages}
        made |= {returns_column(name): values for name, values in self.estimates.returns.items()}
        by_claim = np.argsort(self.order)
        schema = arrow_schema(actor_columns(self.estimates.returns))
        found = {name: [values[row].tolist() for row in by_claim] for name, values in made.items()}
        return pa.RecordBatch.from_pydict(found, schema=schema)


def batch_columns(algorithm: Algorithm, heads: Heads = MappingProxyType({})) -> tuple[str, ...]:
    """Columns that a trainer reads; `heads` are those of the run's critics."""
    own = COLUMNS if "reward" in algorithm.needs else _OF_EVERY_ROW
    values = members(heads)
    needs = (column for name in algorithm.needs for column in values.get(name, [name]))
    return (*own, *(name for name in needs if name not in own))


def read_batch(
    rows: pa.RecordBatch,
    algorithm: Algorithm,
    state: Mapping[str, float],
    heads: Heads = MappingProxyType({}),
) -> Batch:
    """Sort rows by sample id and compute their advantages; `state` is the algorithm's after the step before."""
    data: dict[str, list[Any]] = rows.to_pydict()
    order = np.argsort(np.array(data["sample_id"]), kind="stable")
    found = {name: [values[i] for i in order] for name, values in data.items()}
    rewards = np.array(found.get("reward", [None] * len(order)), dtype=np.float64)
    masks = [np.array(mask, dtype=np.bool_) for mask in found["loss_mask"]]
    extra = {name: values for name, values in found.items() if name not in COLUMNS}
    scored = {name: _arrays(extra.get(name, found.get(name, []))) for name in (*extra, "rollout_logprobs")}
    means = {head: mean_values([scored[name] for name in names]) for head, names in members(heads).items()}
    scored |= means if order.size else {}
    estimates = algorithm.estimate(ScoredBatch(rewards, found["group_id"], masks, scored, state))
    return Batch(
        order=order,
        ids=found["sample_id"],
        groups=found["group_id"],
        prompts=found["prompt_ids"],
        responses=found["response_ids"],
        loss_masks=found["loss_mask"],
        rollout_logprobs=found.get("rollout_logprobs", []),
        columns=extra,
        versions=found.get("policy_versions", []),
        truncated=np.array(found["truncated"], dtype=bool),
        rewards=rewards,
        estimates=estimates,
    )


def _arrays(values: list[Any]) -> Sequence[Any]:
    """Numbers per token as float64 arrays; one value a row stays as it is."""
    return [np.array(one, dtype=np.float64) if isinstance(one, list) else one for one in values]


def plan_step(
    batch: Batch,
    ranges: Sequence[RowRange],
    *,
    step: int,
    recipe: Recipe,
    algorithm: Algorithm,
    world_size: int,
    update: bool = True,
) -> BatchEntry:
    """The step's batch-log entry: a pure function of the rows, the recipe and the world size.

    Without `update` the policy stays as it is.
    """
    flat_versions = [v for versions in batch.versions for v in versions] or [step - 1]
    return BatchEntry(
        step=step,
        policy_version=step,
        rows=tuple(batch.ids),
        ranges=_logged(ranges),
        updates=tuple(_updates(batch, step, recipe, algorithm, world_size)) if update else (),
        behaviour_versions=(min(flat_versions), max(flat_versions)),
        seed=recipe.run.seed,
        state=dict(batch.estimates.state),
        figures=dict(batch.estimates.metrics),
        beside=dict(_beside(batch, step, recipe, algorithm)),
        rewards=tuple(batch.rewards.tolist()) if recipe.data.difficulty.window is not None else (),
    )


def plan_loss(
    block: LossBlock, own: Recipe, algorithm: Algorithm, batch: Batch, ranges: Sequence[RowRange], entry: BatchEntry
) -> LoggedLoss:
    """What another loss adds to each update of the entry: its rows are cut into as many parts.

    `own` is the recipe that would train on its table alone.
    """
    world_size = len(entry.updates[0].micro_batches) if entry.updates else 0
    parts = len(entry.updates) // own.train.epochs
    updates = _updates(batch, entry.step, own, algorithm, world_size, parts=parts) if parts else []
    return LoggedLoss(block.name, block.weight, tuple(batch.ids), _logged(ranges), tuple(updates))


def _logged(ranges: Sequence[RowRange]) -> tuple[LoggedRange, ...]:
    return tuple(LoggedRange(r.chunk, r.first, r.count, r.use) for r in ranges)


def dealt(updates: tuple[Update, ...], world_size: int) -> tuple[Update, ...]:
    """The updates for another number of ranks: micro-batches dealt round. Sums differ in their last bits."""
    if not updates or len(updates[0].micro_batches) == world_size:
        return updates
    found = []
    for update in updates:
        micro_batches = [micro for share in update.micro_batches for micro in share]
        shares = tuple(tuple(micro_batches[rank::world_size]) for rank in range(world_size))
        found.append(Update(shares, update.denominators))
    return tuple(found)


def _updates(
    batch: Batch, step: int, recipe: Recipe, algorithm: Algorithm, world_size: int, *, parts: int | None = None
) -> list[Update]:
    units = _units(batch, recipe.algorithm.group_size if algorithm.whole_groups else 1)
    counted = batch.counted

    def denominators(rows: Sequence[int]) -> tuple[float, ...]:
        return algorithm.denominators([int(counted[i]) for i in rows])

    return _planned(batch, step, recipe, recipe.train, units, denominators, world_size, parts=parts)


def _beside(
    batch: Batch, step: int, recipe: Recipe, algorithm: Algorithm
) -> Iterator[tuple[str, tuple[Update, ...]]]:
    """The optimizer steps of those who learn beside the actor."""
    for role in critic_heads(recipe, algorithm.critics):
        block = recipe.own_critic(role)
        placed = block or recipe.placement.critic
        yield role, tuple(_critic_updates(batch, step, recipe, block or recipe.critic, placed.workers))
    if recipe.reward_model.learns is not None:
        yield "reward_model", tuple(_reward_model_updates(batch, step, recipe))


def _critic_updates(batch: Batch, step: int, recipe: Recipe, block: CriticBlock, workers: int) -> list[Update]:
    """A critic's loss is a mean over all counted tokens."""
    counted = batch.counted

    def denominators(rows: Sequence[int]) -> tuple[float, ...]:
        return (float(max(1, sum(int(counted[i]) for i in rows))),)

    train = block.training(recipe.train)
    return _planned(batch, step, recipe, train, _units(batch, 1), denominators, workers)


def _reward_model_updates(batch: Batch, step: int, recipe: Recipe) -> list[Update]:
    """Those of the run's reward model; none where it has nothing to learn of this step."""
    found = learned_units(batch.groups, batch.responses, batch.columns, recipe)
    block, size = recipe.reward_model, len(found[0]) if found else 0

    def denominators(rows: Sequence[int]) -> tuple[float, ...]:
        return (float(max(1, len(rows) // size)),)

    train, workers = block.training(recipe.train), recipe.placement.reward_model.workers
    return _planned(batch, step, recipe, train, found, denominators, workers) if found else []


def _planned(
    batch: Batch,
    step: int,
    recipe: Recipe,
    train: TrainBlock,
    units: Sequence[tuple[int, ...]],
    denominators: Callable[[Sequence[int]], tuple[float, ...]],
    world_size: int,
    *,
    parts: int | None = None,
) -> list[Update]:
    """Passes times mini-batches of units of rows; `parts`: just so many mini-batches, even if some have no row."""
    lengths = [(len(p), len(r)) for p, r in zip(batch.prompts, batch.responses, strict=True)]
    found = []
    for epoch in range(train.epochs):
        count = parts or max(1, min(train.mini_batches, len(units)))
        for chosen in _mini_batches(len(units), count, seed=(recipe.run.seed, step, epoch)):
            together = [units[i] for i in chosen]
            plan = plan_micro_batches(lengths, train.micro_batch_tokens, world_size, together)
            found.append(Update(plan, denominators([row for unit in together for row in unit])))
    return found


def _units(batch: Batch, group_size: int) -> list[tuple[int, ...]]:
    """Rows that must be in one micro-batch: whole groups, or each row. Groups that lack rows are none."""
    if group_size == 1:
        return [(row,) for row in range(len(batch.ids))]
    members: dict[str, list[int]] = {}
    for row, group in enumerate(batch.groups):
        members.setdefault(group, []).append(row)
    return [tuple(rows) for rows in members.values() if len(rows) == group_size]


def _mini_batches(units: int, count: int, *, seed: tuple[int, int, int]) -> list[list[int]]:
    """Cut a pass into mini-batches of nearly equal size, in a seeded order when there are several."""
    order = np.arange(units)
    if count > 1:
        order = np.random.default_rng(seed).permutation(units)
    return [sorted(int(i) for i in part) for part in np.array_split(order, count)]
