"""The training engine of a critic: a language model whose head gives values instead of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlmq.common.engines.shared_prompts import places_of
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import LossTerms, MicroBatch
from rlmq.common.errors import IntegrityError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlmq.common.recipe.schema import TrainBlock

ValueLoss = Callable[[Mapping[str, torch.Tensor], MicroBatch], LossTerms]


class ValueEngine(TorchEngine):
    """A critic: one value per response token and head, read where the token is predicted.

    The new head begins at zero, so that a run needs no random numbers for it and the first values are 0.

    Args:
        heads: names of what it gives.
    """

    def __init__(
        self, model: nn.Module, block: TrainBlock, heads: Sequence[str], *, group: ProcessGroup | None = None
    ) -> None:
        _put_head(model, len(heads))
        super().__init__(model, block, group=group)
        self._heads = tuple(heads)

    def values(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Values [rows, R] by head, zero where padded; without gradient."""
        with torch.no_grad():
            return self._values(batch)

    def accumulate_values(self, batch: MicroBatch, loss: ValueLoss) -> dict[str, float]:
        """As `accumulate`, for a loss of the values."""
        return self._backward(loss(self._values(batch), batch))

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take the weights of a checkpoint, which has no tied ones twice.

        Raises:
            IntegrityError: they are those of another model or of other heads.
        """
        own = dict(self.model.named_parameters())
        differing = [n for n, w in own.items() if n not in weights or weights[n].shape != w.shape]
        if differing:
            raise IntegrityError(
                "weights of the critic",
                got=f"none that fit {differing[0]}",
                expected="those of this model and heads",
            )
        for name, weight in own.items():
            weight.copy_(weights[name])

    def _values(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        real = batch.attention_mask[:, batch.input_ids.shape[1] - batch.response_length :].bool()
        nothing = torch.zeros(real.shape, device=real.device)
        if not bool(real.any()):
            return dict.fromkeys(self._heads, nothing)
        places = places_of(batch, self._sharing)
        found = self._logits(places).flatten(0, 1)[places.source].float()
        return {head: nothing.masked_scatter(real, found[:, place]) for place, head in enumerate(self._heads)}


def _put_head(model: Any, heads: int) -> None:
    """The embedding keeps its weights, and is tied to nothing any more; caps of logits are no caps of values."""
    head = nn.Linear(model.get_input_embeddings().weight.shape[1], heads, bias=False)
    nn.init.zeros_(head.weight)
    model.config.tie_word_embeddings = False
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        model.config.final_logit_softcapping = None
    model.set_output_embeddings(head)
