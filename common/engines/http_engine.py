"""The `http` generation engine: a server that speaks OpenAI's completions, as vLLM's own does.

::

    submit ──► one streamed POST /v1/completions per request (at most max_batch at once), in a thread of its own
                 ──► tokens, log-probs ──► queue ──► step
    commit  ──► streams end ──► weights_folder written ──► /pause, reload_weights, caches reset, /resume
                 ──► what was on its way is asked for again, from its last token on

Token ids go in and come out; nothing is decoded and encoded again. The server must give them (`return_token_ids`).
"""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from rlmq.common.engines.arriving_weights import of_folder
from rlmq.common.engines.completion_streams import CompletionStreams, Piece
from rlmq.common.engines.engine_options import HttpOptions
from rlmq.common.engines.generation import EngineSettings, EngineState, Generated, Request
from rlmq.common.engines.random_numbers import request_seed
from rlmq.common.engines.requests import check_requests, require_weights
from rlmq.common.engines.weight_files import write_weights
from rlmq.common.errors import DependencyError, UsageError
from rlmq.common.weights import WeightManifest

# How long a step waits for news.
_STEP_S = 0.2


@dataclass(slots=True)
class _Row:
    request: Request
    so_far: Generated
    attempt: int = 0
    finished: bool = field(default=False)


