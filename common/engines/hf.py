"""The `hf` generation engine: transformers' forward pass under a decoding loop of our own.

::

    fixed chunks (deterministic)  submit ──► queue of batches ──► one batch, to its end ──► the next
    continuous                    submit ──► queue of requests ──► slots, refilled as responses end

A fixed batch never holds requests of two `submit` calls: what a request yields depends on its chunk, not on what
else happens to be in the queue. In continuous mode the last bits do. Sampling draws one number per token in both,
keyed by (seed, sample id, token index).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from rlmq.common.engines.attention import use_grouped_sdpa
from rlmq.common.engines.causal_forward import CausalForward
from rlmq.common.engines.continuous_batch import ContinuousBatch
from rlmq.common.engines.cpu_linear import use_onednn
from rlmq.common.engines.decoding_batch import DecodingBatch
from rlmq.common.engines.flat_forward import FlatForward, use_flat
from rlmq.common.engines.generation import EngineSettings, EngineState, Generated, Request
from rlmq.common.engines.requests import check_requests, require_weights
from rlmq.common.engines.staged_weights import StagedWeights
from rlmq.common.errors import UsageError
from rlmq.common.models import context_length, load_model
from rlmq.common.weights import WeightManifest


class HfEngine:
    """A `GenerationEngine` on a transformers model.

    Args:
        model: a causal language model where it shall compute; its weights are served only after a commit.
        pad_id: any token id, to fill rectangles with; may be an end-of-text id.
        eos_ids: token ids that end every response; the one that ended it is part of the response.
        max_batch: most rows in one forward pass.
        decode: token ids to text; needed for stop texts only.
        continuous: refill slots as responses end, where the model's attention allows it (`use_flat`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_id: int,
        eos_ids: Sequence[int],
        max_batch: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        continuous: bool = False,
    ) -> None:
        if max_batch < 1:
            raise UsageError("rollout.batch_size_per_device", got=max_batch, expected="at least 1")
        self._model = model.eval()
        continuous = continuous and use_flat(self._model)
        if not continuous:
            use_grouped_sdpa(self._model)
        use_onednn(self._model)
        self._weights = StagedWeights(self._model)
        self._pad_id = pad_id
        self._eos_ids = frozenset(eos_ids)
        self._max_batch = max_batch
        self._context_tokens = context_length(model.config)
        self._queue: deque[list[Request]] = deque()
        self._decode = decode
        self._slots: ContinuousBatch | None = None
        if continuous:
            self._slots = ContinuousBatch(
                FlatForward(self._model, max_batch),
                self._eos_ids,
                self._model.device,
                max_rows=max_batch,
                decode=self._text,
            )
        self._active: DecodingBatch | None = None
        self._known: set[str] = set()
        self._version = -1
        self._torn = False

    @property
    def state(self) -> EngineState:
        """`empty` before the first commit, `loading` between `begin_load` and its end, `torn`, or `serving`."""
        if self._torn:
            return "torn"
        if self._weights.loading:
            return "loading"
        return "serving" if self._version >= 0 else "empty"

    @property
    def version(self) -> int:
        """Policy version served, -1 when none."""
        return self._version

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._known)

    def layout(self) -> WeightManifest:
        """Names (tied aliases included), shapes and dtypes of `model.state_dict()`, in its order."""
        return self._weights.layout

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue one chunk.

        Raises:
            UsageError: an empty prompt, or a prompt whose limit exceeds the model's context.
            IntegrityError: an id that is pending already.
        """
        for request in requests:
            if request.sampling.stop and self._decode is None:
                raise UsageError(f"sample {request.id}", got="a stop text", expected="an engine with a tokenizer")
        check_requests(requests, self._known, self._context_tokens)
        self._known.update(request.id for request in requests)
        if self._slots:
            self._slots.add(requests)
            return
        for start in range(0, len(requests), self._max_batch):
            self._queue.append(list(requests[start : start + self._max_batch]))

    @torch.inference_mode()
    def step(self) -> list[Generated]:
        """One token for every row in a slot or of the active batch; returns the responses that it completed.

        Raises:
            IntegrityError: no whole weights to serve, or logits that are not finite.
        """
        require_weights(self._version, self.state)
        if self._slots:
            return self._returned(self._slots.step(self._version) if self._slots.pending else [])
        if self._active is None:
            if not self._queue:
                return []
            forward = CausalForward(self._model, self._pad_id)
            self._active = DecodingBatch(
                self._queue.popleft(), forward, self._eos_ids, self._model.device, self._text
            )
        return self._returned(self._active.step(self._version))

    @torch.inference_mode()
    def abort(self, ids: Sequence[str]) -> list[Generated]:
        """Take requests out: active ones with what they have, queued ones empty; other ids are ignored."""
        wanted = frozenset(ids)
        if self._slots:
            return self._returned(self._slots.abort(wanted))
        partial = self._active.abort(wanted) if self._active else []
        for batch in self._queue:
            partial += [Generated(r.id, [], [], [], truncated=True) for r in batch if r.id in wanted]
        kept = ([r for r in batch if r.id not in wanted] for batch in self._queue)
        self._queue = deque(batch for batch in kept if batch)
        return self._returned(partial)

    def begin_load(self, manifest: WeightManifest, version: int) -> None:
        """Start to receive weights; the old ones still serve.

        Raises:
            IntegrityError: the manifest is another model's; names the first tensor that differs.
        """
        self._weights.begin(manifest, version)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Receive one whole tensor; it is copied, the caller may reuse its memory.

        Raises:
            IntegrityError: an unknown name, another shape or dtype, or an alias that differs from its twin.
        """
        self._weights.load(name, tensor)

    def room(self, name: str) -> torch.Tensor | None:
        """Memory into which a tensor may be written before `load` takes it."""
        return self._weights.room(name)

    def served(self, name: str) -> torch.Tensor | None:
        """What is served under a name now; None when nothing is."""
        return self._weights.target(name) if self.state in ("serving", "loading") and self._version >= 0 else None

    def commit(self) -> None:
        """Serve the loaded version; keys and values computed with the old one are dropped.

        Responses on their way go on with the new weights; their `policy_versions` show where.

        Raises:
            IntegrityError: tensors are missing; the old version goes on.
        """
        version = self._weights.check_complete()
        self._torn = True  # until the last tensor is in place
        self._weights.swap()
        self._torn = False
        self._version = version
        self._forget()

    def serve(self, version: int) -> None:
        """Serve the weights that the model came with."""
        self._version = version

    def abandon(self) -> None:
        """Drop a load that cannot be completed; the old version, which was never touched, goes on."""
        self._weights.abandon()

    def release_memory(self) -> None:
        """Free keys and values and the spare copy of the weights."""
        self._forget()
        self._weights.release()

    def acquire_memory(self) -> None:
        """Nothing to do: what was freed is made again when it is needed."""

    def close(self) -> None:
        """Nothing to do."""

    def _returned(self, responses: list[Generated]) -> list[Generated]:
        self._known.difference_update(response.id for response in responses)
        if self._active and self._active.pending == 0:
            self._active = None
        return responses

    def _forget(self) -> None:
        for batch in (self._active, self._slots):
            if batch:
                batch.forget()

    def _text(self, ids: Sequence[int]) -> str:
        return self._decode(ids) if self._decode else ""


def make_engine(settings: EngineSettings) -> HfEngine:
    """The engine of a recipe: fixed chunks in deterministic mode, else continuous."""
    return HfEngine(
        load_model(settings.model, torch.float32 if settings.dtype == "float32" else torch.bfloat16),
        pad_id=settings.pad_id,
        eos_ids=settings.eos_ids,
        max_batch=settings.max_batch,
        decode=settings.decode,
        continuous=not settings.deterministic,
    )
