"""Reward modelling: a score for whole responses, learned from pairs (Bradley and Terry).

Source: InstructGPT (arXiv 2203.02155, eq. 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlmq.common.algorithms.algorithm import Spec
from rlmq.common.algorithms.offline import Pairwise, split_pairs
from rlmq.common.errors import UsageError

if TYPE_CHECKING:
    from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput


class RewardModel(Pairwise):
    """A reward model."""

    scorer = True

    def loss(self, output: PolicyOutput, batch: MicroBatch, state: Mapping[str, float]) -> LossTerms:
        """`-log sigmoid(chosen score - rejected score)` summed over pairs.

        Metric sums over pairs: `loss, margin` (the difference), `accuracy` (it is positive; a half where it is 0),
        and `chosen_score, rejected_score`.
        """
        import torch
        from torch.nn.functional import logsigmoid

        from rlmq.common.engines.training import LossTerms

        if output.scores is None:
            raise UsageError("reward_model", got="the output of a language model", expected="one of a scorer")
        chosen, rejected = split_pairs(batch, output.scores)
        margin = chosen - rejected
        loss_sum = -logsigmoid(margin).sum()
        sums = {
            "tokens": (batch.response_mask > 0).sum(),
            "pairs": torch.tensor(len(margin)),
            "loss": loss_sum.detach(),
            "margin_per_pair": margin.detach().sum(),
            "accuracy_per_pair": ((margin.detach().sign() + 1.0) / 2.0).sum(),
            "chosen_score_per_pair": chosen.detach().sum(),
            "rejected_score_per_pair": rejected.detach().sum(),
        }
        return LossTerms(loss_sum, sums)


SPEC = Spec(
    "Reward modelling: a model learns to score chosen responses above rejected ones (Bradley-Terry).",
    RewardModel,
    preset={"group_size": 2},
    online=False,
)
