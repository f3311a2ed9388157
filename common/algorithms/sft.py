"""Supervised fine-tuning: the cross entropy of the data's responses.

`loss = - sum of log p(token) / number of tokens`, over the response tokens of all rows of the optimizer step: the
prompt does not count, the end of text does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlmq.common.algorithms.algorithm import Spec
from rlmq.common.algorithms.offline import Offline

if TYPE_CHECKING:
    from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput


class Sft(Offline):
    """SFT."""

    def loss(self, output: PolicyOutput, batch: MicroBatch, state: Mapping[str, float]) -> LossTerms:
        """`-logprobs` summed over counted tokens, each row's mean by itself where `loss_agg` says so.

        Metric sums over counted tokens: `tokens, loss, entropy`.
        """
        import torch

        from rlmq.common.engines.training import LossTerms

        mask = batch.response_mask > 0
        loss_sum = self.aggregate(torch.where(mask, -output.logprobs, 0.0), mask)
        entropy = torch.where(mask, output.entropy.detach(), 0.0).sum()
        return LossTerms(loss_sum, {"tokens": mask.sum(), "loss": loss_sum.detach(), "entropy": entropy})


SPEC = Spec(
    "Supervised fine-tuning: the responses of the data are what the model shall write.",
    Sft,
    preset={"group_size": 1},
    keys=frozenset({"loss_agg"}),
    online=False,
)
