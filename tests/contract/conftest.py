"""The engines that the contract is tried on, each made through the registry as a recipe names it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
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
    """A package of somebody else's: it registers the engine `plain`, and one that cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "acme_plain.py").write_text((HERE / "plain_engine.py").read_text())
    info = folder / "acme_plain-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-plain\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rlmq.generation_engines]\nplain = acme_plain:PlainEngine\nbroken = acme_plain_gone:Engine\n"
    )
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


ENGINES = ["hf", "hf-fixed", "plain"]


@pytest.fixture(scope="module", params=[(name, tied) for name in ENGINES for tied in (False, True)], ids=str)
def bench(
    request: pytest.FixtureRequest, model_folder: Callable[[bool], str], third_party: None
) -> Iterator[Bench]:
    """An engine of each kind on an untied and on a tied model; one for all tests of a file."""
    torch.set_num_threads(1)
    name, tied = request.param
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    folder = model_folder(tied)
    options: dict[str, Any] = {}
    if name == "http":
        options = request.getfixturevalue("openai_server")(folder)
    engine_name = name.removesuffix("-fixed")
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
    close = getattr(engine, "close", None)
    if close is not None:
        close()
