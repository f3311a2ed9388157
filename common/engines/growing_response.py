"""A response on its way: its tokens so far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlmq.common.engines.generation import Generated, Request

# A character is at most four tokens (its bytes); a stop text may begin inside a token.
_TOKENS_PER_CHARACTER = 4


@dataclass(slots=True)
class GrowingResponse:
    """`tokens`, `logprobs`, `versions` have one entry per token; `ended` says whether another one may come."""

    request: Request
    stop_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: bool = False

    def add(self, token: int, logprob: float, version: int) -> Generated | None:
        """One more token; the whole response if it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        stopped = token in self.stop_ids or self._completes_a_stop_text()
        if not stopped and len(self.tokens) < self.request.sampling.max_tokens:
            return None
        self.finished = True
        return self.generated(truncated=not stopped)

    def generated(self, *, truncated: bool) -> Generated:
        """What there is."""
        return Generated(self.request.id, self.tokens, self.logprobs, self.versions, truncated)

    def sequence(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.request.prompt_ids, *self.tokens]

    def _completes_a_stop_text(self) -> bool:
        stop = self.request.sampling.stop
        if not stop:
            return False
        tail = self.decode(self.tokens[-_TOKENS_PER_CHARACTER * max(map(len, stop)) - 1 :])
        return any(text in tail for text in stop)
