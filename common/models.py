"""Models on disk: find the folder, load weights and tokenizer. Safetensors only, and no code from model folders."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmq.common.errors import UsageError
from rlmq.common.model_cache import cache_folder, file_lock
from rlmq.common.user_code import is_spec, load_function

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# One process prepares a model (a conversion, a download) while the others of the run wait for it.
PREPARE_TIMEOUT_S = 1800.0
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Names of transformers' one class for everything that `tokenizer.json` says in full.
_GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Weights that are decoded by unpickling, which can run code.
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve_model(model: str, recipe_folder: Path) -> str:
    """The folder of a model.

    Args:
        model: a Hugging Face folder (absolute, or relative to the recipe's folder), `file.py:function` returning
            one (the file likewise), or a hub id.
        recipe_folder: the folder of the recipe.

    Raises:
        UsageError: there is no such model; the message lists what was tried.
    """
    if is_spec(model):
        return _from_function(model, recipe_folder)
    for place in (recipe_folder / Path(model).expanduser(), Path(model).expanduser()):
        if _is_folder(place):
            return str(_checked(place.resolve(), model))
    if _looks_like_hub_id(model):
        return str(_checked(_from_hub(model, recipe_folder), model))
    raise UsageError(
        f"model {model}",
        got="no such folder",
        expected=f"a Hugging Face folder at {recipe_folder / model}, a hub id, or file.py:function",
        remedy=_remedy(model),
    )


def load_model(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model with weights of type `dtype`, on the CPU.

    Raises:
        UsageError: the folder has no model that transformers can load without running the folder's code.
    """
    from transformers import AutoModelForCausalLM

    return _loaded(AutoModelForCausalLM, Path(path), dtype)[0]


def load_scoring_model(path: str | Path, dtype: torch.dtype) -> tuple[PreTrainedModel, bool]:
    """A sequence classifier with one label, on the CPU; and whether its head is a new one on a language model.

    Raises:
        UsageError: the folder has no model that transformers can load without running the folder's code, or one
            with several labels.
    """
    from transformers import AutoModelForSequenceClassification

    model, missing = _loaded(AutoModelForSequenceClassification, Path(path), dtype, heads=("score.",), num_labels=1)
    return model, bool(missing)


def _loaded(
    kind: Any, folder: Path, dtype: torch.dtype, heads: tuple[str, ...] = (), **how: Any
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the tensors of `heads` that the folder lacks."""
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    folder = _checked(folder, str(folder))
    transformers_logging.disable_progress_bar()
    try:
        # Padding masks need sdpa or eager; sdpa never materialises the scores of all heads.
        model: PreTrainedModel
        model, report = kind.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            **how,
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise _unloadable("model", folder, error) from error
    lacking = [name for name in report["missing_keys"] if not name.startswith(heads)]
    if lacking:
        # transformers would fill them with random numbers.
        raise UsageError(
            f"model {folder}",
            got=f"no weights for {min(lacking)}",
            expected="every tensor of a causal language model",
            remedy="Name the folder of a whole model",
        )
    return model, [name for name in report["missing_keys"] if name not in lacking]


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder.

    Raises:
        UsageError: none there that transformers can load.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = _tokenizer_class(Path(path)).from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise _unloadable("tokenizer", Path(path), error) from error
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """What `AutoTokenizer` would take; found without it where the folder says so, since it imports torch."""
    name = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if name in _GENERIC_TOKENIZERS and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def folder_context_length(folder: str | Path) -> int:
    """`context_length` of a model's folder, without torch where `config.json` states it."""
    settings = _read_json(Path(folder) / "config.json")
    text = settings.get("text_config") or settings
    for key in _CONTEXT_KEYS:
        if isinstance(text.get(key), int) and text[key] > 0:
            return int(text[key])
    from transformers import AutoConfig

    return context_length(AutoConfig.from_pretrained(folder, local_files_only=True))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def context_length(config: PretrainedConfig) -> int:
    """Most tokens, prompt and response together, that the model has positions for; a large number if unlimited."""
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in _CONTEXT_KEYS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2**31 - 1


def eos_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end a response: the tokenizer's, and those of `generation_config.json`."""
    from transformers import GenerationConfig

    ids: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if (Path(path) / "generation_config.json").is_file():
        more = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        ids += [more] if isinstance(more, int) else list(more or ())
    return tuple(dict.fromkeys(ids))


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id to fill rectangles with: the pad token, else the end of text, else 0. Padding is masked by place."""
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if value is not None:
            return int(value)
    return 0


def _from_function(spec: str, recipe_folder: Path) -> str:
    function = load_function(spec, recipe_folder, subject="model")
    with _lock(f"{recipe_folder.resolve()}:{spec}", f"preparing model {spec}"):
        folder = function()
    if not isinstance(folder, (str, Path)) or not (recipe_folder / folder).is_dir():
        raise UsageError(f"model {spec}", got=f"{folder!r} from the function", expected="the path of a folder")
    return str(_checked((recipe_folder / folder).resolve(), spec))


def _lock(what: str, purpose: str) -> AbstractContextManager[None]:
    # A hash: the name may be longer than a file's.
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    return file_lock(cache_folder() / "locks" / f"{name}.lock", timeout_s=PREPARE_TIMEOUT_S, purpose=purpose)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name longer than the file system allows
        return False


def _looks_like_hub_id(model: str) -> bool:
    return bool(re.fullmatch(r"[\w][\w.-]{0,95}(/[\w.-]{1,96})?", model))


def _from_hub(model: str, recipe_folder: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with _lock(model, f"downloading model {model}"):
        try:
            return Path(snapshot_download(model, allow_patterns=wanted, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            pass
        try:
            return Path(snapshot_download(model, allow_patterns=wanted))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise UsageError(
                f"model {model}",
                got=f"no folder {recipe_folder / model}, nothing in the hub's cache, from the hub: {_first(error)}",
                expected="a Hugging Face folder, a hub id, or file.py:function",
                remedy=_remedy(model),
            ) from error


def _checked(folder: Path, model: str) -> Path:
    """The folder, if it holds a model that loads without unpickling."""
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise UsageError(
            f"model {model}",
            got=f"no config.json in {folder}" if folder.is_dir() else f"no folder {folder}",
            expected="a Hugging Face folder",
            remedy="Name the folder that holds config.json and model.safetensors",
        )
    if not list(folder.glob("*.safetensors")):
        pickled = [path.name for pattern in _PICKLED for path in folder.glob(pattern)]
        raise UsageError(
            f"model {model}",
            got=f"only {pickled[0]} in {folder}" if pickled else f"no weights in {folder}",
            expected="weights as *.safetensors: other formats can run code when they are read",
            remedy="Where you trust it, run: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)",
        )
    return folder


def _unloadable(what: str, folder: Path, error: BaseException) -> UsageError:
    return UsageError(
        f"{what} {folder}",
        got=_first(error),
        expected=f"a {what} that transformers loads without code from the folder",
        remedy="Try AutoModelForCausalLM.from_pretrained on this folder, and see what it misses",
    )


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _remedy(model: str) -> str:
    return f"Check the name, or download it elsewhere and write the folder: model: ./{model.rsplit('/', 1)[-1]}"
