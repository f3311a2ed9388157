"""The batch log and the server's index of it, kept in agreement, also when the server came back older.

A server that is killed may lose its last second, more when its disk is slow. What survives is a state that it had,
so whatever came after some moment is gone: rows, their columns, that they were trained on. Log and checkpoints are
forced to disk before anybody relies on them, so they never lag behind the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from rlmq.buffer.batch_log import BatchEntry, Update
from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.buffer.store import ExperienceStore, RowRange
from rlmq.buffer.tables import TRAIN
from rlmq.common.errors import IntegrityError

_STAGE = "actor"
_TOLD_AGAIN = 64
"""Steps before the server's version that it is told again: it may know the version and not the end of the rows."""


class LoggedSteps:
    """The log as trainer rank 0 keeps it.

    Args:
        store: holds the rows.
        log: the file.
        read: reads the rows of an entry; IntegrityError when the server does not have them all.
        exact: a step whose rows were made again must be the same step.
    """

    def __init__(
        self,
        store: ExperienceStore,
        log: FileBatchLog,
        read: Callable[[BatchEntry], object],
        *,
        exact: bool,
        events: structlog.stdlib.BoundLogger,
    ) -> None:
        self._store = store
        self._log = log
        self._read = read
        self._exact = exact
        self._events = events
        self._server = store.server_id()
        self._taken_back: dict[int, BatchEntry] = {}

    def find(self, step: int) -> BatchEntry | None:
        """The entry of a step, if it is logged."""
        return next((entry for entry in self._log.entries(step - 1) if entry.step == step), None)

    def state_before(self, step: int) -> Mapping[str, float]:
        """What the algorithm carries into this step."""
        before = self.find(step - 1)
        return before.state if before is not None else {}

    def rows(self, after: int, to: int) -> tuple[str, ...]:
        """Ids of the rows of the steps after `after`, up to `to`."""
        entries = [entry for entry in self._log.entries(after) if entry.step <= to]
        return tuple(row for entry in entries for rows, _ in _trained_on(entry) for row in rows)

    def append(self, entry: BatchEntry) -> None:
        """Log a step; nothing of it may happen before this returns.

        Raises:
            IntegrityError: its rows were made again and are others, though that must not be.
        """
        before = self._taken_back.pop(entry.step, entry)
        if self._exact and _trained_on(before) != _trained_on(entry):
            raise IntegrityError(
                f"step {entry.step}, whose rows were made again because the server had lost them",
                got="other samples or lengths than before",
                expected="the same in deterministic mode",
                remedy="Look for a reward or data function that is not a function of its arguments",
            )
        self._log.append(entry)

    def held(self, entry: BatchEntry) -> bool:
        """Whether the server has all that a redo of the step reads."""
        try:
            self._read(entry)
        except IntegrityError:
            return False
        return True

    def tell(self, entry: BatchEntry) -> None:
        """The server shall know that these rows are trained on, whoever holds them. Idempotent."""
        for table, ranges in tables_of(entry):
            self._store.finish_logged(table, _STAGE, ranges, step=entry.step)
        self._store.set_version(TRAIN, entry.policy_version)

    def tell_durable(self, step: int) -> None:
        """Rows of steps that a checkpoint covers are trained, also if the server forgot that, or the rows.

        Raises:
            IntegrityError: the server was told of a later checkpoint, and has let go of what a redo would read.
        """
        counts = self._store.counts(TRAIN)
        if counts.durable > step:
            raise IntegrityError(
                "checkpoints",
                got=f"a newest whole one of step {step}" if step else "no whole one",
                expected=f"that of step {counts.durable}, which was there when the rows up to it were let go of",
                remedy="Restore it from a copy (the log says what is wrong with it), or start anew with --fresh",
            )
        known = min(step, counts.version) - _TOLD_AGAIN
        for entry in self._log.entries(known):
            if entry.step <= step:
                self.tell(entry)

    def cut_back(self, durable: int) -> None:
        """Take back the logged steps whose rows the server lost and no checkpoint covers.

        Their rows are put, generated and scored again.
        """
        for entry in self._log.entries(durable):
            if not self.held(entry):
                self._taken_back = {one.step: one for one in self._log.entries(entry.step - 1)}
                self._events.warning("the server lost rows: made again", steps=list(self._taken_back))
                self._log.rewind(entry.step)
                return

    def server_is_another(self) -> bool:
        """Whether the server was started again since the last look, and may have come back older."""
        known, self._server = self._server, self._store.server_id()
        return known != self._server


def tables_of(entry: BatchEntry) -> list[tuple[str, list[RowRange]]]:
    """The tables that an entry trained on, `train` first, and where they hold its rows."""
    parts = [(entry.table, entry.ranges), *((loss.table, loss.ranges) for loss in entry.losses)]
    return [(table, [RowRange(r.chunk, r.first, r.count, use=r.use) for r in ranges]) for table, ranges in parts]


def _trained_on(entry: BatchEntry) -> list[tuple[tuple[str, ...], tuple[Update, ...]]]:
    """Rows and updates of each table, `train` first."""
    return [(entry.rows, entry.updates), *((loss.rows, loss.updates) for loss in entry.losses)]
