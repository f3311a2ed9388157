"""The engines that the contract is tried on, each made through the registry as a recipe names it."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import eventually
from contract.bench import CONTEXT_TOKENS, EOS, Bench, build_model
from transformers import AutoTokenizer

from rlmq.common.engines.generation import EngineSettings
from rlmq.common.engines.registry import GENERATION
from rlmq.common.models import resolve_model

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], str]:
    """Folder of the model of seed 0, tied or not, with a tokenizer of bytes."""
    made: dict[bool, str] = {}

    def folder(tied: bool) -> str:
        if tied not in made:
            made[tied] = str(tmp_path_factory.mktemp("tied" if tied else "untied"))
            build_model(seed=0, tied=tied).save_pretrained(made[tied])
            AutoTokenizer.from_pretrained(resolve_model("tiny_model.py:folder", RECIPES)).save_pretrained(
                made[tied]
            )
        return made[tied]

    return folder


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A package of somebody else's: it registers engines called `plain`, and one that cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "acme_plain.py").write_text((HERE / "plain_engine.py").read_text())
    (folder / "acme_trainer.py").write_text((HERE / "plain_trainer.py").read_text())
    info = folder / "acme_plain-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-plain\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rlmq.generation_engines]\nplain = acme_plain:PlainEngine\nbroken = acme_plain_gone:Engine\n"
        "[rlmq.training_engines]\nplain = acme_trainer:PlainTrainer\n"
    )
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


# Name, and whether the model's embeddings are tied, which is the harder case of a weight update.
ENGINES = [(name, tied) for name in ("hf", "hf-fixed", "vllm") for tied in (False, True)]
ENGINES += [("plain", True), ("http", True), ("http-vllm", True)]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _server_command(kind: str, folder: str, port: int) -> tuple[list[str], dict[str, str]]:
    if kind == "http":
        return [sys.executable, str(HERE / "small_server.py"), folder, str(port)], {}
    options = "--dtype float32 --max-model-len 320 --max-num-seqs 8 --enforce-eager --max-logprobs 5"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *options.split()]
    command += ["--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return command, {**settings, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def openai_server(kind: str, folder: str, tmp: Path) -> Iterator[dict[str, str]]:
    """A real server process on the model; yields the engine's options."""
    port = _free_port()
    command, settings = _server_command(kind, folder, port)
    with (tmp / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (tmp / "server.log").read_text()[-2000:]
        with suppress(httpx.HTTPError):
            return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
        return False

    try:
        eventually(answers, f"{kind} answers", timeout_s=400)
        yield {"url": url, "update": "vllm", "weights_folder": str(tmp / "weights")}
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture(scope="module", params=ENGINES, ids=lambda one: f"{one[0]}-{'tied' if one[1] else 'untied'}")
def bench(
    request: pytest.FixtureRequest,
    model_folder: Callable[[bool], str],
    third_party: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    """An engine of each kind on an untied and on a tied model; one for all tests of a file."""
    torch.set_num_threads(1)
    name, tied = request.param
    if name.endswith("vllm") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    folder = model_folder(tied)
    options: dict[str, Any] = {}
    ends = ExitStack()
    if name.startswith("http"):
        options = ends.enter_context(openai_server(name, folder, tmp_path_factory.mktemp("server")))
    engine_name = name.removesuffix("-fixed").removesuffix("-vllm")
    checked = GENERATION.check(engine_name, options, HERE, deterministic=name == "hf-fixed")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = EngineSettings(
        model=folder,
        dtype="float32",
        max_batch=8,
        max_tokens=CONTEXT_TOKENS,
        eos_ids=(EOS,),
        pad_id=256,
        decode=tokenizer.decode,
        deterministic=name == "hf-fixed",
        options=checked,
    )
    engine = GENERATION.find(engine_name, HERE)(settings)
    made = Bench(engine, tied, build_model(seed=0, tied=tied), tokenizer.decode)
    yield made
    engine.close()
    ends.close()
