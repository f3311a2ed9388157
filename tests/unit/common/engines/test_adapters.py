"""Adapters beside the base: the reference policy, what peft reads, and what rollout workers are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from unit.common.engines.torch_rows import ALGORITHM, LOSS, block, micro_batches, rows_of, tiny_model

from rlmq.common.engines.adapted_engine import AdaptedEngine
from rlmq.common.engines.adapters import Adapters
from rlmq.common.engines.generation import EngineSettings, Request, Sampling
from rlmq.common.engines.hf import make_engine
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.recipe.lora_block import LoraBlock
from rlmq.consumers.file_checkpoints import FileCheckpoints

LORA = LoraBlock(r=4, alpha=8.0)


def trained(kind: str = "llama", lora: LoraBlock = LORA, steps: int = 2, **keys: Any) -> TorchEngine:
    model, rows = tiny_model(kind), rows_of(7)
    engine = TorchEngine(model, block(lora=lora, lr=0.02, **keys), adapters=Adapters(model, lora, 3))
    for _ in range(steps):
        for batch in micro_batches(rows, [range(7)]):
            engine.accumulate(batch, LOSS)
        engine.step(ALGORITHM.denominators([len(response) for response in rows.responses]))
    return engine


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_reference_is_the_model_that_training_began_with(kind: str) -> None:
    (batch,) = micro_batches(rows_of(7), [range(7)])
    first = TorchEngine(tiny_model(kind), block()).logprobs(batch).logprobs
    engine = trained(kind)
    policy = engine.logprobs(batch).logprobs
    torch.testing.assert_close(engine.reference_logprobs(batch), first, atol=2e-6, rtol=0)
    assert float((policy - first).abs().max()) > 1e-2
    assert torch.equal(engine.logprobs(batch).logprobs, policy)
    assert {name for name, weight in engine.model.named_parameters() if weight.requires_grad} == {
        name for name, _ in engine.model.named_parameters() if ".lora_" in name
    }


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_checkpoint_is_a_whole_model_and_an_adapter_that_peft_loads(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    tiny_model(kind).save_pretrained(base)
    engine = trained(kind)
    assert engine.adapters is not None
    saved = FileCheckpoints(tmp_path / "checkpoints").save(
        2,
        dict(engine.shards()),
        engine.state(),
        model_folder=base,
        adapter={**engine.adapters.config(), "base_model_name_or_path": str(base)},
    )
    assert FileCheckpoints(tmp_path / "checkpoints").newest() is not None
    tokens = torch.tensor([[5, 9, 60, 3, 1]])
    with torch.no_grad():
        expected = engine.model(input_ids=tokens).logits
        whole = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)(input_ids=tokens).logits
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), saved / "adapter")
        torch.testing.assert_close(whole, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(adapted(input_ids=tokens).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_from_its_state_bit_for_bit(dtype: str) -> None:
    whole, half = trained(steps=3, dtype=dtype), trained(steps=2, dtype=dtype)
    again = trained(steps=0, dtype=dtype)
    again.load_state({name: value.clone() for name, value in half.state().items()})
    rows = rows_of(7)
    for batch in micro_batches(rows, [range(7)]):
        again.accumulate(batch, LOSS)
    again.step(ALGORITHM.denominators([len(response) for response in rows.responses]))
    found = dict(again.shards())
    assert all(torch.equal(weight, found[name]) for name, weight in whole.shards())
    with pytest.raises(IntegrityError, match=r"train\.lora"):
        TorchEngine(tiny_model(), block(dtype=dtype)).load_state(half.state())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_make_a_rollout_worker_serve_the_very_merged_weights(dtype: str, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    settings = EngineSettings(str(tmp_path), dtype, 4, 64, (63,), 0, str)  # type: ignore[arg-type]
    inner, alone = make_engine(settings), LORA.model_copy(update={"sync": "adapters"})
    engine, trainer = AdaptedEngine(inner, str(tmp_path), alone), trained(lora=alone, dtype=dtype)
    part = trainer.part()
    assert {spec.name: spec for spec in part.note.tensors} == {spec.name: spec for spec in engine.layout().tensors}

    def sync(source: TorchEngine, version: int) -> None:
        engine.begin_load(engine.layout(), version)
        for name, value in source.adapters.alone(source.model.state_dict().items()):  # type: ignore[union-attr]
            engine.load(name.replace(".default.", "."), value.detach())
        engine.commit()

    sync(trainer, 1)
    sync(trained(lora=alone, dtype=dtype, steps=3), 2)  # from the base each time, not on top of the last sum
    sync(trainer, 3)
    served = {name: inner.served(name) for name in dict(trainer.shards())}  # type: ignore[attr-defined]
    assert all(torch.equal(weight, served[name]) for name, weight in trainer.shards())
    engine.submit([Request("one", [5, 9, 60], Sampling(max_tokens=4), 1)])
    (generated,) = [one for _ in range(9) for one in engine.step()]
    assert generated.policy_versions == [3] * len(generated.token_ids)


def test_adapters_that_did_not_all_come_are_not_served(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    inner = make_engine(EngineSettings(str(tmp_path), "float32", 4, 64, (63,), 0, str))
    engine = AdaptedEngine(inner, str(tmp_path), LORA)
    engine.serve(0)
    engine.begin_load(engine.layout(), 1)
    with pytest.raises(IntegrityError, match="got 0, expected 28"):
        engine.commit()
    engine.abandon()
    assert (engine.state, engine.version) == ("serving", 0)


@pytest.mark.parametrize(
    ("targets", "told"),
    [(("nowhere",), "not found"), (("lm_head",), "not tied to the embedding"), (("embed_tokens",), "linear")],
)
def test_places_that_cannot_have_one_are_refused(targets: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        Adapters(tiny_model(), LoraBlock(r=4, targets=targets), 0)
