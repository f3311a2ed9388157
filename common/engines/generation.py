"""The generation engine: step-wise, so that pausing is not stepping and loading happens between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from rlmq.common.weights import WeightManifest

EngineState = Literal["empty", "serving", "loading", "torn"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy. Log-probs are of the distribution after temperature,
    before `top_k` / `top_p` cut it. A response ends with the token that is in `stop_ids`, or that completes one
    of the texts `stop`; it is part of the response."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is made from.

    Args:
        model: folder of a Hugging Face model: its configuration, tokenizer and first weights.
        dtype: of compute and of the weights that will come.
        max_batch: most samples generated side by side.
        max_tokens: longest sequence, prompt and response together.
        eos_ids: end every response.
        pad_id: any token id, to fill rectangles with.
        decode: token ids to text, special tokens included: for stop texts.
        sampling: what most requests will ask for.
        deterministic: whether a chunk's result must not depend on what else is generated.
        options: the engine's own (its `Options` block), as the recipe has them.
        folder: the recipe's, for files that the options name.
    """

    model: str
    dtype: Literal["float32", "bfloat16"]
    max_batch: int
    max_tokens: int
    eos_ids: tuple[int, ...]
    pad_id: int
    decode: Callable[[Sequence[int]], str]
    sampling: Sampling = field(default_factory=Sampling)
    deterministic: bool = False
    options: Any = None
    folder: Path = Path()


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate. `seed` and `id` alone (with the token index) decide its random numbers."""

    id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished (or aborted) response: `token_ids`, `logprobs`, `policy_versions` have one entry per token."""

    id: str
    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    truncated: bool


class GenerationEngine(Protocol):
    """Generates samples with weights of one policy version at a time."""

    @property
    def state(self) -> EngineState:
        """`empty` before the first commit; `torn` after a load that failed half-way."""

    @property
    def version(self) -> int:
        """Policy version served, -1 when none."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises UsageError when a prompt plus its limit exceeds the model's context."""

    def step(self) -> list[Generated]:
        """Advance by one unit of work; returns what finished. An idle engine returns []."""

    def abort(self, ids: Sequence[str]) -> list[Generated]:
        """Take requests out; returns their partial responses."""

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned."""

    def serve(self, version: int) -> None:
        """Serve the weights that the engine was built with as this version."""

    def begin_load(self, manifest: WeightManifest, version: int) -> None:
        """Start to receive weights; the old ones still serve. Refuses a manifest of another model."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Receive one whole tensor of the manifest."""

    def commit(self) -> None:
        """Serve the loaded version and clear every cache of the old one."""

    def abandon(self) -> None:
        """Drop a load that cannot be completed; the old version goes on if it is whole."""

    def release_memory(self) -> None:
        """Free what can be freed while training runs on the same device."""

    def acquire_memory(self) -> None:
        """Undo `release_memory`."""

    def layout(self) -> WeightManifest:
        """Names, shapes and dtypes of the tensors that `load` expects."""

    def close(self) -> None:
        """End what the engine has outside of this process: connections, processes of its own."""


@runtime_checkable
class PlainMemory(Protocol):
    """What an engine has besides that keeps its weights as plain tensors; without it a load takes a copy more, and
    all weights move at every sync."""

    def room(self, name: str) -> torch.Tensor | None:
        """Memory into which a tensor may be written before `load` takes it."""

    def served(self, name: str) -> torch.Tensor | None:
        """What is served under a name now; None when nothing is."""
