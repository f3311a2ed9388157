"""One batch of requests on its way from prompts to responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlmq.common.engines.causal_forward import CausalForward
from rlmq.common.engines.generation import Generated, Request
from rlmq.common.engines.growing_response import GrowingResponse
from rlmq.common.engines.random_numbers import id_words, uniforms_of_words
from rlmq.common.engines.token_choice import TokenChoice

# Rows of finished requests leave the cache once they are this share of it: moving the others costs about as much as
# computing an eighth of them once.
WORTH_COMPACTING = 1 / 8


class DecodingBatch:
    """Rows that advance together, one token per step. Which rows share a batch is decided by the caller.

    Args:
        requests: at most as many as fit.
        forward: the model's pass, not started.
        eos_ids: end any response, beside the request's own `stop_ids`.
        device: where the logits are.
        decode: token ids to text, for stop texts.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        forward: CausalForward,
        eos_ids: frozenset[int],
        device: torch.device,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._forward = forward
        self._device = device
        self._rows = [GrowingResponse(r, eos_ids.union(r.sampling.stop_ids), decode) for r in requests]
        self._arrange()

    @property
    def pending(self) -> int:
        """Rows that are not finished."""
        return sum(not row.finished for row in self._rows)

    @property
    def ids(self) -> list[str]:
        """Ids of the rows that are not finished."""
        return [row.request.id for row in self._rows if not row.finished]

    def forget(self) -> None:
        """Drop keys and values; the next step computes them again from the tokens (and the weights of then)."""
        self._forward.drop()

    def step(self, version: int) -> list[Generated]:
        """Give every unfinished row one more token, sampled with the weights of `version`."""
        logits = self._logits()
        tokens, logprobs = self._choice.choose(logits, self._uniforms())
        self._last = tokens
        finished = []
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.finished:
                continue
            ended = row.add(token, logprob, version)
            if ended is not None:
                finished.append(ended)
        if finished:
            self._compact()
        return finished

    def abort(self, ids: frozenset[str]) -> list[Generated]:
        """Take rows out; returns what they have so far."""
        partial = []
        for row in self._rows:
            if row.request.id in ids and not row.finished:
                row.finished = True
                partial.append(row.generated(truncated=True))
        if partial:
            self._compact()
        return partial

    def _logits(self) -> torch.Tensor:
        if self._forward.started:
            return self._forward.extend(self._last)
        self._keep([index for index, row in enumerate(self._rows) if not row.finished])
        sequences = [row.sequence() for row in self._rows]
        left = max(row.request.sampling.max_tokens - len(row.tokens) for row in self._rows)
        return self._forward.start(sequences, left)

    def _uniforms(self) -> torch.Tensor:
        places = np.array([len(row.tokens) for row in self._rows], dtype=np.uint64)
        return torch.from_numpy(uniforms_of_words(self._seeds, self._words, places)).to(self._device)

    def _compact(self) -> None:
        alive = [index for index, row in enumerate(self._rows) if not row.finished]
        gone = len(self._rows) - len(alive)
        if not alive or not self._forward.started or gone < WORTH_COMPACTING * len(self._rows):
            return
        rows = torch.tensor(alive, device=self._device)
        self._forward.keep(rows)
        self._last = self._last[rows]
        self._keep(alive)

    def _keep(self, alive: Sequence[int]) -> None:
        if len(alive) < len(self._rows):
            self._rows = [self._rows[index] for index in alive]
            self._arrange()

    def _arrange(self) -> None:
        """What is derived from the rows, and changes only when rows leave."""
        requests = [row.request for row in self._rows]
        self._choice = TokenChoice([request.sampling for request in requests], self._device)
        self._seeds = np.array([request.seed % 2**64 for request in requests], dtype=np.uint64)
        self._words = np.array([id_words(request.id) for request in requests], dtype=np.uint64)
