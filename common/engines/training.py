"""The training engine: accumulate unnormalised sums, apply the global denominator once, at the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlmq.common.layouts.layout import MeshShape

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from rlmq.common.engines.decoder_shape import Place
    from rlmq.common.layouts.part import WeightPart
    from rlmq.common.recipe.schema import TrainBlock
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


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What a training engine is made from, on one rank.

    Args:
        model: folder of a Hugging Face model: its configuration and first weights.
        block: optimizer, schedule, types.
        temperature: of the sampling distribution that log-probs refer to.
        rank: of this process, in `mesh`.
        mesh: all ranks.
        group: of all ranks; None for one alone. Torch's default group, with other strategies than `torch` and `3d`.
        part: makes a group of some ranks; all of them ask for it in the same order.
        generation: what every rank generates with, where the actor's ranks do.
        folder: the recipe's, for functions that it names.
        seed: of weights that are new.
        options: the engine's own (its `Options` block), as the recipe has them.
    """

    model: str
    block: TrainBlock
    temperature: float = 1.0
    rank: int = 0
    mesh: MeshShape = field(default_factory=MeshShape)
    group: ProcessGroup | None = None
    part: Callable[[str, Sequence[int]], ProcessGroup | None] = lambda _name, _ranks: None
    generation: list[Place] | None = None
    folder: Path = Path()
    seed: int = 0
    options: Any = None


class TrainingEngine(Protocol):
    """Holds the trained weights and their optimizer on this rank."""

    @property
    def sharded(self) -> bool:
        """Whether a rank holds only a part: then `shards`, `part` and `state` are made by all ranks at once."""

    @property
    def even_passes(self) -> bool:
        """Whether all ranks must make as many passes; one with fewer micro-batches makes `idle` ones."""

    def idle(self, *, backward: bool) -> None:
        """A pass that adds nothing."""

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
