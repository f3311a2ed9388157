"""The `3d` engine on forked gloo ranks, against transformers in float64 on one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from unit.common.engines.parallel_ranks import CLIP, ROWS, SPLIT, STEPS, loss
from unit.common.engines.torch_rows import Rows, block, micro_batches, rows_of

from rlmq.common.engines.decoder_shape import DecoderShape
from rlmq.common.engines.mesh_groups import MeshGroups
from rlmq.common.engines.parallel_decoder import visible
from rlmq.common.engines.parallel_trainer import ParallelEngine
from rlmq.common.errors import UsageError
from rlmq.common.layouts.layout import MeshShape

pytestmark = pytest.mark.timeout(600)

SIZES: dict[str, Any] = {
    "vocab_size": 65,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
TOLERANCE = 2e-5


def make_model(kind: str) -> Any:
    """`uneven`: 3 heads with one key head, tied; `qwen2`: biases, tied; `qwen3`: head norms; `llama`: all
    biases."""
    torch.manual_seed(3)
    if kind == "uneven":
        return LlamaForCausalLM(
            LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True)
        )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, **heads, tie_word_embeddings=True))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, **heads, head_dim=16, tie_word_embeddings=False))
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads, attention_bias=True, mlp_bias=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models whose norms and biases are not those of an untrained model."""
    folders = {}
    for kind in ("llama", "uneven", "qwen2", "qwen3"):
        model = make_model(kind)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 1:
                    weight.add_(0.2 * torch.randn_like(weight))
        folders[kind] = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folders[kind])
    return folders


