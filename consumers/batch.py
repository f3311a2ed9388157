"""Forming a batch: rows from the store become sequences, advantages, and the plan of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlmq.buffer.batch_log import BatchEntry, LoggedRange, Update
from rlmq.buffer.store import RowRange
from rlmq.common.algorithms.algorithm import Algorithm, Floats, RewardedBatch
from rlmq.common.columns import ACTOR_COLUMNS, arrow_schema
from rlmq.common.engines.micro_batches import plan_micro_batches
from rlmq.common.recipe.schema import Recipe

COLUMNS = (
    "sample_id",
    "group_id",
    "prompt_ids",
    "response_ids",
    "loss_mask",
    "rollout_logprobs",
    "policy_versions",
    "truncated",
    "reward",
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in training order (by sample id), whatever order they were claimed in.

    `order[i]` is the claimed index of row i. Ragged lists have one entry per response token.
    """

    order: NDArray[np.int64]
    ids: list[str]
    groups: list[str]
    prompts: list[list[int]]
    responses: list[list[int]]
    loss_masks: list[list[bool]]
    rollout_logprobs: list[list[float]]
    ref_logprobs: list[list[float]] | None
    versions: list[list[int]]
    truncated: NDArray[np.bool_]
    rewards: Floats
    advantages: Floats

    @property
    def counted(self) -> NDArray[np.int64]:
        """Response tokens that count in the loss [rows]."""
        return np.array([sum(mask) for mask in self.loss_masks], dtype=np.int64)

    def advantage_column(self) -> pa.RecordBatch:
        """The actor's columns in claimed order: the row's advantage at each of its tokens."""
        by_claim: list[list[float]] = [[] for _ in self.ids]
        for row, claimed in enumerate(self.order):
            by_claim[claimed] = [float(self.advantages[row])] * len(self.responses[row])
        return pa.RecordBatch.from_pydict({"advantages": by_claim}, schema=arrow_schema(ACTOR_COLUMNS))


def batch_columns(*, reference: bool) -> tuple[str, ...]:
    """Columns that the actor reads."""
    return (*COLUMNS, "ref_logprobs") if reference else COLUMNS


def read_batch(rows: pa.RecordBatch, algorithm: Algorithm) -> Batch:
    """Sort the claimed rows by sample id and compute their advantages."""
    data: dict[str, list[Any]] = rows.to_pydict()
    order = np.argsort(np.array(data["sample_id"]), kind="stable")
    sorted_data = {name: [values[i] for i in order] for name, values in data.items()}
    rewards = np.array(sorted_data["reward"], dtype=np.float64)
    lengths = np.array([sum(mask) for mask in sorted_data["loss_mask"]], dtype=np.int64)
    advantages = algorithm.advantages(RewardedBatch(rewards, sorted_data["group_id"], lengths))
    return Batch(
        order=order,
        ids=sorted_data["sample_id"],
        groups=sorted_data["group_id"],
        prompts=sorted_data["prompt_ids"],
        responses=sorted_data["response_ids"],
        loss_masks=sorted_data["loss_mask"],
        rollout_logprobs=sorted_data["rollout_logprobs"],
        ref_logprobs=sorted_data.get("ref_logprobs"),
        versions=sorted_data["policy_versions"],
        truncated=np.array(sorted_data["truncated"], dtype=bool),
        rewards=rewards,
        advantages=advantages,
    )


def plan_step(
    batch: Batch,
    ranges: Sequence[RowRange],
    *,
    step: int,
    recipe: Recipe,
    algorithm: Algorithm,
    world_size: int,
) -> BatchEntry:
    """The step's batch-log entry: a pure function of the rows, the recipe and the world size."""
    flat_versions = [v for versions in batch.versions for v in versions] or [step - 1]
    return BatchEntry(
        step=step,
        policy_version=step,
        rows=tuple(batch.ids),
        ranges=tuple(LoggedRange(r.chunk, r.first, r.count, r.use) for r in ranges),
        updates=tuple(_updates(batch, step, recipe, algorithm, world_size)),
        behaviour_versions=(min(flat_versions), max(flat_versions)),
        seed=recipe.run.seed,
    )


def dealt(entry: BatchEntry, world_size: int) -> BatchEntry:
    """The entry for another number of ranks: its micro-batches dealt round. Sums differ in their last bits."""
    if len(entry.updates[0].micro_batches) == world_size:
        return entry
    updates = []
    for update in entry.updates:
        micro_batches = [micro for share in update.micro_batches for micro in share]
        shares = tuple(tuple(micro_batches[rank::world_size]) for rank in range(world_size))
        updates.append(Update(shares, update.denominators))
    return msgspec.structs.replace(entry, updates=tuple(updates))


def _updates(batch: Batch, step: int, recipe: Recipe, algorithm: Algorithm, world_size: int) -> list[Update]:
    lengths = [(len(p), len(r)) for p, r in zip(batch.prompts, batch.responses, strict=True)]
    counted = batch.counted
    found = []
    for epoch in range(recipe.train.epochs):
        for rows in _mini_batches(len(batch.ids), recipe, seed=(recipe.run.seed, step, epoch)):
            local = plan_micro_batches([lengths[i] for i in rows], recipe.train.micro_batch_tokens, world_size)
            plan = tuple(tuple(tuple(rows[i] for i in micro) for micro in share) for share in local)
            denominators = algorithm.denominators([int(counted[i]) for i in rows])
            found.append(Update(micro_batches=plan, denominators=denominators))
    return found


def _mini_batches(rows: int, recipe: Recipe, *, seed: tuple[int, int, int]) -> list[list[int]]:
    """Cut a pass into mini-batches of nearly equal size, in a seeded order when there are several."""
    count = min(recipe.train.mini_batches, rows)
    order = np.arange(rows)
    if count > 1:
        order = np.random.default_rng(seed).permutation(rows)
    return [sorted(int(i) for i in part) for part in np.array_split(order, max(1, count)) if len(part)]
