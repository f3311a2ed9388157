"""The prompts role: admits each step's prompts into the experience buffer.

consumes: nothing; calls `admit(step)` and `admit_eval(step)` from the controller
produces: chunks of whole groups in the tables `train` and `eval`
waits for: room in the table (its put names the stage that must drain)
"""

from __future__ import annotations

import select
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.buffer.store import ExperienceStore, Facts
from rlmq.common.algorithms import algorithm_of
from rlmq.common.columns import DATA_COLUMNS, GREEDY, PROMPT_COLUMNS, arrow_schema
from rlmq.common.flow import TRAIN, flow_of
from rlmq.common.models import eos_ids, folder_context_length, load_tokenizer, resolve_model
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.recipe.schema import Recipe
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.producers.data import Row, load_rows
from rlmq.producers.measured_order import MeasuredOrder
from rlmq.producers.prompt_order import MixedOrder, PromptOrder
from rlmq.producers.prompt_tokens import (
    LengthPolicy,
    PreparedPrompt,
    PreparedPrompts,
    PreparedResponse,
    prepare_prompts,
)
from rlmq.producers.recorded_groups import RecordedGroups
from rlmq.producers.recorded_rows import load_answered_rows
from rlmq.producers.response_tokens import ONE, PAIR, responses_of

_CHUNKS_PER_STEP = 1_000_000  # sequence numbers of one producer grow with (step, chunk)


@dataclass(frozen=True, slots=True)
class PromptSets:
    """The training prompts and the evaluation sets by name."""

    train: PreparedPrompts
    evaluation: Mapping[str, PreparedPrompts]


@dataclass(frozen=True, slots=True)
class LossRows:
    """The rows of another loss: where they come from, which of them a step gets."""

    recipe: Recipe
    rows: PreparedPrompts
    order: PromptOrder
    recorded: RecordedGroups | None


