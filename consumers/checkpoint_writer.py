"""Writes checkpoints beside the training: a thread takes a copy of the tensors, then writes the copy.

::

    compute thread   begin ── (generation, scoring) ── before_change ── optimizer step, …     finished
                       │                                 ^ waits only for the copy               ^
    writer thread      └── copy ─────────────────────────┴── write, hash, fsync, rename ─────────┘

The copy's memory is kept for the next one: as many bytes as a checkpoint has (12 per parameter in float32, 14 in
bfloat16), from the first background checkpoint on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Tensors = Mapping[str, torch.Tensor]
Save = Callable[[Tensors, Tensors], object]
"""Writes a checkpoint from weights and optimizer state."""


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that was written, or was not: `error` says why. `write_s` from its beginning to its end."""

    step: int
    write_s: float
    error: Exception | None = None


@dataclass(slots=True)
class _Job:
    step: int
    thread: threading.Thread
    copied: threading.Event = field(default_factory=threading.Event)
    result: Written | None = None


class CheckpointWriter:
    """At most one checkpoint at a time; all methods are for one thread, the one that changes the tensors."""

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._state: dict[str, torch.Tensor] = {}

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._job is not None and self._job.thread.is_alive()

    @property
    def step(self) -> int:
        """The step whose checkpoint has not been told as finished; -1: none."""
        return -1 if self._job is None else self._job.step

    def begin(self, step: int, weights: Tensors, state: Tensors, save: Save, *, copy: bool = True) -> None:
        """Start to write a checkpoint; the former one has ended (see `finished`).

        Nobody may change the tensors before `before_change` has returned; without `copy`, never.
        """
        if self._job is not None:
            raise RuntimeError("one checkpoint at a time")
        thread = threading.Thread(target=lambda: self._run(job, weights, state, save, copy), name="checkpoint")
        job = self._job = _Job(step, thread)
        thread.start()

    def before_change(self) -> None:
        """Return as soon as the tensors may change: the copy is taken, or nothing is being written."""
        if self._job is not None:
            self._job.copied.wait()

    def finished(self, *, wait: bool = False) -> Written | None:
        """How the checkpoint ended, once; None while it is being written, or when there is none.

        Args:
            wait: until it has ended.
        """
        job = self._job
        if job is None or (job.thread.is_alive() and not wait):
            return None
        job.thread.join()
        self._job = None
        return job.result

    def _run(self, job: _Job, weights: Tensors, state: Tensors, save: Save, copy: bool) -> None:
        began = time.monotonic()
        error: Exception | None = None
        try:
            if copy:
                weights = self._weights = _copied(weights, self._weights)
                state = self._state = _copied(state, self._state)
            job.copied.set()
            save(weights, state)
        except Exception as failure:  # noqa: BLE001 - the thread's edge: `finished` tells it
            error = failure
        job.result = Written(job.step, time.monotonic() - began, error)
        job.copied.set()


def _copied(tensors: Tensors, memory: Tensors) -> dict[str, torch.Tensor]:
    """A copy, in the memory of the copy before where that fits."""
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        room = memory.get(name)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty(tensor.shape, dtype=tensor.dtype)
        copies[name] = room.copy_(tensor.detach())
    return copies
