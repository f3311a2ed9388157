"""Handles: what a script's loop holds in the place of rows, and the roles that hand them out.

No row comes near the controller. A batch handle names a step, and the stages that its rows pass; these work as
soon as a row has what they need, side by side, whatever the script waits for. Training and publishing are calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlmq.algorithms import Settings
from rlmq.common.errors import UsageError

if TYPE_CHECKING:
    from rlmq.run import Run


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step: what they are, and what they will have."""

    run: Run
    step: int
    columns: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()

    def join(self, *others: Batch) -> Batch:
        """The same rows with the columns of all.

        Raises:
            UsageError: rows of another step.
        """
        for other in others:
            if other.step != self.step:
                raise UsageError(
                    "join", got=f"rows of steps {self.step} and {other.step}", expected="the same rows"
                )
        columns = dict.fromkeys((*self.columns, *(c for other in others for c in other.columns)))
        stages = dict.fromkeys((*self.stages, *(s for other in others for s in other.stages)))
        return replace(self, columns=tuple(columns), stages=tuple(stages))

    def map(self, settings: Settings) -> Batch:
        """Set how the trainers read the rows: `kl_penalty(...)`, `gae(...)`. It is done where the rows are."""
        self.run.settle(settings)
        return self

    def wait(self, timeout_s: float | None = None) -> Batch:
        """Wait until the rows have passed the batch's stages.

        Raises:
            DeadlineExceeded: they have not after `timeout_s`; who has them is named.
        """
        for stage in self.stages:
            self.run.steering.passed(stage, timeout_s)
        return self


@dataclass(frozen=True, slots=True)
class Update:
    """The future of a training step: its metrics."""

    run: Run
    step: int
    role: str

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Metrics of the step: loss, KL, entropy, clip fraction, gradient norm, rewards and lengths.

        Raises:
            DeadlineExceeded: rows have not come after `timeout_s`, or training made no progress for
                `deadlines.step_s`; who was waited for is named.
        """
        return self.run.train(self.step, self.role, timeout_s)


@dataclass(frozen=True, slots=True)
class Handle:
    """A declared role."""

    run: Run
    role: str

    def _over(self, batch: Batch, columns: Sequence[str]) -> Batch:
        return Batch(self.run, batch.step, tuple(columns), (self.role,))


@dataclass(frozen=True, slots=True)
class Prompts(Handle):
    """Where prompts come from."""

    def next(self) -> Batch:
        """Admit the open step's prompts: generation of them begins at once."""
        return self.run.admit()


@dataclass(frozen=True, slots=True)
class Trained(Handle):
    """A role whose weights are trained."""

    def update(
        self,
        batch: Batch,
        *,
        loss: str | None = None,
        clip: float | None = None,
        epochs: int | None = None,
        mini_batches: int | None = None,
    ) -> Update:
        """Train on the batch when all its rows are ready.

        Args:
            batch: of the open step.
            loss: of the actor: an algorithm of `rlmq algorithms`; of the critic: "value".
            clip: of the actor's ratio around 1, or furthest move of a value.
            epochs: passes over the batch.
            mini_batches: optimizer steps per pass.
        """
        self.run.settle(self._settings(loss, clip, {"epochs": epochs, "mini_batches": mini_batches}))
        return self.run.ask(batch, self.role)

    def _settings(self, loss: str | None, clip: float | None, passes: Settings) -> Settings:
        block = self.run.block_of(self.role)
        settings = {f"{block}.{key}": value for key, value in passes.items() if value is not None}
        if self.role != "actor":
            if loss not in (None, "value"):
                raise UsageError(f"{self.role}.update", got=f"loss={loss!r}", expected="loss='value'")
            return settings | ({} if clip is None else {"algorithm.value_clip": clip})
        named = {} if loss is None else {"algorithm.name": loss}
        return settings | named | ({} if clip is None else {"algorithm.clip": [clip, clip]})

    train_step = update


@dataclass(frozen=True, slots=True)
class Actor(Trained):
    """The policy: it generates and is trained."""

    def generate(self, batch: Batch, *, max_tokens: int | None = None, temperature: float | None = None) -> Batch:
        """The batch's responses, as the rollout workers come to them."""
        asked = {"rollout.max_response_tokens": max_tokens, "rollout.temperature": temperature}
        self.run.settle({key: value for key, value in asked.items() if value is not None})
        columns = ("response_ids", "response_text", "rollout_logprobs")
        return Batch(self.run, batch.step, (*batch.columns, *columns), ("rollout",))

    def publish(self) -> None:
        """Move the weights to the rollout workers; what is generated from now on has them."""
        self.run.publish()

    generate_sequences = generate


@dataclass(frozen=True, slots=True)
class Critic(Trained):
    """A critic: its values are each token's baseline."""

    def compute_values(self, batch: Batch) -> Batch:
        """The batch's values."""
        return self._over(batch, ("values",))


@dataclass(frozen=True, slots=True)
class Reference(Handle):
    """The policy that the trained one shall stay close to."""

    def logprobs(self, batch: Batch) -> Batch:
        """The batch's log-probs under it."""
        return self._over(batch, ("ref_logprobs",))

    compute_log_prob = logprobs


@dataclass(frozen=True, slots=True)
class Reward(Handle):
    """Reward functions, each with a column of its own."""

    names: tuple[str, ...] = field(default=())

    def score(self, batch: Batch) -> Batch:
        """The batch's rewards."""
        return self._over(batch, ("reward", *(f"reward.{name}" for name in self.names)))
