"""Requests in slots: as soon as one response ends, the next request takes its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlmq.common.engines.flat_forward import LEAST_COPIED_TOKENS, FlatForward, NewRow, common_beginning
from rlmq.common.engines.generation import Generated, Request
from rlmq.common.engines.growing_response import GrowingResponse
from rlmq.common.engines.random_numbers import id_words, uniforms_of_words
from rlmq.common.engines.token_choice import TokenChoice

# Most tokens of new rows in one pass (one row always fits): bounds the memory of activations.
NEW_TOKENS_PER_STEP = 2048


class ContinuousBatch:
    """Rows that advance together, one token per step; waiting requests join when a slot is free.

    Args:
        forward: the model's pass, without rows.
        eos_ids: end any response, beside the request's own `stop_ids`.
        device: where the logits are.
        max_rows: slots.
        decode: token ids to text, for stop texts.
    """

    def __init__(
        self,
        forward: FlatForward,
        eos_ids: frozenset[int],
        device: torch.device,
        *,
        max_rows: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._forward = forward
        self._eos_ids = eos_ids
        self._device = device
        self._max_rows = max_rows
        self._decode = decode
        self._rows: list[GrowingResponse] = []
        self._waiting: deque[GrowingResponse] = deque()
        self._arranged = False

    @property
    def pending(self) -> int:
        """Requests without a whole response."""
        return len(self._rows) + len(self._waiting)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._waiting += [
            GrowingResponse(request, self._eos_ids.union(request.sampling.stop_ids), self._decode)
            for request in requests
        ]

    def step(self, version: int) -> list[Generated]:
        """Let requests join where a slot is free, and give every row one more token, sampled with `version`."""
        last = [row.tokens[-1] for row in self._rows]
        joining = self._joining()
        logits = self._forward.step(last, joining)
        if not self._arranged:
            self._arrange()
        places = np.array([len(row.tokens) for row in self._rows], dtype=np.uint64)
        uniforms = torch.from_numpy(uniforms_of_words(self._seeds, self._words, places)).to(self._device)
        tokens, logprobs = self._choice.choose(logits, uniforms)
        finished = []
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            ended = row.add(token, logprob, version)
            if ended is not None:
                finished.append(ended)
        if finished:
            self._remove(finished)
        return finished

    def abort(self, ids: frozenset[str]) -> list[Generated]:
        """Take requests out; returns what they have so far."""
        partial = [r.generated(truncated=True) for r in (*self._rows, *self._waiting) if r.request.id in ids]
        self._waiting = deque(row for row in self._waiting if row.request.id not in ids)
        self._remove(partial)
        return partial

    def forget(self) -> None:
        """Drop keys and values; the rows join again, before those that wait."""
        self._forward.drop()
        self._waiting.extendleft(reversed(self._rows))
        self._rows = []

    def _joining(self) -> list[NewRow]:
        """Rows for the free slots, as long as the pass does not get too large."""
        new: list[NewRow] = []
        sequences = [row.sequence() for row in self._rows] if self._waiting else []
        budget = NEW_TOKENS_PER_STEP
        while self._waiting and len(self._rows) < self._max_rows:
            row = self._waiting[0]
            joined = _with_source(row.sequence(), sequences)
            budget -= len(joined.tokens) - joined.copied
            if budget < 0 and new:
                break
            new.append(joined)
            sequences.append(list(joined.tokens))
            self._rows.append(self._waiting.popleft())
            self._arranged = False
        return new

    def _remove(self, ended: Sequence[Generated]) -> None:
        """Rows leave as they do in the forward pass: the last one takes the place."""
        ids = {response.id for response in ended}
        for place in range(len(self._rows) - 1, -1, -1):
            if self._rows[place].request.id in ids:
                self._forward.remove(place)
                self._rows[place] = self._rows[-1]
                self._rows.pop()
                self._arranged = False

    def _arrange(self) -> None:
        """What is derived from the rows, and changes only when rows come or go."""
        requests = [row.request for row in self._rows]
        self._choice = TokenChoice([request.sampling for request in requests], self._device)
        self._seeds = np.array([request.seed % 2**64 for request in requests], dtype=np.uint64)
        self._words = np.array([id_words(request.id) for request in requests], dtype=np.uint64)
        self._arranged = True


def _with_source(tokens: list[int], sequences: Sequence[Sequence[int]]) -> NewRow:
    """A row and the one that it has the longest beginning in common with; its last token is always computed."""
    best, source = 0, 0
    for index, other in enumerate(sequences):
        if best < len(other) and best < len(tokens) and other[best] == tokens[best]:
            common = common_beginning(tokens, other)
            if common > best:
                best, source = common, index
                if best >= len(tokens) - 1:
                    break
    copied = min(best, len(tokens) - 1)
    return NewRow(tokens, source, copied) if copied >= LEAST_COPIED_TOKENS else NewRow(tokens)
