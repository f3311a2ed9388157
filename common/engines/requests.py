"""What every engine asks of the requests that it is given."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlmq.common.engines.generation import Request
from rlmq.common.errors import IntegrityError, UsageError


def check_requests(requests: Sequence[Request], pending: Collection[str], most_tokens: int) -> None:
    """Check requests before any of them is taken.

    Raises:
        UsageError: an empty prompt, or a prompt whose limit exceeds `most_tokens`.
        IntegrityError: an id twice, or one that is pending.
    """
    seen = set(pending)
    for request in requests:
        if request.id in seen:
            raise IntegrityError(f"sample {request.id}", got="a second request", expected="one request per id")
        seen.add(request.id)
        prompt, limit = len(request.prompt_ids), request.sampling.max_tokens
        if prompt == 0 or limit < 1:
            raise UsageError(
                f"sample {request.id}",
                got=f"{prompt} prompt tokens and a limit of {limit}",
                expected="at least one of each",
            )
        if prompt + limit > most_tokens:
            raise UsageError(
                f"sample {request.id}",
                got=f"{prompt} prompt tokens + {limit} response tokens",
                expected=f"at most {most_tokens} tokens, the model's context",
                remedy="Lower data.max_prompt_tokens or rollout.max_response_tokens",
            )


def require_weights(version: int, state: str) -> None:
    """Raises IntegrityError when an engine in this state has nothing whole to serve."""
    if version < 0 or state == "torn":
        raise IntegrityError(
            "generation engine",
            got=f"a step in state {state}",
            expected="a committed policy version",
            remedy="Sync weights first",
        )
