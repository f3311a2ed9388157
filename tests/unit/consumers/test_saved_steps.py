"""What of the training is durable, and what a full disk does to a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import structlog
import torch

from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.errors import DependencyError
from rlmq.common.metrics import CHECKPOINT_FAILURES
from rlmq.consumers.saved_steps import SavedSteps

pytestmark = pytest.mark.timeout(60)


class Engine:
    """Weights and state of one number each."""

    aside = False

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(4)

    def state(self) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(1)}


class Disk:
    """Where checkpoints go; may be full, or slow."""

    def __init__(self) -> None:
        self.full = False
        self.slow_s = 0.0
        self.steps: list[int] = []
        self.committed: list[int] = []

    def save(self, step: int, *_: Any) -> None:
        time.sleep(self.slow_s)
        if self.full:
            raise DependencyError(f"checkpoint {step}", got="No space left on device")
        self.steps.append(step)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def saved(disk: Disk) -> SavedSteps:
    return SavedSteps(cast(TorchEngine, Engine()), 0, disk.committed.append, structlog.get_logger())


def test_a_full_disk_is_told_and_the_next_checkpoint_makes_up_for_it(saved: SavedSteps, disk: Disk) -> None:
    # given a checkpoint that does not fit
    failures = CHECKPOINT_FAILURES._value.get()
    disk.full = True
    with structlog.testing.capture_logs() as logs:
        saved.begin(5, disk.save)
        saved.settle(wait=True)
    # then the run goes on, and it is told in the log, a metric, and the next figures
    assert [entry["step"] for entry in logs if entry["event"] == "checkpoint failed"] == [5]
    assert CHECKPOINT_FAILURES._value.get() == failures + 1
    assert "No space left" in saved.take_figures()["checkpoint_failed"]
    assert saved.durable == 0 and disk.committed == []
    # when there is room, then the next one covers its steps too
    disk.full = False
    saved.begin(10, disk.save)
    saved.settle(wait=True)
    assert saved.durable == 10 and disk.committed == [10]
    assert "checkpoint_failed" not in saved.take_figures()


def test_the_last_checkpoint_of_a_run_must_fit(saved: SavedSteps, disk: Disk) -> None:
    disk.full = True
    saved.begin(5, disk.save)
    with pytest.raises(DependencyError, match="No space left"):
        saved.save(5, disk.save)
    assert saved.durable == 0


def test_a_step_is_committed_when_its_writing_has_ended_and_not_before(saved: SavedSteps, disk: Disk) -> None:
    disk.slow_s = 0.5
    saved.begin(5, disk.save)
    saved.settle()
    assert disk.committed == [] and saved.writing
    saved.begin(5, disk.save)  # the same step again: nothing more to do, nothing to wait for
    assert disk.committed == []
    with saved.waiting():
        saved.begin(6, disk.save)  # waits for the former one
    assert disk.committed == [5]
    saved.settle(wait=True)
    figures = saved.take_figures()
    assert disk.committed == [5, 6] == disk.steps
    assert 0 < figures["checkpoint_blocked_s"] <= figures["checkpoint_s"]
    assert saved.take_figures() == {"checkpoint_blocked_s": 0.0, "checkpoint_s": 0.0}