class PromptsRole:
    """Tokenises the data once, then puts the rows of a step whenever it is called.

    Which prompts a step gets depends on the data, the recipe and the step alone, so a repeated call puts
    the same chunks again, which is a no-op.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        recipe = context.recipe
        self._recipe = recipe
        self._store = store
        self._progress, self._call = context.progress, context.call
        self._tag = f"config {recipe_hash(recipe)} seed {recipe.run.seed}"
        self._waits = context.waits
        self._recorded = (
            recorded_groups(recipe, context.recipe_folder) if recipe.data.recorded is not None else None
        )
        recorded = self._recorded
        self._prompts = load_prompts(recipe, context) if recorded is None else PromptSets(recorded.prompts, {})
        self._order = self._make_order()
        self._log = FileBatchLog(context.run.batch_log)
        self._measured: MeasuredOrder | None = None
        self._server = ""
        self._losses = {table: self._loss_rows(own, context) for table, own in recipe.tables.items()}

    @staticmethod
    def _loss_rows(recipe: Recipe, context: WorkerContext) -> LossRows:
        recorded = recorded_groups(recipe, context.recipe_folder) if recipe.data.recorded is not None else None
        rows = load_prompts(recipe, context).train if recorded is None else recorded.prompts
        per_step, shuffle = recipe.data.prompts_per_step, recipe.data.shuffle
        order = PromptOrder(len(rows.prompts), per_step, recipe.run.seed, shuffle=shuffle)
        return LossRows(recipe, rows, order, recorded)

    def _make_order(self) -> PromptOrder | MixedOrder:
        recipe, data = self._recipe, self._recipe.data

        def order(count: int) -> PromptOrder:
            return PromptOrder(
                count, data.prompts_per_step, recipe.run.seed, shuffle=data.shuffle, passes=data.passes
            )

        prompts = self._prompts.train.prompts
        if not data.mixture:
            return order(len(prompts))
        sizes = Counter(prompt.source for prompt in prompts)
        mixture = [((one.from_step - 1) * data.prompts_per_step, one.weights) for one in data.mixture]
        return MixedOrder({name: order(sizes[name]) for name in recipe.training_sets}, mixture)

    def handlers(self) -> Mapping[str, CallHandler]:
        """`describe`, `admit`, `missing` and `admit_eval`."""
        return {
            "describe": self.describe,
            "admit": self.admit,
            "missing": self.missing,
            "admit_eval": self.admit_eval,
        }

    def describe(self, _args: Mapping[str, Any]) -> dict[str, Any]:
        """How many prompts there are, what the length policy did, and after how many steps they end."""
        train = self._prompts.train
        return {
            "train_prompts": len(train.prompts),
            "steps": (self._recorded and self._recorded.steps) or self._order.total_steps(),
            "prompts": self._order.total_prompts(),
            "skipped": train.skipped,
            "cut": train.cut,
            "eval": {name: len(prepared.prompts) for name, prepared in self._prompts.evaluation.items()},
        }

    def admit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Put rows of a step: each prompt `group_size` times, and once greedily where the algorithm asks for it.

        The prompts are the step's, or `count` from place `first` of the order on, after `after` others of the step.
        With the step's first ones come the rows of the other losses.
        """
        step, per_step = int(args["step"]), self._recipe.data.prompts_per_step
        first, count = int(args.get("first", (step - 1) * per_step)), int(args.get("count", per_step))
        if self._recorded is not None:
            return self._admit_recorded(self._recorded, step, first, count, int(args.get("after", 0)))
        prompts = [self._prompts.train.prompts[i] for i in self._places(step, first, count)]
        greedy, after = algorithm_of(self._recipe).greedy_baseline, int(args.get("after", 0))
        self._admit_losses(step, after)
        size = self._recipe.algorithm.group_size
        samples = self._put(TRAIN, step, prompts, size, greedy=greedy, after=after)
        return {"samples": samples, "prompts": len(prompts), "greedy": len(prompts) * greedy}

    def _admit_losses(self, step: int, after: int) -> None:
        for table, loss in self._losses.items() if after == 0 else ():
            places = loss.order.step_prompts(step)
            if loss.recorded is not None:
                self._put_recorded(loss.recorded, table, step, places)
                continue
            of_data = [loss.rows.prompts[i] for i in places]
            self._put(table, step, of_data, loss.recipe.algorithm.group_size)

    def _admit_recorded(
        self, recorded: RecordedGroups, step: int, first: int, count: int, after: int
    ) -> dict[str, Any]:
        """Put recorded rows. In the steps that they had there is nothing to add to a step later."""
        self._admit_losses(step, after)
        if recorded.steps is None:
            groups = self._order.prompts_at(first, count)
        else:
            groups = recorded.of_step(step) if after == 0 else []
        samples = self._put_recorded(recorded, "train", step, groups, after)
        return {"samples": samples, "prompts": len(groups), "greedy": 0}

    def _put_recorded(
        self, recorded: RecordedGroups, table: str, step: int, groups: Sequence[int], after: int = 0
    ) -> int:
        most_rows = self._recipe.rollout.claimed
        chunks = recorded.chunks(step, groups, most_rows, after=after, table=table)
        sizes = [len(rows) // max(1, len(set(rows["group_id"].to_pylist()))) for rows in chunks]
        self._put_chunks(table, step, chunks, sizes, after)
        return sum(rows.num_rows for rows in chunks)

    def _places(self, step: int, first: int, count: int) -> list[int]:
        data = self._recipe.data
        if data.difficulty.window is None:
            return self._order.prompts_at(first, count)
        server = self._store.server_id()
        if self._measured is None or server != self._server:  # one that came back older may cost logged steps
            order = PromptOrder(
                len(self._prompts.train.prompts), count, self._recipe.run.seed, shuffle=data.shuffle
            )
            self._measured, self._server = MeasuredOrder(order, data.difficulty, self._log.entries), server
        return self._measured.of_step(step)

    def missing(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """How many more groups would make the step's rows as many as it should have."""
        members = self._recipe.algorithm.group_size
        live = self._store.counts(self._recipe.table_of(int(args["step"]))).live
        lacking = self._recipe.data.prompts_per_step * members - live
        return {"groups": max(0, lacking // members)}

    def admit_eval(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Put every evaluation prompt `evaluate.samples` times."""
        step = int(args["step"])
        prompts = [prompt for prepared in self._prompts.evaluation.values() for prompt in prepared.prompts]
        return {"samples": self._put("eval", step, prompts, self._recipe.evaluate.samples)}

    def work(self) -> bool:
        """There is no row work: rows are admitted by calls."""
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until the next call."""
        self._waits("a call")
        select.select([wake_fd], [], [], timeout_s)

    def close(self) -> None:
        """Nothing is held; the process closes the store."""

    def _put(
        self,
        table: str,
        step: int,
        prompts: Sequence[PreparedPrompt],
        group_size: int,
        *,
        greedy: bool = False,
        after: int = 0,
    ) -> int:
        most_rows = self._recipe.rollout.claimed
        chunks = chunk_rows(table, step, prompts, group_size, most_rows, greedy=greedy, after=after)
        group_size += greedy
        self._put_chunks(table, step, chunks, [group_size] * len(chunks), after)
        return len(prompts) * group_size

    def _put_chunks(
        self, table: str, step: int, chunks: Sequence[pa.RecordBatch], sizes: Sequence[int], after: int
    ) -> None:
        last = len(chunks) - 1
        table = self._recipe.table_of(step) if table == TRAIN else table
        for number, (rows, size) in enumerate(zip(chunks, sizes, strict=True)):
            self._store.put(
                table,
                rows,
                producer=f"prompts-{table}",
                sequence=step * _CHUNKS_PER_STEP + after + number,  # no more chunks than prompts
                group_size=size,
                facts=Facts(tag=f"{self._tag} call {self._call()}"),
                closes=number == last,
            )
            self._progress()


def load_prompts(recipe: Recipe, context: WorkerContext) -> PromptSets:
    """Read and tokenise all data sets of the recipe, which is the worker's or one of its losses'.

    Raises:
        UsageError: model, data or a prompt is not as it should be.
    """
    folder = context.recipe_folder
    model = resolve_model(recipe.model, folder)
    tokenizer = load_tokenizer(model)
    policy = LengthPolicy(
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        max_response_tokens=recipe.rollout.max_response_tokens,
        long_prompts=recipe.data.long_prompts,
        context_tokens=folder_context_length(model),
    )

    def prepare(key: str, source: str, name: str, **how: Any) -> PreparedPrompts:
        rows = read_rows(recipe, source, folder, subject=key)
        subject, progress = f"{key} ({source})", context.progress
        return prepare_prompts(rows, tokenizer, policy, source=name, subject=subject, progress=progress, **how)

    def train(**how: Any) -> PreparedPrompts:
        several = isinstance(recipe.data.train, dict)
        found = [
            prepare(f"data.train.{name}" if several else "data.train", source, name, **how)
            for name, source in recipe.training_sets.items()
        ]
        prompts = tuple(prompt for one in found for prompt in one.prompts)
        return PreparedPrompts(prompts, sum(one.skipped for one in found), sum(one.cut for one in found))

    if names := answers(recipe):
        made = responses_of(tokenizer, policy, names, eos_ids(model, tokenizer))
        return PromptSets(train(responses=made), {})
    several = isinstance(recipe.data.eval, dict)
    evaluation = {
        name: prepare(f"data.eval.{name}" if several else "data.eval", source, name)
        for name, source in recipe.evaluation_sets.items()
    }
    return PromptSets(train(), evaluation)


def recorded_groups(recipe: Recipe, folder: Path) -> RecordedGroups:
    """The recordings of `data.train`, in the columns that the run's rows come with.

    Raises:
        UsageError: as `RecordedGroups`.
    """
    return RecordedGroups(recipe, folder, flow_of(recipe)[0].writes)


def answers(recipe: Recipe) -> tuple[str, ...]:
    """Names of the responses that each row of the data brings; () where the policy generates them."""
    if recipe.algorithm.online:
        return ()
    return PAIR if algorithm_of(recipe).whole_groups else ONE


def read_rows(recipe: Recipe, source: str, folder: Path, *, subject: str) -> list[Row]:
    """The rows of a data source of the recipe, as its algorithm needs them; see `load_rows`."""
    if recipe.data.recorded is not None and recipe.algorithm.online:
        recorded_groups(recipe, folder)
        return []
    if names := answers(recipe):
        data = recipe.data
        least, best = data.min_reward, data.best_of_group
        return load_answered_rows(source, folder, names, min_reward=least, best_of_group=best, subject=subject)
    return load_rows(source, folder, subject=subject)


def chunk_rows(
    table: str,
    step: int,
    prompts: Sequence[PreparedPrompt],
    group_size: int,
    most_rows: int,
    *,
    greedy: bool = False,
    after: int = 0,
) -> list[pa.RecordBatch]:
    """The step's rows in chunks of whole groups: PROMPT_COLUMNS, or DATA_COLUMNS where the data bring responses.

    A chunk has at most `most_rows` rows, the unit of generation; a greater group is a chunk of its own.
    `greedy`: each group has one more row. `after`: so many groups of the step came before.
    """
    per_chunk = max(1, most_rows // (group_size + greedy))
    names = [*(f"{member:02d}" for member in range(group_size)), *([GREEDY] if greedy else [])]
    chunks = []
    for first in range(0, len(prompts), per_chunk):
        rows = []
        for group, prompt in enumerate(prompts[first : first + per_chunk], first + after):
            group_id = f"{table}-{step:06d}-{group:04d}"
            row = {
                "group_id": group_id,
                "step": step,
                "source": prompt.source,
                "prompt_ids": prompt.ids,
                "prompt_text": prompt.text,
                "record": prompt.record,
            }
            rows += _members(row, prompt.responses, names)
        columns = DATA_COLUMNS if prompts[0].responses else PROMPT_COLUMNS
        chunks.append(pa.RecordBatch.from_pylist(rows, schema=arrow_schema(columns)))
    return chunks


def _members(row: Row, responses: Sequence[PreparedResponse], names: Sequence[str]) -> list[Row]:
    """The rows of a group: they differ in their names alone, or there is one for each response."""
    if not responses:
        return [{**row, "sample_id": f"{row['group_id']}-{name}"} for name in names]
    return [
        {
            **row,
            "sample_id": f"{row['group_id']}-{response.name or '00'}",
            "response_ids": response.ids,
            "response_text": response.text,
            "loss_mask": response.mask,
            "truncated": response.cut,
        }
        for response in responses
    ]
