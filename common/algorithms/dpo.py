"""Direct preference optimisation: of two responses to a prompt, the chosen one shall gain on the rejected one.

Source: arXiv 2305.18290, eq. 7; with label smoothing from E. Mitchell, "A note on DPO with noisy preferences"
(https://ericmitchell.ai/cdpo.pdf, eq. 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlmq.common.algorithms.algorithm import Spec
from rlmq.common.algorithms.offline import Pairwise, split_pairs

if TYPE_CHECKING:
    from rlmq.common.engines.training import LossTerms, MicroBatch, PolicyOutput


class Dpo(Pairwise):
    """DPO."""

    @property
    def needs_reference(self) -> bool:
        """Whose log-probs the policy's are compared with."""
        return True

    def loss(self, output: PolicyOutput, batch: MicroBatch, state: Mapping[str, float]) -> LossTerms:
        """`-(1 - s) log sigmoid(m) - s log sigmoid(-m)` summed over pairs, with `s` the label smoothing.

        `m = beta (gain of the chosen response - gain of the rejected one)`; a gain is the sum of
        `logprobs - ref_logprobs` over counted tokens.

        Metric sums over pairs: `loss, margin` (m), `accuracy` (m > 0; a half where it is 0), and
        `chosen_gain, rejected_gain`.
        """
        import torch
        from torch.nn.functional import logsigmoid

        from rlmq.common.engines.training import LossTerms

        mask = batch.response_mask > 0
        gains = torch.where(mask, output.logprobs - batch.columns["ref_logprobs"], 0.0).sum(dim=1)
        chosen, rejected = split_pairs(batch, gains)
        margin = self._block.beta * (chosen - rejected)
        smoothing = self._block.label_smoothing
        loss_sum = -((1.0 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)).sum()
        sums = {
            "tokens": mask.sum(),
            "pairs": mask.new_tensor(len(margin), dtype=torch.int64),
            "loss": loss_sum.detach(),
            "margin_per_pair": margin.detach().sum(),
            "accuracy_per_pair": ((margin.detach().sign() + 1.0) / 2.0).sum(),
            "chosen_gain_per_pair": chosen.detach().sum(),
            "rejected_gain_per_pair": rejected.detach().sum(),
        }
        return LossTerms(loss_sum, sums)


SPEC = Spec(
    "Direct preference optimisation: chosen responses gain on rejected ones, measured from a reference.",
    Dpo,
    preset={"group_size": 2},
    keys=frozenset({"beta", "label_smoothing"}),
    online=False,
)
