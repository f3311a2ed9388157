"""Weights that arrive tensor by tensor beside the served ones, and replace them all at once."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rlmq.common.dtypes import manifest_of, spec_of
from rlmq.common.errors import IntegrityError
from rlmq.common.weights import TensorSpec, WeightManifest


class StagedWeights:
    """Two sets of storages for one model: those that serve, and those that receive the next version.

    A commit exchanges them without copying; the set that served before receives the version after.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layout = manifest_of(model.state_dict().items())
        self._specs = {spec.name: spec for spec in self.layout.tensors}
        named = {**dict(model.named_parameters(remove_duplicate=False))}
        named.update(model.named_buffers(remove_duplicate=False))
        self._targets = {name: named[name] for name in self._specs}
        # Aliases are the same object, or views of the same memory: the first name owns it.
        owners: dict[int, str] = {}
        self._owner = {name: owners.setdefault(target.data_ptr(), name) for name, target in self._targets.items()}
        self._spares: dict[str, torch.Tensor] = {}
        self._version: int | None = None
        self._arrived: set[str] = set()

    @property
    def loading(self) -> bool:
        """Whether a load has begun and not ended."""
        return self._version is not None

    def begin(self, manifest: WeightManifest, version: int) -> None:
        """Check the manifest and start; a load that was on its way is dropped."""
        self._check(manifest)
        self.abandon()
        self._version = version

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor into its spare storage."""
        spec = self._specs.get(name)
        if self._version is None or spec is None:
            raise IntegrityError(f"weight {name}", got="no load that expects it", expected="begin_load before it")
        found = spec_of(name, tensor)
        if found != spec:
            raise IntegrityError(f"weight {name}", got=_describe(found), expected=_describe(spec))
        owner = self._owner[name]
        twins = [other for other, its_owner in self._owner.items() if its_owner == owner and other != name]
        if self._arrived.intersection(twins):
            if not torch.equal(self._spares[owner], tensor.to(self._spares[owner].device)):
                raise IntegrityError(
                    f"weight {name}", got=f"values that differ from {owner}", expected="equal ones: they are tied"
                )
        else:
            if owner not in self._spares:
                self._spares[owner] = torch.empty_like(self._targets[owner].data)
            self._spares[owner].copy_(tensor)
        self._arrived.add(name)

    def check_complete(self) -> int:
        """The version to commit; raises IntegrityError when tensors are missing or no load has begun."""
        missing = [name for name in self._specs if name not in self._arrived]
        if self._version is None or missing:
            raise IntegrityError(
                "weight commit",
                got=f"{len(self._arrived)} of {len(self._specs)} tensors (no {missing[0] if missing else 'load'})",
                expected="all of them",
                remedy="Send the weights again",
            )
        return self._version

    def swap(self) -> None:
        """Exchange served and received storages."""
        for name, owner in self._owner.items():
            if name == owner:
                served = self._targets[owner].data
                self._targets[owner].data = self._spares[owner]
                self._spares[owner] = served
        for name, owner in self._owner.items():
            if self._targets[name] is not self._targets[owner]:
                self._targets[name].data = self._targets[owner].data
        self.abandon()

    def abandon(self) -> None:
        """Forget what has arrived."""
        self._version = None
        self._arrived = set()

    def release_spares(self) -> None:
        """Free the storages that receive, unless a load is on its way."""
        if not self.loading:
            self._spares = {}

    def _check(self, manifest: WeightManifest) -> None:
        theirs = {spec.name: spec for spec in manifest.tensors}
        for name in [*self._specs, *theirs]:
            ours, other = self._specs.get(name), theirs.get(name)
            if ours != other:
                raise IntegrityError(
                    f"weight {name}",
                    got=_describe(other) if other else "no such tensor from the trainer",
                    expected=_describe(ours) if ours else "no such tensor in this model",
                    remedy="Start trainer and rollout with the same model and dtype",
                )


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
