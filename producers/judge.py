"""A judge: a model behind an OpenAI-compatible endpoint that reads prompt and response and writes a number.

A judge that is down, too slow or unintelligible has no verdict, with the reason; it never means 0. What it once
said may be kept on disk by content, so that a row that comes again costs no request.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from rlmq.common.errors import UsageError
from rlmq.producers.reward_kinds import rows_of, text_of
from rlmq.producers.reward_values import NoVerdict

_NUMBER = r"-?\d+(?:\.\d+)?"
_PROMPT = (
    "Rate the response to the prompt on a scale from 0 (useless) to 10 (perfect). "
    "End with a line `Score: NUMBER`.\n\n# Prompt\n{prompt}\n\n# Response\n{response}"
)
_FIRST_PAUSE_S, _GREATEST_PAUSE_S = 0.25, 8.0
_AGAIN = (408, 409, 425, 429)  # and all of 500 and above


class Judge:
    """Asks the endpoint once per row, several rows at a time.

    Args:
        url: the endpoint up to `/v1`; `/chat/completions` is added.
        model: name of the model there.
        prompt: what it is asked; `{prompt}`, `{response}` and the row's fields by name are filled in.
        pattern: regular expression for the number in its answer, its last match and group 1.
        scale: the number is divided by it.
        requests_per_s: most requests of this worker in a second; 0: no limit.
        concurrency: rows asked about at the same time.
        retries: further tries where the endpoint is away or busy (408, 409, 425, 429, 5xx), with doubling pauses or
            as `Retry-After` says, within the call's time limit.
        cache: folder of answers, relative to the recipe's; none: nothing is kept.
        key_env: environment variable with the key, sent as a bearer token.
        options: further fields of the request, `max_tokens` for example.
        timeout_s: the time limit of a call.

    Raises:
        UsageError: a URL or pattern of another form, or a key that is not in the environment.
    """

    per_row = False

    def __init__(
        self,
        url: str,
        *,
        folder: Path,
        timeout_s: float,
        model: str,
        prompt: str = _PROMPT,
        pattern: str = rf"[Ss]core:?\s*\**\s*({_NUMBER})",
        scale: float = 10.0,
        requests_per_s: float = 0.0,
        concurrency: int = 16,
        retries: int = 4,
        cache: str | None = None,
        key_env: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        subject = f"reward judge {url}"
        if not url.startswith(("http://", "https://")):
            raise UsageError(subject, got="no URL", expected="http://HOST:PORT/v1")
        if key_env is not None and not os.environ.get(key_env):
            raise UsageError(f"{subject}, key_env", got=f"no {key_env} in the environment", expected="the key")
        if scale == 0 or concurrency < 1 or retries < 0 or requests_per_s < 0:
            got = f"scale {scale}, concurrency {concurrency}, retries {retries}, requests_per_s {requests_per_s}"
            raise UsageError(
                f"{subject}, arguments", got=got, expected="scale not 0, concurrency of 1 or more, no minus"
            )
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{subject}, pattern", got=str(error), expected="a regular expression") from error
        if self._pattern.groups < 1:
            raise UsageError(f"{subject}, pattern", got=pattern, expected="a group for the number")
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._body = {"model": model, "temperature": 0, **(options or {})}
        self._prompt, self._scale = prompt, scale
        self._pause_s = 1.0 / requests_per_s if requests_per_s else 0.0
        self._call_s, self._retries, self._concurrency = timeout_s * 0.9, retries, concurrency
        self._cache = None if cache is None else folder / cache
        if self._cache is not None:
            self._cache.mkdir(parents=True, exist_ok=True)
        headers = {} if key_env is None else {"Authorization": f"Bearer {os.environ[key_env]}"}
        self._client = httpx.Client(headers=headers, limits=httpx.Limits(max_connections=concurrency))
        self._turn = threading.Lock()
        self._next_at = 0.0

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[Any]:
        """The judge's number over `scale` per row; within the time limit, whatever the endpoint does."""
        deadline = time.monotonic() + self._call_s
        asked = [
            self._filled(prompt, text_of(completion), fields)
            for prompt, completion, fields in zip(
                prompts, completions, rows_of(columns, len(completions)), strict=True
            )
        ]
        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(lambda text: self._verdict(text, deadline), asked))

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _filled(self, prompt: Any, response: str, fields: Mapping[str, Any]) -> str:
        """The question: names in braces are filled in at once, so that braces in a response stay what they are."""
        told = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
        known = {**fields, "prompt": told, "response": response}
        return re.sub(r"\{(\w+)\}", lambda found: str(known.get(found[1], found[0])), self._prompt)

    def _verdict(self, question: str, deadline: float) -> float | NoVerdict:
        request = {**self._body, "messages": [{"role": "user", "content": question}]}
        content = json.dumps([self._url, request], sort_keys=True)
        kept = self._cache and self._cache / f"{hashlib.sha256(content.encode(errors='replace')).hexdigest()}.txt"
        if kept and kept.exists():
            return self._number(kept.read_text())
        answer = self._ask(request, deadline)
        if isinstance(answer, NoVerdict):
            return answer
        verdict = self._number(answer)
        if kept and not isinstance(verdict, NoVerdict):
            _write_whole(kept, answer)
        return verdict

    def _number(self, answer: str) -> float | NoVerdict:
        found = self._pattern.findall(answer)
        if not found:
            return NoVerdict(f"judge: no number in its answer {answer[-80:]!r}")
        last = found[-1] if isinstance(found[-1], str) else found[-1][0]
        try:
            return float(last) / self._scale
        except ValueError:
            return NoVerdict(f"judge: {last!r} in its answer is no number")

    def _ask(self, request: Mapping[str, Any], deadline: float) -> str | NoVerdict:
        pause_s, reason = _FIRST_PAUSE_S, "not asked in time"
        for _ in range(self._retries + 1):
            self._wait_turn(deadline)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            told_s = 0.0
            try:
                reply = self._client.post(self._url, json=request, timeout=left_s)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if reply.is_success:
                    return _content(reply)
                reason = f"HTTP {reply.status_code}"
                if reply.status_code not in _AGAIN and reply.status_code < 500:
                    return NoVerdict(f"judge: {reason} from {self._url}: {reply.text[:200]}")
                told_s = _seconds(reply.headers.get("retry-after", ""))
            time.sleep(max(0.0, min(max(pause_s, told_s), deadline - time.monotonic())))
            pause_s = min(pause_s * 2, _GREATEST_PAUSE_S)
        return NoVerdict(f"judge: no answer from {self._url}: {reason}")

    def _wait_turn(self, deadline: float) -> None:
        """Sleep until this worker may send one more request."""
        with self._turn:
            at = max(self._next_at, time.monotonic())
            if at < deadline:
                self._next_at = at + self._pause_s
        time.sleep(max(0.0, min(at, deadline) - time.monotonic()))


def _content(reply: httpx.Response) -> str | NoVerdict:
    try:
        return str(reply.json()["choices"][0]["message"]["content"])
    except (ValueError, LookupError, TypeError):
        return NoVerdict(f"judge: an answer of another form: {reply.text[:200]!r}")


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def _write_whole(path: Path, text: str) -> None:
    """Workers may keep the same answer at the same time: each writes a file of its own and renames it."""
    own = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    own.write_text(text, errors="replace")
    own.replace(path)
