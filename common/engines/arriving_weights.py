"""Weights of the next version as they arrive, tensor by tensor, before anybody serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rlmq.common.dtypes import DTYPES, manifest_of, spec_of
from rlmq.common.errors import IntegrityError
from rlmq.common.weights import TensorSpec, WeightManifest


class ArrivingWeights:
    """One load at a time: `begin` with the sender's manifest, `load` every tensor, `check_complete`.

    Args:
        layout: names (tied aliases included), shapes and dtypes of the model.
        owner: of each name, the first name of the same tensor; only owners are kept.
        room: where an owner's tensor is kept; by default memory of the CPU.
    """

    def __init__(
        self,
        layout: WeightManifest,
        owner: Mapping[str, str],
        room: Callable[[TensorSpec], torch.Tensor] | None = None,
    ) -> None:
        self.layout = layout
        self.version: int | None = None
        self._specs = {spec.name: spec for spec in layout.tensors}
        self._owner = owner
        self._room = room or (lambda spec: torch.empty(spec.shape, dtype=DTYPES[spec.dtype]))
        self._held: dict[str, torch.Tensor] = {}
        self._arrived: set[str] = set()
        self._owners_arrived: set[str] = set()

    @property
    def loading(self) -> bool:
        """Whether a load has begun and not ended."""
        return self.version is not None

    def begin(self, manifest: WeightManifest, version: int) -> None:
        """Check the manifest and start; a load that was on its way is dropped."""
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
        self.abandon()
        self.version = version

    def room(self, name: str) -> torch.Tensor | None:
        """Where a tensor will be kept, to be written before `load` takes it; None where an alias has it already."""
        owner = self._owner[name]
        if owner in self._owners_arrived:
            return None
        if owner not in self._held:
            self._held[owner] = self._room(self._specs[owner])
        return self._held[owner]

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor."""
        spec = self._specs.get(name)
        if self.version is None or spec is None:
            raise IntegrityError(f"weight {name}", got="no load that expects it", expected="begin_load before it")
        found = spec_of(name, tensor)
        if found != spec:
            raise IntegrityError(f"weight {name}", got=_describe(found), expected=_describe(spec))
        owner = self._owner[name]
        if owner in self._owners_arrived and name not in self._arrived:
            held = self._held[owner]
            if tensor.data_ptr() != held.data_ptr() and not torch.equal(held, tensor.to(held.device)):
                raise IntegrityError(
                    f"weight {name}", got=f"values that differ from {owner}", expected="equal ones: they are tied"
                )
        else:
            if owner not in self._held:
                self._held[owner] = self._room(self._specs[owner])
            self._held[owner].copy_(tensor)
        self._arrived.add(name)
        self._owners_arrived.add(owner)

    def check_complete(self) -> int:
        """The version to commit; raises IntegrityError when tensors are missing or no load has begun."""
        missing = [name for name in self._specs if name not in self._arrived]
        if self.version is None or missing:
            raise IntegrityError(
                "weight commit",
                got=f"{len(self._arrived)} of {len(self._specs)} tensors (no {missing[0] if missing else 'load'})",
                expected="all of them",
                remedy="Send the weights again",
            )
        return self.version

    def named(self) -> dict[str, torch.Tensor]:
        """Every tensor by every name, aliases included: only the whole of it reaches packed copies of tied ones."""
        return {name: self._held[owner] for name, owner in self._owner.items()}

    def abandon(self) -> None:
        """Forget what has arrived."""
        self.version = None
        self._arrived, self._owners_arrived = set(), set()

    def release(self) -> None:
        """Free the memory, unless a load is on its way."""
        if not self.loading:
            self._held = {}


def of_folder(folder: str, dtype: torch.dtype) -> ArrivingWeights:
    """For an engine with weights of its own form: the layout is that of transformers' model in this folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    named = {**dict(model.named_parameters(remove_duplicate=False))}
    named.update(model.named_buffers(remove_duplicate=False))
    layout = manifest_of(model.state_dict().items())
    owners: dict[int, str] = {}
    owner = {spec.name: owners.setdefault(id(named[spec.name]), spec.name) for spec in layout.tensors}
    return ArrivingWeights(layout, owner)


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
