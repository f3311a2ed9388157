"""One stage of a pipeline: hidden states come from the stage before, gradients from the stage after.

One forward, one backward (Narayanan et al., arXiv 2104.04473, section 2.2): stage `s` of `p` keeps at most `p - s`
micro-batches between their forward and backward pass. Messages of a direction are received in the order in which
they were sent, and every stage goes through the same micro-batches in the same order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from rlmq.common.engines.tensor_parallel import lost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_FORWARD, _BACKWARD = 1, 2


class InFlight(NamedTuple):
    """A micro-batch between its passes: what came in (None on the first stage), and what went out."""

    received: torch.Tensor | None
    sent: torch.Tensor


class Pipeline:
    """The stage of this rank; alone, or with None as a group, nothing is sent.

    Args:
        group: the stages of one replica and tensor rank, in order.
        stage, stages: which one this is.
    """

    def __init__(self, group: ProcessGroup | None, stage: int, stages: int) -> None:
        self._group = group
        self.first, self.last = stage == 0, stage == stages - 1
        self.most_in_flight = stages - stage
        self._stage = stage
        self._waiting: deque[InFlight] = deque()
        self._sending: deque[tuple[Work, torch.Tensor]] = deque()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Hidden states of the stage before.

        Raises:
            RestartRequired: it died or did not answer in time.
        """
        return self._receive(torch.empty(shape, dtype=dtype, device=device), self._stage - 1, _FORWARD)

    def send(self, hidden: torch.Tensor) -> None:
        """Give hidden states to the next stage."""
        self._send(hidden.detach().contiguous(), self._stage + 1, _FORWARD)

    def keep(self, received: torch.Tensor | None, sent: torch.Tensor) -> None:
        """A forward pass whose gradient will come; makes room first by the oldest backward pass."""
        self._waiting.append(InFlight(received, sent))
        while len(self._waiting) > self.most_in_flight - 1:
            self._backward()

    def finish(self) -> None:
        """All backward passes that are owed, and all messages on their way.

        Raises:
            RestartRequired: another stage died or did not answer in time.
        """
        while self._waiting:
            self._backward()
        while self._sending:
            self._wait(self._sending.popleft()[0])

    def send_gradient(self, received: torch.Tensor | None) -> None:
        """Give the gradient of what came in to the stage before; zeros where nothing depends on it."""
        if received is not None:
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            self._send(gradient.contiguous(), self._stage - 1, _BACKWARD)

    def _backward(self) -> None:
        one = self._waiting.popleft()
        gradient = self._receive(torch.empty_like(one.sent), self._stage + 1, _BACKWARD)
        torch.autograd.backward(one.sent, gradient)
        self.send_gradient(one.received)

    def _send(self, tensor: torch.Tensor, stage: int, tag: int) -> None:
        assert self._group is not None
        try:
            self._sending.append((self._group.send([tensor], stage, tag), tensor))
        except RuntimeError as error:
            raise lost(error) from error
        while len(self._sending) > 2 * self.most_in_flight:
            self._wait(self._sending.popleft()[0])

    def _receive(self, tensor: torch.Tensor, stage: int, tag: int) -> torch.Tensor:
        assert self._group is not None
        tensor = tensor.contiguous()
        try:
            self._wait(self._group.recv([tensor], stage, tag))
        except RuntimeError as error:
            raise lost(error) from error
        return tensor

    @staticmethod
    def _wait(work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise lost(error) from error