def run_tasks(folder: Path, ranks: int, tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "unit.common.engines.parallel_ranks", str(folder), str(ranks)]
    done = subprocess.run(
        [*command, *map(json.dumps, tasks)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for task in tasks:
        paths = [folder / task["name"] / f"{rank}.json" for rank in range(ranks)]
        found[task["name"]] = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        errors = [one["error"] for one in found[task["name"]] if "error" in one]
        assert not errors, errors[0]
    return found


# -- one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "uneven", "qwen2", "qwen3"])
def test_logits_of_one_rank_are_those_of_transformers(models: dict[str, Path], kind: str) -> None:
    exact = make_model(kind).from_pretrained(models[kind]).eval()
    engine = ParallelEngine(models[kind], block(), MeshGroups(MeshShape(), 0))
    ids = torch.randint(0, 65, (3, 9), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    real[0, :4] = real[1, :1] = 0
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = exact(input_ids=ids, attention_mask=real, position_ids=positions).logits
        hidden = engine.decoder.layers(engine.decoder.embedded(ids), visible(real, 9), positions)
        found = engine.decoder.logits(hidden)
    torch.testing.assert_close(found[real.bool()], expected[real.bool()], atol=1e-5, rtol=0)


def test_what_is_no_such_decoder_or_does_not_fit_is_refused(models: dict[str, Path]) -> None:
    config = LlamaConfig(**{**SIZES, "hidden_act": "gelu"}, num_attention_heads=4)
    with pytest.raises(UsageError, match="gelu"):
        DecoderShape.of(config)
    with pytest.raises(UsageError, match="3 query heads over 4 ranks"):
        ParallelEngine(models["uneven"], block(), MeshGroups(MeshShape(1, 4, 1), 0))
    with pytest.raises(UsageError, match="3 layers over 4 ranks"):
        ParallelEngine(models["llama"], block(), MeshGroups(MeshShape(4, 1, 1), 0))


def test_a_rank_holds_its_part_and_no_more(models: dict[str, Path]) -> None:
    # given 4 heads and 2 key heads over 4 ranks: two ranks share a key head; 65 token ids: one rank has one more
    share = {"q_proj": 4, "o_proj.weight": 4, "gate": 4, "up": 4, "down_proj.weight": 4, "k_proj": 2, "v_proj": 2}
    expected = {}
    for name, weight in make_model("llama").named_parameters():
        parts = next((parts for part, parts in share.items() if part in name), 1)
        expected[name] = weight.numel() // parts if weight.shape[0] != 65 else 16 * 48
    engine = ParallelEngine(models["llama"], block(), MeshGroups(MeshShape(1, 4, 1), 2))
    assert {name: weight.numel() for name, weight in engine.memory.training.items()} == expected


# -- several -----------------------------------------------------------------------------------------------

CASES = (
    ("llama", "1-2-1", {}),
    ("qwen3", "2-1-1", {}),
    ("uneven", "1-2-1", {}),
    ("uneven", "2-2-1", {}),
    ("qwen2", "3-1-1", {"train": {"activation_checkpointing": True}}),
    ("qwen3", "1-4-1", {}),
    ("qwen2", "1-2-2", {}),
    ("uneven", "1-2-2", {"then": "2-2-1"}),
)


@pytest.fixture(scope="module")
def ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    tasks = [
        {
            "do": "steps",
            "name": f"{kind} {mesh}{more.get('then', '')}",
            "model": str(models[kind]),
            "mesh": mesh,
            **more,
        }
        for kind, mesh, more in CASES
    ]
    return folder, run_tasks(folder, 4, tasks)


def exact_steps(folder: Path, kind: str) -> tuple[Any, list[dict[str, float]]]:
    """The same steps by transformers and torch's AdamW in float64, each row alone."""
    model = make_model(kind).from_pretrained(folder).double().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1)
    found = []
    for step in range(STEPS):
        rows = rows_of(ROWS + step)
        part = rows.part([row for rows_ in SPLIT for row in rows_])
        total = exact_loss(model, part)
        tokens = sum(len(response) for response in rows.responses)
        (total / tokens).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        found.append({"loss": float(total.detach()), "grad_norm": norm})
        optimizer.step()
        optimizer.zero_grad()
    return model, found


def exact_loss(model: Any, rows: Rows) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for prompt, response, advantage in zip(rows.prompts, rows.responses, rows.advantages, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / 0.8
        every = logits.log_softmax(-1)
        chosen = every.gather(1, torch.tensor(response)[:, None]).sum()
        total = total - advantage * chosen + 0.05 * (every.exp() * every).sum()
    return total


@pytest.mark.parametrize(("kind", "mesh", "more"), CASES)
def test_steps_on_a_mesh_are_those_of_one_process(
    models: dict[str, Path], ranks: tuple[Path, dict[str, Any]], kind: str, mesh: str, more: Mapping[str, Any]
) -> None:
    folder, found = ranks
    name = f"{kind} {mesh}{more.get('then', '')}"
    model, expected = exact_steps(models[kind], kind)
    here = [one for one in found[name] if one]
    for step, exact in enumerate(expected):
        losses = sum(one["steps"][step]["loss"] for one in here)
        assert losses == pytest.approx(exact["loss"], rel=TOLERANCE, abs=TOLERANCE)
        assert {one["steps"][step]["grad_norm"] for one in here} == {here[0]["steps"][step]["grad_norm"]}
        assert here[0]["steps"][step]["grad_norm"] == pytest.approx(exact["grad_norm"], rel=TOLERANCE)
    saved = load_file(folder / name / "after" / "model.safetensors")
    for weight_name, weight in model.named_parameters():
        torch.testing.assert_close(saved[weight_name].double(), weight.detach(), atol=TOLERANCE, rtol=0)
    assert saved.keys() == dict(model.named_parameters()).keys()
    # what several ranks hold whole is the same to the last bit
    norm = "model.layers.0.input_layernorm.weight"
    assert len({one["sums"][norm] for one in here if norm in one["sums"]}) == 1


# -- bf16 --------------------------------------------------------------------------------------------------


def test_bf16_shards_are_rounded_masters_and_their_state_makes_the_same_engine(models: dict[str, Path]) -> None:
    # given an engine that made a step too small for bf16
    def made() -> ParallelEngine:
        keys = {"dtype": "bfloat16", "lr": 1e-5, "adam_epsilon": 1e-8}
        return ParallelEngine(models["qwen2"], block(**keys), MeshGroups(MeshShape(), 0))

    engine = made()
    [batch] = micro_batches(rows_of(ROWS), [SPLIT[2]])
    before = {name: value.clone() for name, value in engine.memory.training.items()}
    engine.accumulate(batch, loss)
    engine.step((10.0,))
    state, served = engine.state(), dict(engine.shards())
    moved = sum(not torch.equal(before[name], value) for name, value in engine.memory.training.items())
    assert moved < len(before)
    for name, value in served.items():
        assert value.dtype is torch.bfloat16
        if name != "lm_head.weight":
            assert torch.equal(value, state[f"master.{name}"].bfloat16())
            assert not torch.equal(value.float(), state[f"master.{name}"])
    # when another one takes its state
    other = made()
    other.load_state(state)
    # then their next steps are the same to the last bit
    for one in (engine, other):
        one.accumulate(batch, loss)
        one.step((10.0,))
    assert all(torch.equal(value, other.state()[name]) for name, value in engine.state().items())
