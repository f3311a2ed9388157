"""An engine as a third party would write one: no cache, one row at a time, transformers and the protocol only.

Named in a recipe as `plain_engine.py:PlainEngine`, or by the entry point that the tests register.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM

from rlmq.common.dtypes import manifest_of
from rlmq.common.engines.generation import EngineSettings, EngineState, Generated, Request
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.recipe.block import Block
from rlmq.common.weights import WeightManifest


class PlainEngine:
    """One token of every request per step; a request's random numbers are a generator of its own."""

    class Options(Block):
        """One option, to show how."""

        slowly: bool = Field(default=False, description="Nothing.")

    deterministic = True

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
        self._rows: dict[str, tuple[Request, torch.Generator, Generated]] = {}
        self._coming: dict[str, torch.Tensor] | None = None
        self._coming_version = -1
        self._version = -1

    @property
    def state(self) -> EngineState:
        if self._coming is not None:
            return "loading"
        return "serving" if self._version >= 0 else "empty"

    @property
    def version(self) -> int:
        return self._version

    @property
    def pending(self) -> int:
        return len(self._rows)

    def layout(self) -> WeightManifest:
        return manifest_of(self._model.state_dict().items())

    def serve(self, version: int) -> None:
        self._version = version

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            asked = len(request.prompt_ids) + request.sampling.max_tokens
            if not request.prompt_ids or request.sampling.max_tokens < 1:
                raise UsageError(f"sample {request.id}", got="nothing", expected="at least one of each")
            if asked > self._settings.max_tokens:
                raise UsageError(f"sample {request.id}", got=f"{asked} tokens", expected="at most the context")
            if request.id in self._rows:
                raise IntegrityError(f"sample {request.id}", got="a second request", expected="one request per id")
        for request in requests:
            word = hashlib.sha256(f"{request.seed} {request.id}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(word[:7], "little"))
            self._rows[request.id] = (request, generator, Generated(request.id, [], [], [], True))

    @torch.no_grad()
    def step(self) -> list[Generated]:
        if self._version < 0:
            raise IntegrityError("engine", got="a step in state empty", expected="a committed policy version")
        finished = []
        for request, generator, row in list(self._rows.values()):
            ids = torch.tensor([[*request.prompt_ids, *row.token_ids]])
            sampling = request.sampling
            logits = self._model(input_ids=ids).logits[0, -1].double() / (sampling.temperature or 1.0)
            logprobs = logits.log_softmax(-1)
            greedy = sampling.temperature == 0
            token = int(logits.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator))
            row.token_ids.append(token)
            row.logprobs.append(float(logprobs[token]))
            row.policy_versions.append(self._version)
            text = self._settings.decode(row.token_ids)
            stopped = token in (*self._settings.eos_ids, *sampling.stop_ids) or any(
                s in text for s in sampling.stop
            )
            if stopped or len(row.token_ids) == sampling.max_tokens:
                finished.append(Generated(row.id, row.token_ids, row.logprobs, row.policy_versions, not stopped))
                del self._rows[row.id]
        return finished

    def abort(self, ids: Sequence[str]) -> list[Generated]:
        return [self._rows.pop(name)[2] for name in ids if name in self._rows]

    def begin_load(self, manifest: WeightManifest, version: int) -> None:
        ours = {spec.name: spec for spec in self.layout().tensors}
        for spec in manifest.tensors:
            if ours.pop(spec.name, None) != spec:
                raise IntegrityError(f"weight {spec.name}", got=str(spec), expected="this model's")
        if ours:
            raise IntegrityError(f"weight {min(ours)}", got="no such tensor", expected="every one")
        self._coming, self._coming_version = {}, version

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if self._coming is None:
            raise IntegrityError(f"weight {name}", got="no load", expected="begin_load before it")
        self._coming[name] = tensor.clone()

    def commit(self) -> None:
        if self._coming is None or len(self._coming) < len(self.layout().tensors):
            raise IntegrityError("weight commit", got="not all tensors", expected="all of them")
        self._model.load_state_dict(self._coming)
        self._version, self._coming = self._coming_version, None

    def abandon(self) -> None:
        self._coming = None

    def release_memory(self) -> None:
        pass

    def acquire_memory(self) -> None:
        pass

    def close(self) -> None:
        pass
