"""Proximal policy optimisation: a critic's values are the baseline of each token.

Source: arXiv 1707.06347; for language models, with the KL taken off each token's reward, Ziegler et al. 2019
(arXiv 1909.08593); the clipped value loss from OpenAI's baselines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlmq.common.algorithms.algorithm import Estimates, Floats, ScoredBatch, Spec, Steering
from rlmq.common.algorithms.gae import at_last_token, gae
from rlmq.common.algorithms.policy_gradient import KEYS, PolicyGradient
from rlmq.common.algorithms.policy_losses import value_error

if TYPE_CHECKING:
    import torch

    from rlmq.common.engines.training import LossTerms, MicroBatch


class Ppo(PolicyGradient):
    """PPO."""

    critics: tuple[str, ...] = ("values",)

    def estimate(self, batch: ScoredBatch) -> Estimates:
        """GAE over counted tokens; the critic learns advantages plus values, before they are whitened."""
        coefficient, state, metrics = self._kl_coefficient(batch)
        kl = self._kl_of_rewards(batch, coefficient)
        advantages, returns = self._gae(batch, batch.rewards - self._overlong(batch), kl, "values")
        return Estimates(self._finished(advantages, batch), {"values": returns}, state, metrics)

    def _gae(
        self, batch: ScoredBatch, rewards: Floats, kl: Sequence[Floats], head: str
    ) -> tuple[list[Floats], list[Floats]]:
        """Advantages and returns of one head: `rewards` at each row's last counted token, less every token's KL."""
        last = at_last_token(rewards, batch.masks)
        earned = [reward - own for reward, own in zip(last, kl, strict=True)]
        return gae(earned, batch.columns[head], batch.masks, gamma=self._block.gamma, lam=self._block.lam)

    def value_loss(self, values: Mapping[str, torch.Tensor], batch: MicroBatch) -> LossTerms:
        """`max((V - R)^2, (clip(V) - R)^2) / 2` of each head, summed over counted tokens.

        Metric sums over counted tokens: `tokens, value_loss, value_clip` (tokens held by the clip), all heads
        together.
        """
        import torch

        from rlmq.common.engines.training import LossTerms

        mask = batch.response_mask > 0
        losses, held = [], []
        for head, value in values.items():
            own, old, returns = (
                torch.where(mask, one, 0.0)
                for one in (value, batch.columns[f"old_{head}"], batch.columns[f"returns_{head}"])
            )
            error, clipped = value_error(own, old, returns, self._block.value_clip)
            losses.append(error.sum())
            held.append(clipped.sum())
        loss_sum = torch.stack(losses).sum()
        sums = {"tokens": mask.sum(), "value_loss": loss_sum.detach(), "value_clip": torch.stack(held).sum()}
        return LossTerms(loss_sum, sums)

    def loop(self, run: Steering) -> None:
        """Strictly on-policy; actor and critic train side by side on the batch that was logged for both."""
        run.publish(0)
        run.evaluate(0)
        for step in run.steps():
            run.admit(step)
            run.wait_batch(step)
            run.form(step)
            run.train_both(step)
            run.publish(step)
            run.evaluate(step)
            run.checkpoint(step)


PPO_KEYS = KEYS | {"gamma", "lam", "value_clip"}

SPEC = Spec(
    "Proximal policy optimisation: a critic's values are each token's baseline (GAE).",
    Ppo,
    preset={"group_size": 1, "whiten": True, "lam": 0.95, "kl_in": "reward", "kl_estimator": "k1"},
    keys=PPO_KEYS,
)
