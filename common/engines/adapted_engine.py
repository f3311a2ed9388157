"""A generation engine that is sent adapters and serves their sum with the base, whatever engine is inside.

The base is read from the model's folder again at each version, tensor by tensor: nothing of it is held twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlmq.common.dtypes import DTYPES, manifest_of
from rlmq.common.engines.adapters import Adapters, short, with_product
from rlmq.common.engines.generation import EngineState, Generated, GenerationEngine, Request
from rlmq.common.engines.shard_files import read_boxes
from rlmq.common.errors import IntegrityError
from rlmq.common.layouts.layout import Box
from rlmq.common.weights import WeightManifest

if TYPE_CHECKING:
    from rlmq.common.recipe.lora_block import LoraBlock


class AdaptedEngine:
    """See `GenerationEngine`; what it loads are the adapters of `LoraBlock`, as `TorchEngine.part` tells them.

    Args:
        inner: serves whole weights of `folder`'s model.
    """

    def __init__(self, inner: GenerationEngine, folder: str, block: LoraBlock) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._inner, self._folder = inner, Path(folder)
        with torch.device("meta"):  # shapes and names alone
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
        adapters = Adapters(model, block, 0)
        dtype = DTYPES[inner.layout().tensors[0].dtype]
        own = ((short(name), weight.to(dtype)) for name, weight in model.state_dict().items() if ".lora_" in name)
        self._manifest = manifest_of(own)
        self._scales = adapters.scales()
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self._tied = {
            f"{name}.weight": f"{other}.weight"
            for name, module in model.named_modules()
            for other, first in model.named_modules()
            if module is head and first is embedding and model.config.tie_word_embeddings
        }
        self._coming: dict[str, torch.Tensor] = {}
        self._version = -1

    @property
    def state(self) -> EngineState:
        """The inner engine's: it serves until the sum is loaded."""
        return self._inner.state

    @property
    def version(self) -> int:
        """See `GenerationEngine`, as all below."""
        return self._inner.version

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned."""
        return self._inner.pending

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._inner.submit(requests)

    def step(self) -> list[Generated]:
        """Advance by one unit of work."""
        return self._inner.step()

    def abort(self, ids: Sequence[str]) -> list[Generated]:
        """Take requests out."""
        return self._inner.abort(ids)

    def serve(self, version: int) -> None:
        """Serve the base as this version."""
        self._inner.serve(version)

    def layout(self) -> WeightManifest:
        """The adapters."""
        return self._manifest

    def begin_load(self, manifest: WeightManifest, version: int) -> None:
        """Start to receive adapters. Raises IntegrityError: of another model or rank."""
        if manifest != self._manifest:
            raise IntegrityError("adapters", got="others", expected="those of train.lora on this model")
        self._coming, self._version = {}, version

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Receive one adapter."""
        self._coming[name] = tensor.clone()

    def commit(self) -> None:
        """Serve the sum. Raises IntegrityError: an adapter has not come."""
        if self._coming.keys() != {spec.name for spec in self._manifest.tensors}:
            raise IntegrityError("adapters", got=f"{len(self._coming)}", expected=f"{len(self._manifest.tensors)}")
        self._inner.begin_load(self._inner.layout(), self._version)
        for name, tensor in self._sum():
            self._inner.load(name, tensor)
        self._inner.commit()
        self._coming = {}

    def _sum(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the inner engine loads, in the order of the files; a tied name comes right after its tensor."""
        specs = {spec.name: spec for spec in self._inner.layout().tensors}
        twins = {self._tied[name]: name for name in specs if name in self._tied}
        boxes = {name: Box.whole(spec.shape) for name, spec in specs.items() if name not in self._tied}
        for name, stored in read_boxes(self._folder, boxes):
            weight = stored.to(DTYPES[specs[name].dtype])
            layer = name.removesuffix(".weight")
            if layer in self._scales:
                weight = with_product(weight, self._coming, layer, self._scales[layer])
            yield name, weight
            if name in twins:
                yield twins[name], weight

    def abandon(self) -> None:
        """Drop what has come."""
        self._coming = {}
        if self._inner.state in ("loading", "torn"):
            self._inner.abandon()

    def release_memory(self) -> None:
        """Free what can be freed while training runs on the same device."""
        self._inner.release_memory()

    def acquire_memory(self) -> None:
        """Undo `release_memory`."""
        self._inner.acquire_memory()

    def close(self) -> None:
        """End what the engine has outside of this process."""
        self._inner.close()
