"""Streamed completions, many at once, in a thread of their own; what comes is put into one queue."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of one response, or its end, or what went wrong."""

    id: str
    attempt: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish_reason: str | None = None
    error: str | None = None


class CompletionStreams:
    """Streams of `POST /v1/completions` with token ids.

    Args:
        client: whose address, headers and time-outs are used.
        news: gets every `Piece`.
        at_once: most open streams; the others wait.
    """

    def __init__(self, client: httpx.Client, news: queue.SimpleQueue[Piece], *, at_once: int) -> None:
        self._news = news
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=at_once)
        self._client = httpx.AsyncClient(
            base_url=client.base_url, headers=client.headers, timeout=client.timeout, limits=limits
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="completion streams", daemon=True)
        self._thread.start()

    def open(self, name: str, attempt: int, body: Mapping[str, Any]) -> None:
        """Ask for one response."""

        def start() -> None:
            self._tasks[name] = self._loop.create_task(self._stream(name, attempt, body))

        self._loop.call_soon_threadsafe(start)

    def cancel(self, names: Sequence[str]) -> None:
        """Close streams; when this returns, nothing more comes from them."""
        if names:
            asyncio.run_coroutine_threadsafe(self._end(names), self._loop).result()

    def close(self) -> None:
        """Close all."""
        self.cancel(list(self._tasks))
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, names: Sequence[str]) -> None:
        tasks = [task for task in map(self._tasks.pop, names, [None] * len(names)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, name: str, attempt: int, body: Mapping[str, Any]) -> None:
        ended = False
        try:
            async with self._slots, self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise ValueError(f"status {response.status_code}: {text[:500]}")
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]" and not ended:
                        piece = _piece(name, attempt, line.removeprefix("data: "))
                        ended = piece.finish_reason is not None
                        self._news.put(piece)
            if not ended:
                raise ValueError("a stream that ended before its response did")
        except (httpx.HTTPError, ValueError, LookupError, TypeError, msgspec.MsgspecError) as error:
            if not ended:
                self._news.put(Piece(name, attempt, error=str(error) or type(error).__name__))
        finally:
            self._tasks.pop(name, None)


def _piece(name: str, attempt: int, text: str) -> Piece:
    """One line of the stream. Raises ValueError: an error of the server, or no token ids."""
    message: Any = msgspec.json.decode(text)
    if "choices" not in message:
        raise ValueError(str(message.get("error", message))[:500])
    [choice] = message["choices"]
    ids, told = choice.get("token_ids"), choice.get("logprobs") or {}
    if ids is None:
        raise ValueError("no token ids: the server does not know return_token_ids")
    logprobs = told.get("token_logprobs") or []
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(logprobs)} log-probs of {len(ids)} tokens")
    return Piece(name, attempt, ids, logprobs, choice.get("finish_reason"))
