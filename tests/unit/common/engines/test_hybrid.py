"""The hybrid engine on up to 8 forked gloo ranks, against transformers with the weights of the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from unit.common.engines.parallel_ranks import PROMPTS, generate, mesh_of
from unit.common.engines.test_parallel_trainer import SIZES, run_tasks

from rlmq.common.engines.decoder_shape import CutTensor, DecoderShape, generation_places, places_of_mesh
from rlmq.common.engines.hf import HfEngine
from rlmq.common.engines.shard_memory import ShardMemory, named
from rlmq.common.layouts.layout import Box
from rlmq.common.layouts.plan import lower_bound
from rlmq.common.layouts.zero_redundancy import Grouping

pytestmark = pytest.mark.timeout(600)

TOLERANCE = 2e-5
MODELS: dict[str, dict[str, Any]] = {
    "even": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False},
    "uneven": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "tie_word_embeddings": True},
}
CASES = (
    ("even", "1-4-2", 1, 2),
    ("even", "1-8-1", 1, 2),
    ("even", "1-8-1", 1, 4),
    ("even", "1-8-1", 1, 8),
    ("even", "1-8-1", 1, 1),
    ("even", "2-4-1", 1, 2),
    ("uneven", "1-4-1", 1, 2),
    ("uneven", "2-2-1", 2, 1),
)
PLAIN = (("even", "1-4-2"), ("uneven", "2-2-1"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind, heads in MODELS.items():
        torch.manual_seed(5)
        folders[kind] = tmp_path_factory.mktemp(kind)
        LlamaForCausalLM(
            LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "hidden_size": 72}, **heads)
        ).save_pretrained(folders[kind])
    return folders


def name_of(kind: str, mesh: str, pp: int, tp: int) -> str:
    return f"{kind} {mesh} to {pp}-{tp}"


@pytest.fixture(scope="module")
def ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    tasks = [
        {
            "do": "switch",
            "name": name_of(kind, mesh, pp, tp),
            "model": str(models[kind]),
            "mesh": mesh,
            "pp": pp,
            "tp": tp,
        }
        for kind, mesh, pp, tp in CASES
    ]
    plain = [
        {"do": "plain", "name": f"plain {kind} {mesh}", "model": str(models[kind]), "mesh": mesh}
        for kind, mesh in PLAIN
    ]
    fail = {"do": "fail", "name": "fail", "model": str(models["even"]), "mesh": "1-4-1", "pp": 1, "tp": 2}
    return folder, run_tasks(folder, 8, [*tasks, *plain, fail])


@pytest.mark.parametrize(("kind", "mesh", "pp", "tp"), CASES)
def test_the_generation_layout_is_the_unsharded_model_and_training_goes_on_as_if_nothing_had_been(
    models: dict[str, Path], ranks: tuple[Path, dict[str, Any]], kind: str, mesh: str, pp: int, tp: int
) -> None:
    folder, found = ranks
    name = name_of(kind, mesh, pp, tp)
    here = [rank for rank in found[name] if rank]
    model = AutoModelForCausalLM.from_pretrained(folder / name / "served").eval()
    # logits of the same step's weights, whole on every rank
    with torch.no_grad():
        exact = torch.stack([model(input_ids=torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    for rank in here:
        torch.testing.assert_close(torch.tensor(rank["logits"]), exact, atol=TOLERANCE, rtol=0)
    # tokens of the engine that holds the whole model, greedy and drawn, on every rank
    whole = HfEngine(model, pad_id=0, eos_ids=(64,), max_batch=4)
    whole.serve(7)
    expected = generate(whole)
    assert all(rank["responses"] == expected for rank in here)
    # what is trained stayed where it was, and the fewest bytes moved
    assert [rank["changed"] for rank in here] == [[]] * len(here)
    assert [rank["balance"] for rank in here] == [0] * len(here)
    grouping, shape = Grouping(mesh_of(mesh), pp, tp), DecoderShape.of(model.config)
    layouts = [
        shape.layout(places, "F32") for places in (places_of_mesh(grouping.training), generation_places(grouping))
    ]
    assert sum(rank["sent"] for rank in here) == lower_bound(*layouts)
    assert sum(rank["foreign"] for rank in here) == lower_bound(*layouts)
    # and the next step is the same to the last bit
    if (kind, mesh) in PLAIN:
        after, plain = (
            load_file(folder / n / "after" / "model.safetensors") for n in (name, f"plain {kind} {mesh}")
        )
        assert all(torch.equal(after[weight], plain[weight]) for weight in plain)


def test_a_switch_that_fails_leaves_every_rank_in_the_training_layout(ranks: tuple[Path, dict[str, Any]]) -> None:
    here = ranks[1]["fail"][:4]
    # a rank without the memory: nobody switches, all say so, nothing is held, and both layouts work afterwards
    assert all("entered" not in one and "switch to the generation layout" in one["failed"] for one in here if one)
    assert "too little memory on rank 1" in here[0]["failed"]
    assert "allocate" in here[1]["failed"]
    assert here[0]["responses"] == here[3]["responses"]
    # a rank that dies in the next switch: the others end it in time
    assert here[2] == {}
    assert all("every rank" in one["died"] for one in (here[0], here[1], here[3]))
    assert [one["balance"] for one in (here[0], here[1], here[3])] == ["0 0"] * 3


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_memory_of_other_ranks_shards_is_given_back_and_the_own_one_kept() -> None:
    # given a matrix cut in its second dimension, of which this rank trains the second quarter
    matrix = CutTensor("down", (4096, 4096), "intermediate", dim=1)
    whole, own = Box((0, 0), (4096, 4096)), Box((0, 1024), (4096, 2048))
    memory = ShardMemory([matrix], {"down": own}, {"down": whole}, torch.float32, torch.device("cpu"))
    before = anonymous_bytes()
    memory.generation["down"].fill_(3.0)
    filled = anonymous_bytes()
    memory.release()
    after = anonymous_bytes()
    assert filled - before > 60 << 20
    assert filled - after > 46 << 20
    assert named(matrix, memory.training["down"]).shape == (4096, 1024)
    assert bool((memory.training["down"] == 3.0).all())
    assert memory.foreign_bytes == 48 << 20
