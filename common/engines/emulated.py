"""Engines whose devices are clocks: everything of a run is real but the model's computing.

For schedules and placements of clusters that are not at hand: responses have the lengths of a file, and come after
the time that a device would take; training takes the time of its tokens. Weights are those of the recipe's
(small) model, and travel as in any run. Time is scaled: `time_scale` 0.1 runs ten times as fast.

    generation   an iteration gives every active response a token, and takes iteration_s + active_s * responses
    training     token_s device-seconds for each token of a response, shared by the devices
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rlmq.common.engines.engine_options import EmulatedOptions, EmulatedTrainingOptions
from rlmq.common.engines.generation import EngineSettings, Generated, Request
from rlmq.common.engines.hf import HfEngine
from rlmq.common.engines.lengths import length_of, read_lengths
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import LossFunction, MicroBatch, PolicyOutput, StepStats, TrainingSettings
from rlmq.common.models import load_model

_SLICE_S = 0.02


@dataclass(slots=True)
class _Response:
    request: Request
    length: int
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class EmulatedEngine(HfEngine):
    """Generation on one emulated device."""

    Options = EmulatedOptions

    def __init__(self, settings: EngineSettings) -> None:
        model = load_model(settings.model, torch.float32)
        super().__init__(model, pad_id=settings.pad_id, eos_ids=settings.eos_ids, max_batch=settings.max_batch)
        assert isinstance(settings.options, EmulatedOptions)
        self._options = settings.options
        self._lengths = read_lengths(str(settings.folder / settings.options.lengths))
        self._waiting: deque[_Response] = deque()
        self._prompts: dict[str, int] = {}  # lengths
        self._running: dict[str, _Response] = {}
        self._progress = 0.0  # of the iteration that is on its way
        self._at = time.monotonic()

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._running) + len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue them; the rest of an interrupted response has the rest of its length."""
        for one in requests:
            own = self._options
            length = length_of(one.id, self._lengths, own.prompts, own.members) - self._begun(one)
            self._waiting.append(_Response(one, max(1, min(length, one.sampling.max_tokens))))

    def _begun(self, request: Request) -> int:
        """Tokens of the response that are in the prompt of its rest."""
        if "~" not in request.id:
            self._prompts[request.id] = len(request.prompt_ids)
            return 0
        return len(request.prompt_ids) - self._prompts.get(request.id.partition("~")[0], len(request.prompt_ids))

    def step(self) -> list[Generated]:
        """As much as the device does until the next response ends, or a moment later."""
        self._fill()
        if not self._running:
            self._at = time.monotonic()
            return []
        iteration_s = self._iteration_s()
        first = min(one.length - len(one.tokens) for one in self._running.values()) - self._progress
        until = self._at + min(first * iteration_s, _SLICE_S)
        time.sleep(max(0.0, until - time.monotonic()))
        now = time.monotonic()
        self._progress += (now - self._at) / iteration_s
        self._at = now
        whole = int(self._progress)
        self._progress -= whole
        for one in self._running.values():
            count = min(whole, one.length - len(one.tokens))
            one.tokens += [self._pad_id] * count
            one.versions += [self._version] * count
        ended = [one for one in self._running.values() if len(one.tokens) >= one.length]
        for one in ended:
            del self._running[one.request.id]
        return [self._generated(one, truncated=False) for one in ended]

    def abort(self, ids: Sequence[str]) -> list[Generated]:
        """Take requests out, with the tokens that they have."""
        wanted = set(ids)
        found = [one for name, one in self._running.items() if name in wanted]
        found += [one for one in self._waiting if one.request.id in wanted]
        self._running = {name: one for name, one in self._running.items() if name not in wanted}
        self._waiting = deque(one for one in self._waiting if one.request.id not in wanted)
        return [self._generated(one, truncated=True) for one in found]

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            one = self._waiting.popleft()
            self._running[one.request.id] = one

    def _iteration_s(self) -> float:
        own = self._options
        return (own.iteration_s + own.active_s * len(self._running)) * own.time_scale

    @staticmethod
    def _generated(one: _Response, *, truncated: bool) -> Generated:
        return Generated(one.request.id, one.tokens, [-1.0] * len(one.tokens), one.versions, truncated)


class EmulatedTrainer(TorchEngine):
    """Training on emulated devices: a pass takes the time of its tokens, and changes nothing."""

    Options = EmulatedTrainingOptions

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__(load_model(settings.model, torch.float32), settings.block, group=settings.group)
        assert isinstance(settings.options, EmulatedTrainingOptions)
        self._options = settings.options

    def logprobs(self, batch: MicroBatch) -> PolicyOutput:
        """Those of an emulated rollout."""
        return PolicyOutput(
            -batch.response_mask.float(), torch.zeros_like(batch.response_mask, dtype=torch.float32)
        )

    def accumulate(self, batch: MicroBatch, loss: LossFunction) -> dict[str, float]:
        """Take the time of the batch's tokens; the figures are those of its loss."""
        began = time.monotonic()
        terms = loss(self.logprobs(batch), batch)
        own = self._options
        seconds = float(batch.response_mask.sum()) * own.token_s / own.devices * own.time_scale
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        return {name: float(value) for name, value in terms.metric_sums.items()}

    def step(self, denominators: tuple[float, ...]) -> StepStats:
        """Nothing changes."""
        return StepStats(0.0, self._block.lr)
