"""What of the training is on disk for good, and how long the trainer waited for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from rlmq.common.errors import DependencyError
from rlmq.common.metrics import CHECKPOINT_BLOCKED_SECONDS, CHECKPOINT_FAILURES, CHECKPOINT_SECONDS
from rlmq.consumers.checkpoint_writer import CheckpointWriter
from rlmq.consumers.tensor_files import without_aliases

if TYPE_CHECKING:
    import torch

Save = Callable[..., object]


class Saved(Protocol):
    """What is saved; both are asked for, one after the other.

    Attributes:
        aside: nobody changes the tensors, so that no copy of them is needed.
    """

    aside: bool

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights by name."""

    def state(self) -> dict[str, torch.Tensor]:
        """Optimizer state by name."""


class SavedSteps:
    """Checkpoints as trainer rank 0 makes them; replicas are equal, so that no other rank does.

    Args:
        engine: what is saved.
        save: `FileCheckpoints.save` without step and tensors' figures.
        committed: told each step that has become a checkpoint.
    """

    def __init__(
        self,
        engine: Saved,
        durable: int,
        committed: Callable[[int], None],
        events: structlog.stdlib.BoundLogger,
    ) -> None:
        self.durable = durable
        """The newest step that a checkpoint covers."""
        self._engine = engine
        self._committed = committed
        self._events = events
        self._writer = CheckpointWriter()
        self._figures = _no_figures()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writer.busy

    def begin(self, step: int, save: Save) -> None:
        """Write a checkpoint of this step beside the training; a former one is awaited."""
        self.settle(wait=self._writer.step != step)
        if step > max(self.durable, self._writer.step):
            weights, state = without_aliases(self._engine.shards()), self._engine.state()
            self._writer.begin(step, weights, state, partial(save, step), copy=not self._engine.aside)

    def save(self, step: int, save: Save) -> None:
        """This step is durable when this returns; written without a copy.

        Raises:
            DependencyError: it cannot be written.
        """
        self.settle(wait=True)
        if step > self.durable:
            began = time.monotonic()
            save(step, dict(self._engine.shards()), self._engine.state())
            self._commit(step, time.monotonic() - began)

    def settle(self, *, wait: bool = False) -> None:
        """See what became of the checkpoint that was being written.

        One that could not be written is told (log, metric, figures) and made up for by the next one.
        """
        written = self._writer.finished(wait=wait)
        if written is None:
            return
        if written.error is None:
            self._commit(written.step, written.write_s)
        elif isinstance(written.error, DependencyError):
            CHECKPOINT_FAILURES.inc()
            self._figures["checkpoint_failed"] = str(written.error)
            self._events.error("checkpoint failed", step=written.step, error=str(written.error))
        else:
            raise written.error

    def before_change(self) -> None:
        """The weights may change when this returns."""
        with self.waiting():
            self._writer.before_change()

    def take_figures(self) -> Mapping[str, Any]:
        """Seconds since the last time: `checkpoint_blocked_s` of the trainer, `checkpoint_s` of those that ended;
        and `checkpoint_failed`, why one was not written."""
        figures, self._figures = self._figures, _no_figures()
        return figures

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The trainer waits for the disk in here."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            CHECKPOINT_BLOCKED_SECONDS.inc(seconds)
            self._add("checkpoint_blocked_s", seconds)

    def _commit(self, step: int, write_s: float) -> None:
        """The rename made it a checkpoint: let go of what it covers."""
        self.durable = step
        CHECKPOINT_SECONDS.observe(write_s)
        self._add("checkpoint_s", write_s)
        self._events.info("checkpoint", step=step, seconds=round(write_s, 3))
        self._committed(step)

    def _add(self, figure: str, seconds: float) -> None:
        self._figures[figure] = round(self._figures[figure] + seconds, 4)


def _no_figures() -> dict[str, Any]:
    return {"checkpoint_blocked_s": 0.0, "checkpoint_s": 0.0}
