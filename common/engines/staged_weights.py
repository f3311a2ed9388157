"""Weights that arrive tensor by tensor beside the served ones, and replace them all at once."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rlmq.common.dtypes import manifest_of
from rlmq.common.engines.arriving_weights import ArrivingWeights


class StagedWeights(ArrivingWeights):
    """Two sets of storages for one model: those that serve, and those that receive the next version.

    A commit exchanges them without copying; the set that served before receives the version after.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        layout = manifest_of(model.state_dict().items())
        named = {**dict(model.named_parameters(remove_duplicate=False))}
        named.update(model.named_buffers(remove_duplicate=False))
        self._targets = {spec.name: named[spec.name] for spec in layout.tensors}
        # Aliases are the same object, or views of the same memory: the first name owns it.
        owners: dict[int, str] = {}
        owner = {name: owners.setdefault(target.data_ptr(), name) for name, target in self._targets.items()}
        super().__init__(layout, owner, lambda spec: torch.empty_like(self._targets[spec.name].data))

    def target(self, name: str) -> torch.Tensor:
        """What serves under a name."""
        found: torch.Tensor = self._targets[name].data
        return found

    def swap(self) -> None:
        """Exchange served and received storages."""
        for name, owner in self._owner.items():
            if name == owner:
                served = self._targets[owner].data
                self._targets[owner].data = self._held[owner]
                self._held[owner] = served
        for name, owner in self._owner.items():
            if self._targets[name] is not self._targets[owner]:
                self._targets[name].data = self._targets[owner].data
        self.abandon()
