"""What actor and critic share: one rank of a mesh whose weights are a function of the batch log.

A step is a pure function of the weights before it and its batch-log entry: recovery loads the newest checkpoint and
redoes the entries after it. The payload of a step stays until every trainer of the run has a checkpoint of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from rlmq.buffer.batch_log import BatchEntry, LoggedLoss, Update
from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.buffer.store import ExperienceStore, RowRange
from rlmq.buffer.tables import TRAIN
from rlmq.common.algorithms import algorithm_of
from rlmq.common.algorithms.metric_sums import merge_sums, metric_means
from rlmq.common.critics import Heads, critic_heads, learners
from rlmq.common.determinism import require_same_environment
from rlmq.common.engines.fully_sharded import as_it_is
from rlmq.common.engines.micro_batches import build_micro_batch
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import MicroBatch, StepStats, TrainingEngine
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.flow import flow_table
from rlmq.common.layouts.layout import MeshShape
from rlmq.common.models import load_tokenizer, pad_id, resolve_model
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.worker import WorkerContext
from rlmq.common.worker_loop import raise_if_stopping
from rlmq.consumers.batch import Batch, batch_columns, dealt, read_batch
from rlmq.consumers.file_checkpoints import FileCheckpoints
from rlmq.consumers.logged_steps import LoggedSteps, tables_of
from rlmq.consumers.mesh import Mesh, meet
from rlmq.consumers.reward_figures import figure_columns
from rlmq.consumers.saved_steps import SavedSteps
from rlmq.consumers.spool import Spool

if TYPE_CHECKING:
    import torch

_NO_ENTRY = b"\xc0"  # nil in msgpack
_GIVE = b"give"  # no entry of the log: rank 0 saves
_NO_FIGURES = {"tokens", "rows"}

Engine = TypeVar("Engine", bound=TrainingEngine)
Found = tuple[BatchEntry, Batch]
Work = Callable[[], Mapping[str, float]]
"""Forward and backward of one micro-batch: its metric sums, those of another loss with `TABLE/` before them."""


class Trainer(Generic[Engine]):
    """All ranks run the same calls; rank 0 alone reads the log first, sends and saves.

    Args:
        model: what training begins with.
        checkpoints: folder of this trainer's own ones.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore, model: str, checkpoints: Path) -> None:
        require_same_environment(context)
        self._context = context
        self._store = store
        recipe = context.recipe
        self._recipe = recipe
        self._algorithm = algorithm_of(recipe, context.recipe_folder)
        others = {t: algorithm_of(own, context.recipe_folder) for t, own in recipe.tables.items()}
        self._algorithms = {TRAIN: self._algorithm} | others
        self._heads: Heads = critic_heads(recipe, self._algorithm.critics)
        self._checkpoints = FileCheckpoints(checkpoints)
        self._model_folder = resolve_model(model, context.recipe_folder)
        self._pad_id = pad_id(load_tokenizer(self._model_folder))
        self._mesh = meet(
            context.calls,
            role=context.role,
            rank=context.rank,
            size=context.world_size,
            incarnation=context.incarnation,
            timeout_s=recipe.deadlines.step_s,
            shape=self._shape(),
            named=self._strategy not in ("torch", "3d"),
        )
        self._log = LoggedSteps(
            store, FileBatchLog(context.run.batch_log), self._read, exact=recipe.deterministic, events=context.log
        )
        self._trained = 0
        self._whole = True  # false in the middle of a step that has several updates
        self._protect: frozenset[int] | None = None
        self._metrics: dict[str, Any] = {}
        self._config: Mapping[str, Any] = {}  # what a checkpoint's config.json says beside the first model's
        self._adapter: Mapping[str, Any] | None = None  # peft's configuration, where adapters are trained
        self._engine = self._restored()
        self._saved = SavedSteps(
            _Gathered(self._engine, self._mesh, checkpoints), self._trained, self._committed, context.log
        )

    def _shape(self) -> MeshShape | None:
        """How the model lies on the ranks; None: each has all of it."""
        return None

    @property
    def _exact_ahead(self) -> bool:
        """Whether rows of later steps are still generated, with the weights before this step's and no others."""
        return self._recipe.deterministic and self._recipe.schedule.staleness > 0

    @property
    def _strategy(self) -> str:
        """The training engine's name."""
        return getattr(self._recipe.place_of(self._context.role), "strategy", "torch")

    def _restored(self) -> Engine:
        """The engine at the newest checkpoint, or at the model that training begins with."""
        with self._checkpoints.reading_newest(self._newest()) as found:
            engine = self._build(None if found is None else found[0])
            if found is not None:
                path, manifest = found
                engine.load_state(self._checkpoints.optimizer_state(path))
                self._trained, self._metrics = manifest.step, manifest.figures
                self._context.log.info("restored", checkpoint=str(path), step=manifest.step)
        return engine

    def _newest(self) -> int | None:
        """The newest checkpoint that may be loaded; None: any."""
        return None

    def _build(self, checkpoint: Path | None) -> Engine:
        """An engine with the weights of a checkpoint, or those that training begins with."""
        raise NotImplementedError

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a call comes."""
        self._context.waits("a call")
        self._settle_saved()
        self._store.wait([], timeout_s=timeout_s, wake_fd=wake_fd)

    def _settle_saved(self) -> None:
        """Take up what was written beside other work, or tell that it still is."""
        self._saved.settle()
        if self._saved.writing:
            self._context.activity("checkpointing")

    def close(self) -> None:
        """Save what was trained since the last checkpoint.

        A sharded model is not: ranks that end may not wait for each other. Nor where rows may still be generated
        with the weights before. A redo of the log makes the same.
        """
        self._saved.settle(wait=True)
        if self._whole and self._context.rank == 0 and not self._engine.sharded and not self._exact_ahead:
            self._save()

    # -- steps ---------------------------------------------------------------------------------------------

    def _advance(self, step: int, *, redo: bool = False) -> bool:
        """Train a step; False when there is no batch to rely on."""
        raise NotImplementedError

    def _catch_up(self, step: int) -> None:
        """Redo logged steps up to `step`."""
        while self._trained < step:
            self._context.log.info("redo", step=self._trained + 1)
            self._advance(self._trained + 1, redo=True)

    def _on_every_rank(self, own: Found | None) -> Found | None:
        """What rank 0 found."""
        encoded = self._follow(_NO_ENTRY if own is None else msgspec.msgpack.encode(own[0]))
        if encoded == _NO_ENTRY:
            return None
        return own or self._with_rows(msgspec.msgpack.decode(encoded, type=BatchEntry))

    def _follow(self, word: bytes = _NO_ENTRY) -> bytes:
        """Rank 0's word, on every rank; until it comes, the others give their part of what rank 0 saves."""
        while (heard := self._mesh.broadcast(word)) == _GIVE and self._context.rank != 0:
            own = self._engine if isinstance(self._engine, TorchEngine) else None
            if own is not None:
                own.keep = _nothing_of
            for _ in self._engine.shards():
                pass
            self._engine.state()
            if own is not None:
                own.keep = as_it_is
        return heard

    def _for_this_mesh(self, updates: tuple[Update, ...], step: int) -> tuple[Update, ...]:
        """Updates as they are logged, or dealt round to another number of ranks than they were logged for."""
        replicas = self._mesh.shape.dp
        logged = len(updates[0].micro_batches) if updates else replicas
        if self._recipe.deterministic and logged != replicas:
            raise UsageError(
                f"placement.{self._context.role}.workers, step {step}",
                got=f"{replicas} replicas",
                expected=f"the {logged} that the batch log was written with, for the same bits",
            )
        return dealt(updates, replicas)

    def _with_rows(self, entry: BatchEntry) -> Found:
        return entry, self._read(entry)

    def _read(self, entry: BatchEntry) -> Batch:
        """The rows of a logged step; their payload is held until checkpoints cover them."""
        state = self._log.state_before(entry.step)
        logged = [entry.rows, *(loss.rows for loss in entry.losses)]
        found: dict[str, Batch] = {}
        for (table, ranges), ids in zip(tables_of(entry), logged, strict=True):
            name = flow_table(table)
            algorithm = self._algorithms[name]
            heads = self._heads if name == TRAIN else {}
            needed = batch_columns(algorithm, heads)
            rows = self._rows(table, ranges, ids, (*needed, *self._more(name)))
            whole = not any(rows.column(column).null_count for column in needed)
            batch = read_batch(rows, algorithm, state if name == TRAIN else {}, heads) if whole else None
            if batch is None or tuple(batch.ids) != ids:
                raise IntegrityError(
                    f"rows of step {entry.step} in table {table}",
                    got=f"{rows.num_rows} rows that are not those of the batch log",
                    expected=f"the {len(ids)} logged ones",
                    remedy="Restore the run's Redis data, or start anew with --fresh",
                )
            found[name] = batch
        own = found.pop(TRAIN)
        return replace(own, losses=found)

    def _rows(
        self, table: str, ranges: Sequence[RowRange], _ids: Sequence[str], columns: Sequence[str]
    ) -> pa.RecordBatch:
        """Columns of logged rows, from where they are held."""
        return self._store.read(table, ranges, columns)

    def _more(self, table: str) -> tuple[str, ...]:
        """Columns that are read beside those that every row has."""
        return figure_columns(self._recipe.reward_names) if table == TRAIN else ()

    def _micro_batches(
        self, batch: Batch, columns: Mapping[str, Sequence[Any]], updates: Sequence[Update]
    ) -> list[list[MicroBatch]]:
        """This rank's share of each update as rectangles, with these numbers per response token."""

        def rectangle(rows: Sequence[int]) -> MicroBatch:
            return build_micro_batch(
                [batch.prompts[i] for i in rows],
                [batch.responses[i] for i in rows],
                [batch.loss_masks[i] for i in rows],
                {name: [values[i] for i in rows] for name, values in columns.items()},
                pad_id=self._pad_id,
            )

        return [[rectangle(rows) for rows in update.micro_batches[self._mesh.replica]] for update in updates]

    def _update_all(
        self, updates: Sequence[Update], work: Sequence[Sequence[Work]], losses: Sequence[LoggedLoss] = ()
    ) -> dict[str, float]:
        """All optimizer steps of a step; figures are means over them, and over all ranks."""
        parts: list[dict[str, float]] = []
        stats: list[StepStats] = []
        for number, (update, share) in enumerate(zip(updates, work, strict=True)):
            sums = []
            for accumulate in share:
                raise_if_stopping(self._context)
                sums.append(accumulate())
                self._context.progress()
            for _ in range(self._lacking(len(share))):
                self._engine.idle(backward=True)
            self._saved.before_change()
            self._whole = False
            stats.append(self._engine.step(update.denominators))
            everyone = self._mesh.gather(msgspec.msgpack.encode(merge_sums(sums)))
            total = merge_sums(msgspec.msgpack.decode(part, type=dict[str, float]) for part in everyone)
            parts.append(_figures(total, update, {one.table: one.updates[number] for one in losses}))
        self._whole = True
        if not parts:
            return {}
        return {
            **{name: float(np.mean([part[name] for part in parts])) for name in parts[0]},
            # Engines are compared before the first update: after it, the policy is another one.
            **{name: value for name, value in parts[0].items() if name.startswith("logprob_mismatch")},
            "grad_norm": float(np.mean([one.grad_norm for one in stats])),
            "lr": stats[-1].lr,
        }

    def _lacking(self, passes: int) -> int:
        """How many passes fewer than another rank this one makes, where all must make as many."""
        if not self._engine.even_passes:
            return 0
        return max(int(number) for number in self._mesh.gather(str(passes).encode())) - passes

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _checkpoint(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to write a checkpoint. Replicas are equal: rank 0 writes.

        One that fails is told by the next call, and made up for by the next checkpoint.
        """
        self._catch_up(int(args["step"]))
        if self._context.rank != 0:
            self._finish_giving()
            return {}
        self._context.activity("checkpointing")
        self._protect = frozenset(args["protect"])
        with self._saved.waiting():
            self._saved.begin(self._trained, self._saving())
        self._finish_giving()
        return {"step": self._trained}

    def _finish_giving(self) -> None:
        """Ranks of a sharded model take part in what rank 0 saves up to here."""
        if self._engine.sharded:
            self._follow()

    def _settle(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The run's last step has a checkpoint when this returns.

        Raises:
            DependencyError: it cannot be written.
        """
        self._catch_up(int(args["step"]))
        if self._context.rank == 0:
            with self._saved.waiting():
                self._save()
        self._finish_giving()
        return {"step": self._trained, **self._saved.take_figures()}

    def _save(self) -> None:
        self._context.activity("checkpointing")
        self._saved.save(self._trained, self._saving())

    def _saving(self) -> partial[Path]:
        """What writes the checkpoint of the step that is trained now."""
        return partial(
            self._checkpoints.save,
            model_folder=self._model_folder,
            rows=self._log.rows(self._saved.durable, self._trained),
            world_size=self._mesh.size,
            recipe_hash=recipe_hash(self._recipe),
            figures=self._metrics,
            config=self._config,
            adapter=self._adapter,
        )

    def _committed(self, _step: int) -> None:
        self._let_go()
        if self._protect is not None:
            self._checkpoints.prune(self._recipe.checkpoint.keep, self._protect)

    def _let_go(self) -> None:
        """Payload that no trainer's redo would read may go."""
        run = self._context.run
        folders = [run.checkpoints, *(run.checkpoints_of(role) for role in learners(self._recipe))]
        newest = [max(FileCheckpoints(folder).steps(), default=0) for folder in folders]
        self._store.advance(min(self._saved.durable, *newest))


def _nothing_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a rank keeps of whole tensors that rank 0 saves."""
    return tensor.new_empty(0)


class _Gathered:
    """The engine as rank 0 saves it: of a sharded one, every rank gives its part (see `Trainer._follow`).

    What rlmq's own engines gather is put aside tensor by tensor: rank 0 has memory for one of them.
    """

    def __init__(self, engine: TrainingEngine, mesh: Mesh, folder: Path) -> None:
        self._engine = engine
        self._mesh = mesh
        self._folder = folder
        self.aside = engine.sharded and isinstance(engine, TorchEngine)

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.shards`; `state` is asked for next."""
        if self.aside and isinstance(self._engine, TorchEngine):
            self._engine.keep = Spool(self._folder).keep
        if self._engine.sharded:
            self._mesh.broadcast(_GIVE)
        return self._engine.shards()

    def state(self) -> dict[str, torch.Tensor]:
        """See `TrainingEngine.state`."""
        try:
            return self._engine.state()
        finally:
            if isinstance(self._engine, TorchEngine):
                self._engine.keep = as_it_is


def _figures(total: Mapping[str, float], update: Update, losses: Mapping[str, Update]) -> dict[str, float]:
    """Means of one update's sums; those of another loss are called `TABLE_NAME`."""
    own = metric_means({name: value for name, value in total.items() if "/" not in name}, update.denominators)
    found = {name: value for name, value in own.items() if name not in _NO_FIGURES}
    for table, other in losses.items():
        sums = {name.removeprefix(f"{table}/"): v for name, v in total.items() if name.startswith(f"{table}/")}
        means = metric_means(sums, other.denominators)
        found |= {f"{table}_{name}": value for name, value in means.items() if name not in _NO_FIGURES}
    return found
