"""Checkpoints beside the training: what is saved, who waits for what, what a failure does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from rlmq.common.errors import DependencyError
from rlmq.consumers.checkpoint_writer import CheckpointWriter, Tensors

pytestmark = pytest.mark.timeout(60)


class Slow:
    """Saves when it is told to, and remembers what."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.saved: list[dict[str, torch.Tensor]] = []
        self.memory: list[int] = []

    def __call__(self, weights: Tensors, state: Tensors) -> None:
        assert self.go.wait(30)
        self.saved.append({name: tensor.clone() for name, tensor in {**weights, **state}.items()})
        self.memory.append(weights["w"].data_ptr())


def tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"w": torch.zeros(1000)}, {"step": torch.tensor(3), "exp_avg.w": torch.ones(1000)}


def test_the_trainer_goes_on_while_the_step_of_the_copy_is_written() -> None:
    # given a checkpoint whose writing takes long
    writer, slow, (weights, state) = CheckpointWriter(), Slow(), tensors()
    writer.begin(3, weights, state, slow)
    # when the trainer changes the weights as soon as it may
    writer.before_change()
    weights["w"].fill_(7.0)
    state["step"].fill_(4)
    # then nothing has ended yet, and what is saved are the values at `begin`
    assert writer.busy and writer.finished() is None
    slow.go.set()
    written = writer.finished(wait=True)
    assert written is not None and (written.step, written.error) == (3, None)
    assert torch.equal(slow.saved[0]["w"], torch.zeros(1000)) and int(slow.saved[0]["step"]) == 3
    assert writer.finished() is None, "an end is told once"


def test_the_copys_memory_is_used_again() -> None:
    writer, slow, (weights, state) = CheckpointWriter(), Slow(), tensors()
    slow.go.set()
    for step in (1, 2):
        weights["w"].fill_(float(step))
        writer.begin(step, weights, state, slow)
        writer.finished(wait=True)

    assert slow.memory[0] == slow.memory[1] != weights["w"].data_ptr()
    assert [float(saved["w"][0]) for saved in slow.saved] == [1.0, 2.0]


def full(weights: Tensors, state: Tensors) -> None:
    raise DependencyError("checkpoint", got="no room")


def broken(weights: Tensors, state: Tensors) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(("save", "kind"), [(full, DependencyError), (broken, ZeroDivisionError)])
def test_a_failure_is_told_and_the_next_checkpoint_is_written(
    save: Callable[[Tensors, Tensors], None], kind: type[Exception]
) -> None:
    writer, slow, (weights, state) = CheckpointWriter(), Slow(), tensors()
    writer.begin(1, weights, state, save)
    failed = writer.finished(wait=True)
    assert failed is not None and isinstance(failed.error, kind)

    slow.go.set()
    writer.begin(2, weights, state, slow)
    written = writer.finished(wait=True)
    assert written is not None and written.error is None and len(slow.saved) == 1


def test_a_copy_that_fails_does_not_hold_up_the_trainer() -> None:
    writer, (weights, _) = CheckpointWriter(), tensors()
    writer.begin(1, weights, {"meta": torch.empty(3, device="meta")}, full)
    writer.before_change()
    failed = writer.finished(wait=True)
    assert failed is not None and failed.error is not None
