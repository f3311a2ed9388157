"""What the policy-gradient algorithms share: rewards per token, a clipped surrogate loss, KL terms, and the loop.

Sources: separate clip bounds and the token-level mean from DAPO (arXiv 2503.14476); a constant length denominator
from Dr. GRPO (arXiv 2503.20783); the rest stands beside the formulas (`kl.py`, `gae.py`, `policy_losses.py`).

Algorithms differ in their advantages first of all: each overrides `advantages`, one number a row, or
`token_advantages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlmq.common.algorithms.algorithm import Estimates, Floats, ScoredBatch, Steering
from rlmq.common.algorithms.gae import whitened
from rlmq.common.algorithms.kl import kl_of_row, kl_of_tokens, next_coefficient, safe_exp
from rlmq.common.algorithms.policy_losses import clipped_surrogate, importance_weight, of_sequence

if TYPE_CHECKING:
    import torch

    from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput
    from rlmq.common.recipe.algorithm_block import AlgorithmBlock
    from rlmq.common.recipe.schema import Recipe

KL_KEYS = frozenset({"kl_coef", "kl_in", "kl_estimator", "kl_target", "kl_horizon"})
"""Keys of the KL to the reference."""
KEYS = KL_KEYS | {
    "group_size",
    "clip",
    "ratio",
    "loss_agg",
    "old_logprobs",
    "importance",
    "importance_cap",
    "entropy_coef",
    "whiten",
    "overlong_tokens",
}
"""Keys of the recipe's `algorithm` block that every algorithm of this family reads."""
GROUP_KEYS = KEYS | {"dynamic_sampling", "most_refills"}
"""And those whose baseline is the prompt's other samples."""


