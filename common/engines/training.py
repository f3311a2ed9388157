"""The training engine: accumulate unnormalised sums, apply the global denominator once, at the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from rlmq.common.layouts.part import WeightPart
    from rlmq.common.weights import WeightManifest


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded into rectangles; `P` prompt places (left-padded), `R` response places (right-padded).

    Shapes: `input_ids, attention_mask, position_ids` [rows, P + R]; `response_mask` (1 where a token counts
    in the loss) and every tensor in `columns` (`old_logprobs, rollout_logprobs, ref_logprobs, advantages`)
    [rows, R].
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    response_mask: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        """R."""
        return int(self.response_mask.shape[1])


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """What the policy says of the response tokens: `logprobs` and `entropy` [rows, R], zero where padded.

    Both are of the distribution at the sampling temperature, so that they compare with the rollout's. A model
    that scores responses says `scores` [rows] instead.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    scores: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss as a *sum* over this micro-batch, and metric sums (plain tensors, no gradient)."""

    loss_sum: torch.Tensor
    metric_sums: Mapping[str, torch.Tensor]


LossFunction = Callable[[PolicyOutput, MicroBatch], LossTerms]


@dataclass(frozen=True, slots=True)
class StepStats:
    """What an optimizer step did: gradient norm before clipping, and the learning rate it used."""

    grad_norm: float
    lr: float


class TrainingEngine(Protocol):
    """Holds the trained weights and their optimizer on this rank."""

    def layout(self) -> WeightManifest:
        """Names, shapes and dtypes of the weights as `shards` yields them."""

    def logprobs(self, batch: MicroBatch) -> PolicyOutput:
        """Forward without gradient."""

    def accumulate(self, batch: MicroBatch, loss: LossFunction) -> Mapping[str, float]:
        """Forward and backward; adds the gradient of `loss_sum`, returns the metric sums."""

    def step(self, denominators: tuple[float, ...]) -> StepStats:
        """Divide the gradient by the product of the *global* denominators, reduce over ranks, clip, update."""

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's weights by name, tied aliases included, in manifest order."""

    def part(self) -> WeightPart:
        """This rank's own part of the weights: what it holds of each, and the memory."""

    def state(self) -> dict[str, torch.Tensor]:
        """Optimizer state as named tensors (`exp_avg.NAME`, `exp_avg_sq.NAME`, `step`)."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`."""
