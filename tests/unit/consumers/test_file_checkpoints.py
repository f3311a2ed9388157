"""Checkpoints: what transformers loads, what damage does, what is kept."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.errors import DependencyError, IntegrityError, UsageError
from rlmq.common.recipe.schema import TrainBlock
from rlmq.consumers.file_checkpoints import FileCheckpoints, reading


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model with tied embeddings, and the files of a tokenizer beside it."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        tie_word_embeddings=True,
    )
    folder = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_own.py").write_text("raise SystemExit('code of a model folder was run')")
    return folder


def trained(model_folder: Path, dtype: str = "float32") -> TorchEngine:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    engine = TorchEngine(model, TrainBlock(steps=3, lr=1e-2, dtype=dtype))  # type: ignore[arg-type]
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 0.1)
    for master in engine._masters:
        master.grad = torch.full_like(master, 0.1)
    engine.step((1.0,))
    return engine


def save(checkpoints: FileCheckpoints, step: int, engine: TorchEngine, model_folder: Path) -> Path:
    return checkpoints.save(
        step,
        weights=dict(engine.shards()),
        model_folder=model_folder,
        optimizer_state=engine.state(),
        rows=(f"train-{step:06d}-0000-00",),
        world_size=2,
        recipe_hash="abc",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_file_bytes", [10**9, 9000])
def test_transformers_loads_a_checkpoint_as_it_was_trained(
    dtype: str, max_file_bytes: int, model_folder: Path, tmp_path: Path
) -> None:
    engine = trained(model_folder, dtype)

    path = save(FileCheckpoints(tmp_path / "c", max_file_bytes=max_file_bytes), 3, engine, model_folder)
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)

    assert path.name == "step-000003"
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert str(loaded.dtype) == f"torch.{dtype}"
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, tensor in engine.shards():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    files = {p.name for p in path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= files
    assert "modeling_own.py" not in files
    assert ("model.safetensors" in files) == (max_file_bytes > 9000)


@pytest.mark.parametrize("max_file_bytes", [10**9, 9000])
def test_optimizer_state_comes_back_bit_for_bit(max_file_bytes: int, model_folder: Path, tmp_path: Path) -> None:
    engine = trained(model_folder, "bfloat16")
    checkpoints = FileCheckpoints(tmp_path / "c", max_file_bytes=max_file_bytes)
    path = save(checkpoints, 1, engine, model_folder)

    state = checkpoints.optimizer_state(path)

    expected = engine.state()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_the_manifest_says_what_is_covered(model_folder: Path, tmp_path: Path) -> None:
    checkpoints = FileCheckpoints(tmp_path / "c")
    path = save(checkpoints, 7, trained(model_folder), model_folder)

    found = checkpoints.newest()

    assert found is not None and found[0] == path
    manifest = found[1]
    assert (manifest.step, manifest.policy_version, manifest.world_size) == (7, 7, 2)
    assert manifest.rows == ("train-000007-0000-00",) and manifest.recipe_hash == "abc"
    assert set(manifest.files) == {p.name for p in path.iterdir()} - {"manifest.json"}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped weight": lambda path: flip(path / "model.safetensors"),
    "flipped optimizer": lambda path: flip(path / "optimizer.safetensors"),
    "cut file": lambda path: os.truncate(path / "model.safetensors", 100),
    "missing file": lambda path: (path / "tokenizer.json").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "cut manifest": lambda path: os.truncate(path / "manifest.json", 20),
    "empty folder": lambda path: [p.unlink() for p in path.iterdir()] and None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(damage: str, model_folder: Path, tmp_path: Path) -> None:
    checkpoints, engine = FileCheckpoints(tmp_path / "c"), trained(model_folder)
    older = save(checkpoints, 1, engine, model_folder)
    newer = save(checkpoints, 2, engine, model_folder)
    DAMAGES[damage](newer)

    with structlog.testing.capture_logs() as logs:
        found = checkpoints.newest()

    assert found is not None and found[0] == older
    (skipped,) = [entry for entry in logs if entry["event"] == "checkpoint_skipped"]
    assert skipped["path"] == str(newer) and skipped["reason"]


def test_damaged_optimizer_files_are_not_loaded(model_folder: Path, tmp_path: Path) -> None:
    checkpoints = FileCheckpoints(tmp_path / "c")
    path = save(checkpoints, 1, trained(model_folder), model_folder)
    flip(path / "optimizer.safetensors")

    with pytest.raises(IntegrityError, match=r"optimizer\.safetensors"):
        checkpoints.optimizer_state(path)


def test_there_is_no_newest_before_the_first(tmp_path: Path) -> None:
    assert FileCheckpoints(tmp_path / "none").newest() is None


def test_a_killed_save_leaves_nothing_that_counts(model_folder: Path, tmp_path: Path) -> None:
    """The process dies between writing and renaming."""
    checkpoints = FileCheckpoints(tmp_path / "c")
    older = save(checkpoints, 1, trained(model_folder), model_folder)
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "import torch\n"
        "from rlmq.consumers import file_checkpoints as f\n"
        "f.FileCheckpoints._put_in_place = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "f.FileCheckpoints(Path(sys.argv[1])).save(2, weights={}, model_folder=sys.argv[2],\n"
        "    optimizer_state={'step': torch.tensor(1)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c"), str(model_folder)], timeout=90, check=False
    )

    assert done.returncode == -signal.SIGKILL
    found = checkpoints.newest()
    assert found is not None and found[0] == older
    assert any(p.name.endswith(".part") for p in (tmp_path / "c").iterdir())
    assert checkpoints.prune(1) == []
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-000001"]


def test_a_full_disk_is_told_and_older_checkpoints_stay(model_folder: Path, tmp_path: Path) -> None:
    checkpoints, engine = FileCheckpoints(tmp_path / "c"), trained(model_folder)
    older = save(checkpoints, 1, engine, model_folder)
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(DependencyError, match=r"step-000002.*room on the disk.*Free disk space"):
            save(checkpoints, 2, engine, model_folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)

    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-000001"]
    found = checkpoints.newest()
    assert found is not None and found[0] == older


def test_a_path_that_is_no_folder_is_told(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")

    with pytest.raises(DependencyError, match="Correct the path"):
        save(FileCheckpoints(tmp_path / "c"), 1, trained(model_folder), model_folder)


def test_a_step_can_be_saved_again(model_folder: Path, tmp_path: Path) -> None:
    checkpoints, engine = FileCheckpoints(tmp_path / "c"), trained(model_folder)
    flip(save(checkpoints, 1, engine, model_folder) / "model.safetensors")

    save(checkpoints, 1, engine, model_folder)

    assert checkpoints.newest() is not None
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-000001"]


def test_prune_keeps_the_newest_and_the_protected(model_folder: Path, tmp_path: Path) -> None:
    checkpoints, engine = FileCheckpoints(tmp_path / "c"), trained(model_folder)
    for step in (1, 2, 3, 4, 10):
        save(checkpoints, step, engine, model_folder)

    removed = checkpoints.prune(2, frozenset({2}))

    assert removed == [1, 3]
    assert checkpoints.steps() == [2, 4, 10]
    with pytest.raises(UsageError):
        checkpoints.prune(0)


def test_a_model_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    with pytest.raises(UsageError, match="config"):
        FileCheckpoints(tmp_path / "c").save(1, weights={}, model_folder=tmp_path / "model", optimizer_state={})

    assert list((tmp_path / "c").iterdir()) == []


def test_the_recorded_type_replaces_an_older_spelling(model_folder: Path, tmp_path: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    config.pop("dtype", None)
    (model_folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))

    path = save(FileCheckpoints(tmp_path / "c"), 1, trained(model_folder, "bfloat16"), model_folder)

    told = json.loads((path / "config.json").read_text())
    assert told["dtype"] == "bfloat16" and "torch_dtype" not in told


def test_a_checkpoint_that_somebody_reads_is_removed_later(model_folder: Path, tmp_path: Path) -> None:
    # given three checkpoints, the oldest of which a script of the user reads
    checkpoints, engine = FileCheckpoints(tmp_path / "c"), trained(model_folder)
    paths = [save(checkpoints, step, engine, model_folder) for step in (1, 2, 3)]
    code = (
        "import fcntl, sys\n"
        "with open(sys.argv[1]) as file:\n"
        "    fcntl.flock(file, fcntl.LOCK_SH)\n"
        "    print('reads', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(paths[0] / "manifest.json")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout is not None and reader.stdout.readline() == "reads\n"
    # when old ones are removed, then that one stays
    with reading(paths[1]) as held:
        assert held
        assert checkpoints.prune(1) == []
    assert checkpoints.prune(1) == [2]
    assert checkpoints.steps() == [1, 3]
    # when nobody reads it any more, then it goes
    reader.communicate(timeout=30)
    assert checkpoints.prune(1) == [1]
    with reading(paths[0]) as held:
        assert not held


def test_what_is_no_checkpoint_is_found_without_reading_it_through(model_folder: Path, tmp_path: Path) -> None:
    checkpoints, engine = FileCheckpoints(tmp_path / "c"), trained(model_folder)
    for step in (1, 2, 3):
        save(checkpoints, step, engine, model_folder)
    (checkpoints.path(1) / "optimizer.safetensors").unlink()
    os.truncate(checkpoints.path(2) / "manifest.json", 20)
    (tmp_path / "c" / ".step-000004.77.part").mkdir()

    told = {path.name: reason for path, reason in (*checkpoints.unfinished(), *checkpoints.incomplete())}

    assert list(told) == [".step-000004.77.part", "step-000001", "step-000002"]
    assert told["step-000001"] == "no optimizer.safetensors" and "manifest" in told["step-000002"]
