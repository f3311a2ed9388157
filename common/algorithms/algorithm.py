"""What an algorithm is: the columns that it needs, an advantage, a loss, and a control loop.

The controller imports an algorithm's file for its loop and must stay free of torch: algorithm files import
torch inside their loss only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput
    from rlmq.common.recipe.schema import Recipe

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """What advantages are made of: the rows of one batch in training order.

    Attributes:
        rewards: the weighted sum of each row [rows].
        groups: group id of each row [rows].
        masks: which response tokens count, per row [tokens].
        columns: the other columns that the algorithm needs, per row: numbers per token (`rollout_logprobs`,
            `ref_logprobs`, `values`) as arrays [tokens], or one value a row.
        state: figures that the algorithm carries from step to step, as the step before left them; {} at first.
    """

    rewards: Floats
    groups: Sequence[str]
    masks: Sequence[NDArray[np.bool_]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response tokens that count [rows]."""
        return np.array([int(mask.sum()) for mask in self.masks], dtype=np.int64)

    def whole(self, advantages: Floats) -> list[Floats]:
        """One number a row [rows] as the same number at each of its tokens, per row [tokens]."""
        return [np.full(len(mask), value) for mask, value in zip(self.masks, advantages, strict=True)]


@dataclass(frozen=True, slots=True)
class Estimates:
    """What an algorithm makes of a scored batch, per row and response token ([tokens] each).

    Attributes:
        advantages: of the actor's loss.
        returns: what each head of the critic shall learn, by the name of the head's column (`values`).
        state: what the next step's `ScoredBatch.state` will be; it is logged with the batch.
        metrics: figures of the step (means, not sums).
    """

    advantages: Sequence[Floats]
    returns: Mapping[str, Sequence[Floats]] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Future(Protocol):
    """A call that is under way."""

    def wait(self) -> list[dict[str, Any]]:
        """What the ranks answered, as `Steering.call` returns it."""


class Steering(Protocol):
    """What a control loop may do. Every method makes calls, whose ids are the step and their ordinal in it: after
    a crash the loop runs again from the open step, and calls that have finished return their stored results at
    once. So a loop must be deterministic between calls; else it ends with `ControlLoopDiverged`.
    """

    def steps(self) -> Iterator[int]:
        """Step numbers from the open step on, 1-based; ends at `train.steps` or when the data end."""

    def call(
        self, role: str, method: str, args: Mapping[str, Any] | None = None, *, ranks: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Call a method of these ranks of a role, or of everyone who is there; what they answer, by rank.

        Of roles whose workers may come and go, one that dies meanwhile has no answer.
        """

    def submit(
        self, role: str, method: str, args: Mapping[str, Any] | None = None, *, ranks: Sequence[int] | None = None
    ) -> Future:
        """As `call`, without waiting: several roles may work side by side. Every future must be waited for."""

    def admit(self, step: int) -> int:
        """Add the step's prompts to the train table; returns the number of samples."""

    def wait_batch(self, step: int) -> int:
        """Wait until every admitted sample of the step is ready to train or ended; returns the ready ones."""

    def form(self, step: int, *, update: bool = True) -> None:
        """Let the actor log the batch of the step, so that actor and critic can train on it side by side.

        Without `update` the step leaves the policy as it is: its version is the step all the same.
        """

    def train_both(self, step: int) -> None:
        """As `train`, for the actor and those who learn beside it; the batch was formed before."""

    def train(self, step: int) -> None:
        """Train the actor on the batch; logs its metrics; makes policy version `step`."""

    def publish(self, version: int) -> None:
        """Move the actor's weights to every rollout worker."""

    def evaluate(self, step: int) -> None:
        """Generate and score the evaluation sets with the published weights, when it is their turn."""

    def checkpoint(self, step: int) -> None:
        """Save a checkpoint when it is its turn."""


class Algorithm(Protocol):
    """One algorithm, built from the recipe's `algorithm` block.

    It is a pure function of its rows: what it carries from step to step is `Estimates.state`, which the batch log
    keeps.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that a row must have before it can be trained on."""

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy must score the rows."""

    @property
    def critics(self) -> tuple[str, ...]:
        """Columns that a critic writes, one for each of its heads; () where there is none."""

    @property
    def greedy_baseline(self) -> bool:
        """Whether each group has one more member, generated greedily and never trained on."""

    @property
    def group_columns(self) -> tuple[str, ...]:
        """Columns that `group` makes; () where groups are not judged before they are trained on."""

    def group(self, rewards: Floats, greedy: float | None) -> tuple[Mapping[str, float], str]:
        """Judge a group, before anything but its rewards is there.

        Args:
            rewards: of its rows that have one, without the greedy row [rows], at least one.
            greedy: the greedy row's, where there is one.

        Returns:
            `group_columns`, and why the group is dropped (empty: it is not).
        """

    @property
    def whole_groups(self) -> bool:
        """Whether all rows of a group must be in one micro-batch; a group that lacks rows is left out then."""

    @property
    def scorer(self) -> bool:
        """Whether the model that is trained scores responses, instead of writing them."""

    def estimate(self, batch: ScoredBatch) -> Estimates:
        """Advantages, and what the critic shall learn."""

    def denominators(self, lengths: Sequence[int]) -> tuple[float, ...]:
        """Global denominators of the loss for rows with these numbers of counted response tokens."""

    def loss(self, output: PolicyOutput, batch: MicroBatch, state: Mapping[str, float]) -> LossTerms:
        """The actor's loss as an unnormalised sum, and metric sums. `state` is what `estimate` returned."""

    def aggregate(self, per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Numbers of tokens [rows, R], 0 where masked, as the sum that `denominators` belong to."""

    def value_loss(self, values: Mapping[str, torch.Tensor], batch: MicroBatch) -> LossTerms:
        """The critic's loss as an unnormalised sum over counted tokens.

        `values` by head [rows, R]; `batch.columns` has `old_NAME` and `returns_NAME` of each head.
        """

    def loop(self, run: Steering) -> None:
        """The control loop."""


@dataclass(frozen=True, slots=True)
class Spec:
    """An algorithm as `rlmq algorithms` lists it.

    Attributes:
        sentence: what it is, in one line.
        build: makes it of a recipe.
        preset: keys of the recipe's `algorithm` block whose defaults are others here.
        keys: keys of the block that it reads; another value than the default of any other key is refused.
        online: whether it learns from samples that the policy generates; else from rows that the data bring.
    """

    sentence: str
    build: Callable[[Recipe], Algorithm]
    preset: Mapping[str, Any] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()
    online: bool = True