class PolicyGradient:
    """The common part; by itself it has no advantages."""

    critics: tuple[str, ...] = ()
    greedy_baseline = False
    whole_groups = False
    scorer = False

    def __init__(self, recipe: Recipe) -> None:
        self._block: AlgorithmBlock = recipe.algorithm
        self._max_response_tokens = recipe.rollout.max_response_tokens

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that a row must have before it can be trained on."""
        columns: tuple[str, ...] = ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "reward")
        if self.needs_reference:
            columns = (*columns, "ref_logprobs")
        return (*columns, *self.group_columns, *self.critics)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy must score the rows."""
        return self._block.kl_coef > 0

    @property
    def group_columns(self) -> tuple[str, ...]:
        """`group_std`, with dynamic sampling."""
        return ("group_std",) if self._block.dynamic_sampling else ()

    def group(self, rewards: Floats, greedy: float | None) -> tuple[Mapping[str, float], str]:
        """With dynamic sampling, groups whose rewards are all equal are dropped: they have no gradient."""
        equal = bool(rewards.min() == rewards.max())
        std = 0.0 if equal else float(rewards.std(ddof=1))
        return {"group_std": std}, "equal_rewards" if equal else ""

    # -- advantages ----------------------------------------------------------------------------------------

    def advantages(self, batch: ScoredBatch) -> Floats:
        """One advantage a row [rows], the same at each of its tokens."""
        raise NotImplementedError

    def token_advantages(self, batch: ScoredBatch, kl: Sequence[Floats]) -> list[Floats]:
        """Advantages per row [tokens]. `kl` is what is taken off each token's reward, 0 at tokens without any.

        Here the KL of the whole response is taken off the row's reward, which is then compared with others.
        """
        rewards = batch.rewards - np.array([float(row.sum()) for row in kl])
        return batch.whole(self.advantages(replace(batch, rewards=rewards)))

    def estimate(self, batch: ScoredBatch) -> Estimates:
        """See `Algorithm.estimate`."""
        coefficient, state, metrics = self._kl_coefficient(batch)
        scored = replace(batch, rewards=batch.rewards - self._overlong(batch))
        advantages = self.token_advantages(scored, self._kl_of_rewards(scored, coefficient))
        return Estimates(self._finished(advantages, batch), state=state, metrics=metrics)

    def _finished(self, advantages: list[Floats], batch: ScoredBatch) -> list[Floats]:
        return whitened(advantages, batch.masks) if self._block.whiten else advantages

    def _overlong(self, batch: ScoredBatch) -> Floats:
        """DAPO's penalty of long responses (eq. 13) [rows]: from 0 up to 1 over the last `overlong_tokens`."""
        span = self._block.overlong_tokens
        lengths = np.array([len(mask) for mask in batch.masks], dtype=np.float64)
        if span == 0:
            return np.zeros_like(lengths)
        return np.clip((lengths - (self._max_response_tokens - span)) / span, 0.0, 1.0)

    def _to_reference(self, batch: ScoredBatch) -> list[Floats]:
        """`log rollout policy - log reference` per row [tokens], 0 where a token does not count."""
        columns = zip(batch.masks, batch.columns["rollout_logprobs"], batch.columns["ref_logprobs"], strict=True)
        return [np.where(mask, own - reference, 0.0) for mask, own, reference in columns]

    def _kl_coefficient(self, batch: ScoredBatch) -> tuple[float, dict[str, float], dict[str, float]]:
        """This step's coefficient of the KL, the state that the next one comes from, and figures."""
        block = self._block
        coefficient = batch.state.get("next_kl_coef", block.kl_coef)
        if not self.needs_reference or (block.kl_target is None and block.kl_in == "loss"):
            return coefficient, {}, {}
        tokens = max(1, int(batch.lengths.sum()))
        kl = sum(float(kl_of_row(row, block.kl_estimator).sum()) for row in self._to_reference(batch)) / tokens
        if block.kl_target is None:
            return coefficient, {}, {"ref_kl": kl}
        following = next_coefficient(
            coefficient, measured=kl, target=block.kl_target, samples=len(batch.masks), horizon=block.kl_horizon
        )
        return (
            coefficient,
            {"kl_coef": coefficient, "next_kl_coef": following},
            {"ref_kl": kl, "kl_coef": coefficient},
        )

    def _kl_of_rewards(self, batch: ScoredBatch, coefficient: float) -> list[Floats]:
        """What the KL takes off each token's reward, per row [tokens]."""
        if not self.needs_reference or self._block.kl_in != "reward":
            return [np.zeros(len(mask)) for mask in batch.masks]
        return [coefficient * kl_of_row(row, self._block.kl_estimator) for row in self._to_reference(batch)]

    # -- the loss ------------------------------------------------------------------------------------------

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
        """`surrogate(ratio, A) · importance - entropy_coef · H + kl_coef · KL`, summed over counted tokens.

        `ratio = exp(logprobs - old)`, with `old` the rollout's log-probs if the recipe says so, else the
        column `old_logprobs`, else the policy's own, detached: then the ratio is 1 and the gradient that of
        the policy gradient theorem. The exponents are clamped to ±LOG_RATIO_LIMIT.

        Metric sums over counted tokens: `tokens, loss, ratio, ratio_max, clip_low, clip_high, entropy`,
        `importance` (the weight), the KL from rollout to policy as `kl_k1, kl_k3` and the absolute difference
        of their log-probs as `logprob_mismatch` (and `_max`, `_kl`) where the column is there, and `ref_kl`.
        """
        import torch

        from rlmq.common.engines.training import LossTerms

        mask = batch.response_mask > 0
        new = torch.where(mask, output.logprobs, 0.0)
        old = torch.where(mask, self._old(output, batch), 0.0)
        advantages = torch.where(mask, batch.columns["advantages"], 0.0)
        log_ratio = of_sequence(new - old, mask) if self._block.ratio == "sequence" else new - old
        ratio = safe_exp(log_ratio)
        low, high = self._bounds
        per_token = self._surrogate(ratio, new, advantages)
        entropy = torch.where(mask, output.entropy, 0.0)
        sums = {
            "ratio": (ratio * mask).sum(),
            "ratio_max": (ratio * mask).max() if mask.numel() else ratio.new_zeros(()),
            "clip_low": (mask & (ratio < low) & (advantages < 0)).sum(),
            "clip_high": (mask & (ratio > high) & (advantages > 0)).sum(),
            "entropy": entropy.sum(),
        }
        if self._block.importance != "none":
            log_weight = old - torch.where(mask, batch.columns["rollout_logprobs"], 0.0)
            weight = importance_weight(log_weight, self._block.importance, self._block.importance_cap)
            per_token, sums["importance"] = per_token * weight, (weight * mask).sum()
        if self._block.entropy_coef > 0:
            per_token = per_token - self._block.entropy_coef * entropy
        if self.needs_reference and self._block.kl_in == "loss":
            to_reference = new - torch.where(mask, batch.columns["ref_logprobs"], 0.0)
            kl = kl_of_tokens(to_reference, self._block.kl_estimator)
            per_token = per_token + state.get("kl_coef", self._block.kl_coef) * kl
            sums["ref_kl"] = kl.sum()
        if "rollout_logprobs" in batch.columns:
            off = torch.where(mask, batch.columns["rollout_logprobs"], 0.0) - new.detach()
            sums["kl_k1"], sums["kl_k3"] = off.sum(), kl_of_tokens(off, "k3").sum()
            sums["logprob_mismatch"], sums["logprob_mismatch_kl"] = off.abs().sum(), sums["kl_k3"]
            sums["logprob_mismatch_max"] = off.abs().max() if off.numel() else off.new_zeros(())
        loss_sum = self.aggregate(torch.where(mask, per_token, 0.0), mask)
        sums["tokens"], sums["loss"] = mask.sum(), loss_sum
        return LossTerms(loss_sum, {name: value.detach() for name, value in sums.items()})

    def _surrogate(self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        return clipped_surrogate(ratio, advantages, self._bounds)

    @property
    def _bounds(self) -> tuple[float, float]:
        return 1.0 - self._block.clip[0], 1.0 + self._block.clip[1]

    def _old(self, output: PolicyOutput, batch: MicroBatch) -> torch.Tensor:
        if self._block.old_logprobs == "rollout":
            return batch.columns["rollout_logprobs"]
        return batch.columns.get("old_logprobs", output.logprobs.detach())

    def aggregate(self, per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
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
