"""A trainer beside the actor: it learns from the steps that the actor logs, and scores rows with that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rlmq.buffer.batch_log import BatchEntry, Update
from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.buffer.response_scoring import ResponseScoring
from rlmq.buffer.store import ExperienceStore, Facts
from rlmq.buffer.tables import EVAL
from rlmq.common.columns import Column
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import MicroBatch
from rlmq.common.errors import IntegrityError, RestartRequired
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.consumers.batch import Batch
from rlmq.consumers.file_checkpoints import FileCheckpoints
from rlmq.consumers.trainer import Found, Trainer, Work

Engine = TypeVar("Engine", bound=TorchEngine)


class LoggedTrainer(Trainer[Engine]):
    """One trainer rank; each claims rows, and all train together.

    In deterministic mode the rows of a step get scores of the weights that the step before it made, those of an
    evaluation of the weights of its step: at its start the role redoes every logged step, and `train` of a step
    comes before the rows of the next one.

    Args:
        tables, columns: where it scores rows, and what it writes.
    """

    def __init__(
        self,
        context: WorkerContext,
        store: ExperienceStore,
        model: str,
        tables: Sequence[str],
        columns: Sequence[Column],
    ) -> None:
        super().__init__(context, store, model, context.run.checkpoints_of(context.role))
        self._too_early = False
        config = recipe_hash(context.recipe)
        self._scoring = ResponseScoring(
            context,
            store,
            context.role,
            tables,
            columns,
            self._scores,
            pad_id=self._pad_id,
            facts=lambda: Facts(tag=f"version {self._trained} config {config}"),
            fits=self._fits,
        )
        if context.rank == 0:
            self._log.server_is_another()
            self._checkpoints.forget(self._logged)
        self._catch_up(self._logged)

    def _newest(self) -> int:
        """The last logged step that stays: later ones lost rows, and the actor takes them back."""
        run = self._context.run
        checkpoints, log = FileCheckpoints(run.checkpoints), FileBatchLog(run.batch_log)
        last = last_kept(lambda: max(checkpoints.steps(), default=0), log.entries, self._log.held)
        self._logged = int(self._mesh.broadcast(str(last).encode()))
        return self._logged

    def handlers(self) -> Mapping[str, CallHandler]:
        """`train`, `checkpoint`, `settle`."""
        return {"train": self._train, "checkpoint": self._checkpoint, "settle": self._settle}

    # -- what a role of this kind says -----------------------------------------------------------------------

    def _scores(self, batch: MicroBatch) -> Mapping[str, Any]:
        """What is written, by column; without gradient."""
        raise NotImplementedError

    def _work_on(self, batch: Batch, updates: Sequence[Update]) -> list[list[Work]]:
        """The micro-batches of each update."""
        raise NotImplementedError

    def _described(self, batch: Batch, figures: Mapping[str, float]) -> dict[str, float]:
        """The figures of a step, under names that are no other trainer's."""
        raise NotImplementedError

    # -- row work ------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Score one claim; False when no row is ready."""
        return not self._too_early and self._scoring.work()

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a row may be ready, or a call comes."""
        if self._too_early:
            super().wait(timeout_s, wake_fd)
        else:
            self._settle_saved()
            self._scoring.wait(timeout_s, wake_fd)

    def _fits(self, table: str, step: int) -> bool:
        """Whether rows of this step may be scored with the weights at hand.

        Raises:
            RestartRequired: the step is made again, and its rows need the weights before it.
        """
        wanted = step if table == EVAL else step - 1
        if not self._recipe.deterministic or self._trained == wanted:
            return True
        if self._trained > wanted:
            got = f"rows of step {step} after its training: the server lost them"
            raise RestartRequired(self._context.role, got=got)
        self._too_early = True
        return False

    # -- training ------------------------------------------------------------------------------------------

    def _train(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Train on a logged step.

        Returns:
            Figures; or `again`: the log does not have the step (any more), the actor must form it first.
        """
        step = int(args["step"])
        self._saved.settle()
        if self._context.rank == 0 and self._log.server_is_another():
            self._save()  # rows that a redo would need may be gone
        self._catch_up(step - 1)
        if self._trained < step and not self._advance(step):
            return {"again": True}
        self._too_early = False
        return dict(self._metrics)

    def _advance(self, step: int, *, redo: bool = False) -> bool:
        """See `Trainer._advance`; what it shall learn is computed from the rows, as the actor does."""
        self._context.activity("training")
        began = time.monotonic()
        found = self._on_every_rank(self._found(step, redo=redo) if self._context.rank == 0 else None)
        if found is None:
            return False
        entry, batch = found
        role = self._context.role
        if role not in entry.beside:
            raise IntegrityError(
                f"step {step} of batch log {self._context.run.batch_log}",
                got=f"no optimizer steps of {role}",
                expected="them: it learns from every step",
                remedy="The run began with another version or without this role: start anew with --fresh",
            )
        updates = self._for_this_mesh(entry.beside[role], step)
        figures = self._update_all(updates, self._work_on(batch, updates))
        self._trained = step
        seconds = {f"{self._context.role}_train_s": round(time.monotonic() - began, 4)}
        self._metrics = {**self._described(batch, figures), **seconds}
        return True

    def _found(self, step: int, *, redo: bool) -> Found | None:
        entry = self._log.find(step)
        if entry is not None and (redo or self._log.held(entry)):
            return self._with_rows(entry)
        if redo:
            raise IntegrityError(f"batch log {self._context.run.batch_log}", got=f"no entry of step {step}")
        return None


def last_kept(
    durable: Callable[[], int],
    entries: Callable[[int], Iterator[BatchEntry]],
    held: Callable[[BatchEntry], bool],
) -> int:
    """The last step that the actor has a checkpoint of, or whose rows and those of all since are held.

    While this looks, the actor may commit a checkpoint and let go of rows: those are not lost. It lets go after the
    commit, so that a second look at the checkpoints tells the two apart.
    """
    last = -1
    while (newest := durable()) > last:
        last = newest
        for entry in entries(last):
            if not held(entry):
                break
            last = entry.step
    return last
