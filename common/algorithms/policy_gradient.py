"""What the policy-gradient algorithms share: a clipped surrogate loss over tokens, KL terms, and the loop.

Sources: the clipped surrogate from PPO (arXiv 1707.06347, eq. 7); separate clip bounds and the token-level mean
from DAPO (arXiv 2503.14476); a constant length denominator from Dr. GRPO (arXiv 2503.20783); the KL estimators k1
and k3 from J. Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html).

Algorithms differ in their advantages first of all: each overrides `advantages`, one number a row, or `estimate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlmq.common.algorithms.algorithm import Estimates, Floats, ScoredBatch, Steering

if TYPE_CHECKING:
    import torch

    from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput
    from rlmq.common.recipe.algorithm_block import AlgorithmBlock
    from rlmq.common.recipe.schema import Recipe

# exp(20) = 4.9e8: far outside every clip range and finite in float32, so that one absurd token can neither
# overflow the loss nor, its gradient being cut with the clamp, throw the weights away.
LOG_RATIO_LIMIT = 20.0

KEYS = frozenset({"group_size", "clip", "kl_coef", "loss_agg", "old_logprobs"})
"""Keys of the recipe's `algorithm` block that every algorithm of this family reads."""


class PolicyGradient:
    """The common part; by itself it has no advantages."""

    critics: tuple[str, ...] = ()
    greedy_baseline = False

    def __init__(self, recipe: Recipe) -> None:
        self._block: AlgorithmBlock = recipe.algorithm
        self._max_response_tokens = recipe.rollout.max_response_tokens

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that a row must have before it can be trained on."""
        columns = ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward")
        return (*columns, "ref_logprobs") if self.needs_reference else columns

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy must score the rows."""
        return self._block.kl_coef > 0

    def advantages(self, batch: ScoredBatch) -> Floats:
        """One advantage a row [rows], the same at each of its tokens."""
        raise NotImplementedError

    def estimate(self, batch: ScoredBatch) -> Estimates:
        """See `Algorithm.estimate`."""
        return Estimates(batch.whole(self.advantages(batch)))

    def denominators(self, lengths: Sequence[int]) -> tuple[float, ...]:
        """What the summed loss is divided by, for *all* rows of the optimizer step.

        `token_mean`: counted tokens. `sequence_mean`: rows. `sequence_sum`: max_response_tokens, rows.
        Rows without a counted token are no samples of the loss and are not counted.
        """
        rows = float(max(1, sum(1 for n in lengths if n > 0)))
        if self._block.loss_agg == "token_mean":
            return (float(max(1, sum(lengths))),)
        if self._block.loss_agg == "sequence_mean":
            return (rows,)
        return (float(self._max_response_tokens), rows)

    def loss(self, output: PolicyOutput, batch: MicroBatch, state: Mapping[str, float]) -> LossTerms:
        """`-min(ratio · A, clip(ratio) · A) + kl_coef · k3(reference)` summed over counted tokens.

        `ratio = exp(logprobs - old)`, with `old` the rollout's log-probs if the recipe says so, else the
        column `old_logprobs`, else the policy's own, detached: then the ratio is 1 and the gradient that of
        the policy gradient theorem. The exponents are clamped to ±LOG_RATIO_LIMIT.

        Metric sums over counted tokens: `tokens, loss, ratio, ratio_max, clip_low, clip_high, entropy`, the
        KL from rollout to policy as `kl_k1, kl_k3` where the column is there, and `ref_kl`.
        """
        import torch

        from rlmq.common.engines.training import LossTerms

        mask = batch.response_mask > 0
        new = torch.where(mask, output.logprobs, 0.0)
        old = torch.where(mask, self._old(output, batch), 0.0)
        advantages = torch.where(mask, batch.columns["advantages"], 0.0)
        ratio = _safe_exp(new - old)
        low, high = 1.0 - self._block.clip[0], 1.0 + self._block.clip[1]
        per_token = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        sums = {
            "ratio": (ratio * mask).sum(),
            "ratio_max": (ratio * mask).max() if mask.numel() else ratio.new_zeros(()),
            "clip_low": (mask & (ratio < low) & (advantages < 0)).sum(),
            "clip_high": (mask & (ratio > high) & (advantages > 0)).sum(),
            "entropy": torch.where(mask, output.entropy, 0.0).sum(),
        }
        if self.needs_reference:
            reference_kl = _k3(torch.where(mask, batch.columns["ref_logprobs"], 0.0) - new)
            per_token = per_token + self._block.kl_coef * reference_kl
            sums["ref_kl"] = reference_kl.sum()
        if "rollout_logprobs" in batch.columns:
            off = new.detach() - torch.where(mask, batch.columns["rollout_logprobs"], 0.0)
            sums["kl_k1"], sums["kl_k3"] = -off.sum(), _k3(off).sum()
        loss_sum = self._aggregate(torch.where(mask, per_token, 0.0), mask)
        sums["tokens"], sums["loss"] = mask.sum(), loss_sum
        return LossTerms(loss_sum, {name: value.detach() for name, value in sums.items()})

    def _old(self, output: PolicyOutput, batch: MicroBatch) -> torch.Tensor:
        if self._block.old_logprobs == "rollout":
            return batch.columns["rollout_logprobs"]
        return batch.columns.get("old_logprobs", output.logprobs.detach())

    def _aggregate(self, per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The sum that `denominators` belong to; a row's own length is known here, other rows' are not."""
        if self._block.loss_agg == "sequence_mean":
            return (per_token.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()
        return per_token.sum()

    def value_loss(self, values: Mapping[str, torch.Tensor], batch: MicroBatch) -> LossTerms:
        """There is no critic."""
        raise NotImplementedError

    def loop(self, run: Steering) -> None:
        """Strictly on-policy: every batch is generated with the weights that the step before it made."""
        run.publish(0)
        run.evaluate(0)
        for step in run.steps():
            run.admit(step)
            run.wait_batch(step)
            run.train(step)
            run.publish(step)
            run.evaluate(step)
            run.checkpoint(step)


def _safe_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """`exp(x) - 1 - x` for x = log p(token) - log q(token), token from q: unbiased for KL(q, p), never negative."""
    bounded = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return bounded.exp() - 1.0 - bounded
