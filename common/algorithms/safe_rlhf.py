"""Safe RLHF: PPO for the reward under a limit of the mean cost, whose weight is learned online (PPO-Lagrangian).

Source: arXiv 2310.12773, section 3.3 and appendix B.3.
"""

from __future__ import annotations

import math

import numpy as np

from rlmq.common.algorithms.algorithm import Estimates, Floats, ScoredBatch, Spec
from rlmq.common.algorithms.ppo import PPO_KEYS, Ppo

# e^10 = 22026: the cost alone counts long before; a multiplier further off would never come back.
MOST_LOG_MULTIPLIER = 10.0
# The step grows with the multiplier itself: without a bound it goes from 10 to the greatest at once, and then to
# the least, from where it hardly moves.
MOST_LOG_STEP = 1.0


class SafeRlhf(Ppo):
    """Safe RLHF."""

    critics = ("values", "cost_values")

    @property
    def needs(self) -> tuple[str, ...]:
        """PPO's, and the cost of each row."""
        return (*super().needs, "cost")

    def estimate(self, batch: ScoredBatch) -> Estimates:
        """`A = (A of reward - m · A of cost) / (1 + m)`.

        The multiplier goes first: `log m += multiplier_lr · m · (mean cost - cost_limit)`, cut to ±MOST_LOG_STEP,
        from the batch's costs.
        Half of the KL is taken off the rewards, the other half counts as a cost.
        """
        coefficient, state, metrics = self._kl_coefficient(batch)
        costs = np.array(batch.columns["cost"], dtype=np.float64)
        log_multiplier = self._log_multiplier(batch.state.get("log_multiplier"), costs)
        multiplier = math.exp(log_multiplier)
        half = [row / 2.0 for row in self._kl_of_rewards(batch, coefficient)]
        gains, returns = self._gae(batch, batch.rewards - self._overlong(batch), half, "values")
        harms, cost_returns = self._gae(batch, costs, [-row for row in half], "cost_values")
        both = [(gain - multiplier * harm) / (1.0 + multiplier) for gain, harm in zip(gains, harms, strict=True)]
        return Estimates(
            self._finished(both, batch),
            {"values": returns, "cost_values": cost_returns},
            {**state, "log_multiplier": log_multiplier},
            {**metrics, "multiplier": multiplier, "cost_mean": float(costs.mean()) if len(costs) else 0.0},
        )

    def _log_multiplier(self, before: float | None, costs: Floats) -> float:
        block = self._block
        log_multiplier = math.log(block.multiplier) if before is None else before
        if len(costs):
            excess = float(costs.mean()) - block.cost_limit
            move = block.multiplier_lr * math.exp(log_multiplier) * excess
            log_multiplier += min(max(move, -MOST_LOG_STEP), MOST_LOG_STEP)
        return min(max(log_multiplier, -MOST_LOG_MULTIPLIER), MOST_LOG_MULTIPLIER)


SPEC = Spec(
    "Safe RLHF: PPO under a limit of the mean cost, whose weight is learned online (PPO-Lagrangian).",
    SafeRlhf,
    preset={"group_size": 1, "whiten": True, "lam": 0.95, "kl_in": "reward", "kl_estimator": "k1"},
    keys=PPO_KEYS | {"cost_limit", "multiplier", "multiplier_lr"},
)