class HttpEngine:
    """A `GenerationEngine` whose model is behind an address.

    Raises:
        UsageError: cuts (servers tell log-probs after them), a server whose log-probs are before temperature, or
            one that is asked to update its weights and has no way to.
        DependencyError: nobody answers.
    """

    def __init__(self, settings: EngineSettings) -> None:
        options: HttpOptions = settings.options
        self._settings, self._options = settings, options
        key = os.environ.get(options.key_variable, "") if options.key_variable else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(options.timeout_s)
        self._client = httpx.Client(base_url=options.url.rstrip("/"), headers=headers, timeout=timeout)
        self._weights = of_folder(settings.model, torch.float32 if settings.dtype == "float32" else torch.bfloat16)
        self._model = options.model or str(self._get("/v1/models")["data"][0]["id"])
        self._check_server()
        self._news: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self._streams = CompletionStreams(self._client, self._news, at_once=settings.max_batch)
        self._rows: dict[str, _Row] = {}
        self._version = -1
        self._torn = False

    @property
    def state(self) -> EngineState:
        """`torn` where the server took the weights in part."""
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
        return len(self._rows)

    def layout(self) -> WeightManifest:
        """That of transformers' model in the settings' folder."""
        return self._weights.layout

    def serve(self, version: int) -> None:
        """The server's own weights are this version."""
        self._version = version
        for row in self._rows.values():
            self._ask(row)

    def submit(self, requests: Sequence[Request]) -> None:
        """Send requests; before there is a version, keep them.

        Raises:
            UsageError: an empty prompt, or one that is too long with its limit.
            IntegrityError: an id that is pending already.
        """
        check_requests(requests, self._rows.keys(), self._settings.max_tokens)
        for request in requests:
            row = _Row(request, Generated(request.id, [], [], [], truncated=True))
            self._rows[request.id] = row
            if self._version >= 0:
                self._ask(row)

    def step(self) -> list[Generated]:
        """Take in what the server has sent; waits for it a moment.

        Raises:
            IntegrityError: no version to serve. DependencyError: the server is gone, or refuses a request.
        """
        require_weights(self._version, self.state)
        finished: list[Generated] = []
        wait = bool(self._rows)
        while wait or not self._news.empty():
            try:
                piece = self._news.get(timeout=_STEP_S)
            except queue.Empty:
                break
            wait = False
            ended = self._take(piece)
            if ended is not None:
                finished.append(ended)
        return finished

    def abort(self, ids: Sequence[str]) -> list[Generated]:
        """Close the streams of requests; returns what has come."""
        known = [name for name in ids if name in self._rows]
        self._streams.cancel(known)
        self._take_all()
        return [self._rows.pop(name).so_far for name in known]

    def begin_load(self, manifest: WeightManifest, version: int) -> None:
        """Start to receive weights.

        Raises:
            IntegrityError: the manifest is another model's. UsageError: the server's weights are fixed.
        """
        if not self._options.takes_weights:
            raise UsageError("rollout.engine http", got="new weights", expected="engine_options.update: vllm")
        self._weights.begin(manifest, version)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Receive one whole tensor; it is copied.

        Raises:
            IntegrityError: an unknown name, another shape or dtype, or an alias that differs from its twin.
        """
        self._weights.load(name, tensor)

    def commit(self) -> None:
        """Let the server load the version from the shared folder; what was on its way goes on from where it was.

        Raises:
            IntegrityError: tensors are missing; the old version goes on. DependencyError: the server failed.
        """
        version = self._weights.check_complete()
        self._streams.cancel(list(self._rows))
        self._take_all()
        folder = Path(str(self._options.weights_folder))
        write_weights(folder, self._weights.named(), Path(self._settings.model))
        self._torn = True
        self._post("/pause?mode=abort")
        self._post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        )
        if not self._post("/reset_prefix_cache?reset_running_requests=true").get("success", True):
            raise DependencyError(f"server {self._options.url}", got="a prefix cache that it cannot reset")
        self._post("/resume")
        self._weights.abandon()
        self._torn = False
        self._version = version
        for row in self._rows.values():
            self._ask(row)

    def abandon(self) -> None:
        """Drop a load that cannot be completed."""
        self._weights.abandon()

    def release_memory(self) -> None:
        """Free this process's copy of the weights; the server's memory is its own."""
        self._weights.release()

    def acquire_memory(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End all streams."""
        self._streams.close()
        self._client.close()

    def _ask(self, row: _Row) -> None:
        """Send a request, from its last token on; a later attempt has other random numbers."""
        sampling, done = row.request.sampling, row.so_far.token_ids
        row.attempt += 1
        body = {
            "model": self._model,
            "prompt": [*row.request.prompt_ids, *done],
            "max_tokens": sampling.max_tokens - len(done),
            "temperature": sampling.temperature,
            "seed": request_seed(row.request.seed, f"{row.request.id}+{len(done)}" if done else row.request.id),
            "stop": list(sampling.stop) or None,
            "logprobs": 0,
            "stream": True,
            # vLLM's own
            "stop_token_ids": [*self._settings.eos_ids, *sampling.stop_ids],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        self._streams.open(row.request.id, row.attempt, body)

    def _take(self, piece: Piece) -> Generated | None:
        row = self._rows.get(piece.id)
        if row is None or row.attempt != piece.attempt:
            return None
        if piece.error is not None:
            raise DependencyError(
                f"server {self._options.url}, sample {piece.id}",
                got=piece.error,
                expected="a stream of tokens",
                remedy="Look at the server's log",
            )
        row.so_far.token_ids.extend(piece.token_ids)
        row.so_far.logprobs.extend(piece.logprobs)
        row.so_far.policy_versions.extend([self._version] * len(piece.token_ids))
        if piece.finish_reason is None:
            return None
        del self._rows[piece.id]
        return replace(row.so_far, truncated=piece.finish_reason != "stop")

    def _take_all(self) -> None:
        """What has come; a response that has ended meanwhile is asked for no more, and given back by a step."""
        ended: list[Piece] = []
        while not self._news.empty():
            piece = self._news.get()
            if piece.finish_reason is not None:
                ended.append(piece)
            else:
                self._take(piece)
        for piece in ended:
            self._news.put(piece)

    def _check_server(self) -> None:
        sampling = self._settings.sampling
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise UsageError(
                "rollout.top_p and top_k with engine http",
                got=f"{sampling.top_p} and {sampling.top_k}",
                expected="1 and 0: servers tell log-probs after the cuts",
            )
        if self._options.takes_weights and self._client.get("/is_paused").status_code != httpx.codes.OK:
            raise UsageError(
                "rollout.engine_options.update vllm",
                got=f"{self._options.url} without /pause and /collective_rpc",
                expected="a vLLM server in development mode",
                remedy="Start it with VLLM_SERVER_DEV_MODE=1, or say update: none and train nothing",
            )
        if sampling.temperature != 1:
            self._check_temperature(sampling.temperature)

    def _check_temperature(self, temperature: float) -> None:
        """The two likeliest first tokens: their log-probs differ by 1 / temperature of what they do at 1."""
        gaps = []
        for at in (1.0, temperature):
            body = {"model": self._model, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": at, "logprobs": 2}
            top = self._post("/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0]
            first, second = sorted(top.values(), reverse=True)[:2]
            gaps.append(first - second)
        if abs(gaps[1] * temperature - gaps[0]) > 0.01 * max(gaps[0], 0.1):
            raise UsageError(
                f"server {self._options.url}",
                got=f"log-probs without temperature {temperature}",
                expected="log-probs of the distribution that is sampled from",
                remedy="Start vLLM with --logprobs-mode processed_logprobs, or set rollout.temperature: 1",
            )

    def _get(self, path: str) -> Any:
        return self._asked("GET", path, None)

    def _post(self, path: str, body: Any = None) -> Any:
        return self._asked("POST", path, body)

    def _asked(self, method: str, path: str, body: Any) -> Any:
        try:
            response = self._client.request(method, path, json=body)
            response.raise_for_status()
            return response.json() if response.content else {}
        except (httpx.HTTPError, ValueError) as error:
            raise DependencyError(
                f"server {self._options.url}{path}",
                got=str(error) or type(error).__name__,
                expected="an OpenAI-compatible server",
                remedy="Start it, or correct rollout.engine_options.url",
            ) from error
