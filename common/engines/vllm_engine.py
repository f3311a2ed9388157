"""The `vllm` generation engine: vLLM in this process, stepped; the CPU build and the CUDA build alike.

::

    submit ──► add_request ──► step ──► new tokens of each request ──► finished
                                 │ between two steps
    load … commit ──► reload_weights(all tensors, every name) ──► prefix cache and running requests' keys dropped

vLLM keeps copies of weights of its own (fused, packed): every tensor is streamed by every name, or the packed head
of a model with tied embeddings would stay old. Requests that run at a commit go on with the new weights: their keys
and values are computed again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlmq.common.engines.arriving_weights import of_folder
from rlmq.common.engines.engine_options import VllmOptions
from rlmq.common.engines.generation import EngineSettings, EngineState, Generated, Request, Sampling
from rlmq.common.engines.random_numbers import request_seed
from rlmq.common.engines.requests import check_requests, require_weights
from rlmq.common.engines.weight_files import write_weights
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.weights import WeightManifest


class VllmEngine:
    """A `GenerationEngine` on vLLM's own engine."""

    def __init__(self, settings: EngineSettings) -> None:
        options = settings.options if isinstance(settings.options, VllmOptions) else VllmOptions()
        cuts = settings.sampling.top_p < 1 or settings.sampling.top_k > 0
        # vLLM tells log-probs either before everything or after temperature and cuts: ours are between the two.
        self._raw = cuts and settings.sampling.temperature == 1
        self._parallel = options.tensor_parallel > 1
        _set_environment(options)
        self._settings = settings
        dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        self._weights = of_folder(settings.model, dtype)
        self._llm = _start(settings, options, "raw_logprobs" if self._raw else "processed_logprobs")
        self._rows: dict[str, tuple[Request, Generated]] = {}
        self._version = -1
        self._torn = False
        self._sleeps = options.sleep and torch.cuda.is_available()
        self._asleep = False

    @property
    def state(self) -> EngineState:
        """`torn` where a reload failed half-way."""
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
        """That of transformers' model, whatever vLLM makes of it."""
        return self._weights.layout

    def serve(self, version: int) -> None:
        """Serve the weights of the model's folder."""
        self._version = version

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests to vLLM's scheduler.

        Raises:
            UsageError: an empty prompt, one that is too long with its limit, or a temperature and cuts whose
                log-probs vLLM cannot tell.
            IntegrityError: an id that is pending already.
        """
        from vllm.inputs.engine import tokens_input

        check_requests(requests, self._rows.keys(), self._settings.max_tokens)
        for request in requests:
            _require_logprobs(request.sampling, self._raw)
        for request in requests:
            prompt = tokens_input(list(request.prompt_ids))
            self._llm.add_request(request.id, prompt, _params(request, self._settings.eos_ids))
            self._rows[request.id] = (request, Generated(request.id, [], [], [], truncated=True))

    def step(self) -> list[Generated]:
        """One step of vLLM's scheduler.

        Raises:
            IntegrityError: no whole weights to serve.
        """
        require_weights(self._version, self.state)
        if not self._rows:
            return []
        self.acquire_memory()
        finished = []
        for output in self._llm.step():
            row = self._rows.get(output.request_id)
            if row is None:
                continue
            self._add(row[1], output.outputs[0])
            if output.finished:
                stopped = output.outputs[0].finish_reason == "stop"
                finished.append(replace(row[1], truncated=not stopped))
                del self._rows[output.request_id]
        return finished

    def abort(self, ids: Sequence[str]) -> list[Generated]:
        """Take requests out, with what they have; other ids are ignored."""
        known = [name for name in ids if name in self._rows]
        if known:
            self._llm.abort_request(known)
        return [self._rows.pop(name)[1] for name in known]

    def begin_load(self, manifest: WeightManifest, version: int) -> None:
        """Start to receive weights; the old ones still serve.

        Raises:
            IntegrityError: the manifest is another model's.
        """
        self._weights.begin(manifest, version)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Receive one whole tensor; it is copied.

        Raises:
            IntegrityError: an unknown name, another shape or dtype, or an alias that differs from its twin.
        """
        self._weights.load(name, tensor)

    def commit(self) -> None:
        """Serve the loaded version: reload, and drop everything that was computed with the old one.

        Raises:
            IntegrityError: tensors are missing; the old version goes on.
        """
        version = self._weights.check_complete()
        self.acquire_memory()
        self._torn = True  # until the last tensor is in place
        self._reload()
        self._forget()
        self._weights.abandon()
        self._torn = False
        self._version = version

    def abandon(self) -> None:
        """Drop a load that cannot be completed."""
        self._weights.abandon()

    def release_memory(self) -> None:
        """Put vLLM to sleep on a GPU (weights to the host, keys and values dropped); on the CPU it cannot."""
        self._weights.release()
        if self._sleeps and not self._asleep:
            self._forget()
            self._llm.sleep(level=1)
            self._asleep = True

    def acquire_memory(self) -> None:
        """Wake it up."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """End vLLM's own processes, if it has any."""
        with suppress(AttributeError):
            self._llm.engine_core.shutdown()

    def _add(self, row: Generated, output: Any) -> None:
        for token, choices in zip(output.token_ids, output.logprobs or (), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(choices[token].logprob)
            row.policy_versions.append(self._version)

    def _reload(self) -> None:
        if not self._parallel:
            tensors = iter(self._weights.named().items())
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            return
        # Its other ranks are other processes: they read a file, which may lie in memory.
        shared = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
            write_weights(Path(folder), self._weights.named(), Path(self._settings.model))
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def _forget(self) -> None:
        """Keys and values of cached beginnings, and of requests that run."""
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise IntegrityError("vllm", got="a prefix cache that it cannot reset", remedy="Sync weights again")


def _set_environment(options: VllmOptions) -> None:
    """What vLLM reads from the environment when it is imported; the user's own settings come first."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        # One process: as many threads as it was given, on no particular cores. Several: they share the cores.
        "VLLM_CPU_OMP_THREADS_BIND": _cores_of(options.tensor_parallel),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not options.compile:
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _cores_of(ranks: int) -> str:
    if ranks == 1:
        return "nobind"
    cores = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    )
    return "|".join(",".join(map(str, cores[rank::ranks] or cores)) for rank in range(ranks))


def _start(settings: EngineSettings, options: VllmOptions, logprobs_mode: str) -> Any:
    from vllm import LLM

    gpu = torch.cuda.is_available()
    if not gpu:
        _require_head_size(settings.model)
    more = {"gpu_memory_utilization": options.gpu_memory_share, "enable_sleep_mode": options.sleep} if gpu else {}
    return LLM(
        model=settings.model,
        dtype=settings.dtype,
        max_model_len=settings.max_tokens,
        max_num_seqs=settings.max_batch,
        tensor_parallel_size=options.tensor_parallel,
        enforce_eager=not options.compile,
        enable_prefix_caching=options.prefix_cache,
        logprobs_mode=logprobs_mode,
        generation_config="vllm",  # nothing but what a request says
        async_scheduling=False,  # or a step would return tokens that the weights before a commit made
        trust_remote_code=False,
        seed=0,
        **more,
    ).llm_engine


def _require_head_size(model: str) -> None:
    """Raises UsageError where vLLM's attention on the CPU would fail at the first token."""
    from transformers import AutoConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False).get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise UsageError(
            f"model {model} with engine vllm",
            got=f"heads of size {size}",
            expected=f"one of {', '.join(map(str, sizes))} on the CPU",
            remedy="Take rollout.engine: hf for this model",
        )


def _params(request: Request, eos_ids: Sequence[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=request_seed(request.seed, request.id),
        stop=list(sampling.stop),
        stop_token_ids=[*eos_ids, *sampling.stop_ids],
        ignore_eos=True,  # ours are among the stop ids
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
    )


def _require_logprobs(sampling: Sampling, raw: bool) -> None:
    cuts = sampling.top_p < 1 or sampling.top_k > 0
    told = sampling.temperature == 0 or (sampling.temperature == 1 if raw else not cuts)
    if not told:
        raise UsageError(
            "rollout.top_p and top_k with engine vllm",
            got=f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}",
            expected="temperature 1, or no cuts: vLLM tells no log-probs between temperature and cuts",
        )
