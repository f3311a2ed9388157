"""The reference role over a real store: log-probs against a float64 forward of plain transformers."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.tables import sample_tables
from rlmq.common.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, arrow_schema
from rlmq.common.flow import sample_columns, sample_flow
from rlmq.common.logs import configure
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import WorkerContext
from rlmq.producers.reference import ReferenceRole

TEMPERATURE = 0.7
FLOW = sample_flow(["f"], reference=True)
COLUMNS = sample_columns(FLOW)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
RESPONSES = [[10, 11], [12, 13, 14, 15], []]

Open = Callable[..., tuple[ReferenceRole, RedisStore]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def open_role(model_folder: Path, redis_url: str) -> Iterator[Open]:
    stores: list[RedisStore] = []

    def begin(**more: Any) -> tuple[ReferenceRole, RedisStore]:
        recipe = Recipe.model_validate(
            {
                "run": {"name": "t"},
                "model": str(model_folder),
                "algorithm": {"name": "reinforce_pp", "kl_coef": 0.1},
                "data": {"train": "t.jsonl"},
                "rollout": {"temperature": TEMPERATURE},
                "reward": ({"function": "r.py:f"},),
                "train": {"steps": 3},
                **more,
            }
        )
        store = RedisStore(redis_url, run_id="t", worker="test")
        stores.append(store)
        store.open(sample_tables(FLOW, capacity_rows=100))
        context = WorkerContext(
            recipe=recipe,
            recipe_folder=model_folder,
            run=RunFolder(model_folder / "runs" / "t-1"),
            role="reference",
            rank=0,
            world_size=1,
            incarnation=1,
            calls=None,  # type: ignore[arg-type]  # a reference worker makes no calls
            log=configure("reference", 0, stream=io.StringIO()),
            activity=lambda _: None,
            progress=lambda: None,
            serving=lambda _: None,
            desired=lambda: None,
            stopping=lambda: False,
        )
        return ReferenceRole(context, store), store

    yield begin
    for store in stores:
        store.close()


def put_generated(store: RedisStore, member: str = "00") -> None:
    prompts = [
        {
            "sample_id": f"train-000001-{i:04d}-{'00' if i else member}",
            "group_id": f"train-000001-{i:04d}",
            "step": 1,
            "source": "train",
            "prompt_ids": ids,
            "prompt_text": "q",
            "record": "{}",
        }
        for i, ids in enumerate(PROMPTS)
    ]
    batch = pa.RecordBatch.from_pylist(prompts, schema=arrow_schema(PROMPT_COLUMNS))
    store.put("train", batch, producer="prompts", sequence=1, group_size=1)
    claim = store.claim("train", "rollout", max_rows=10)
    assert claim is not None
    made = [
        {
            "response_ids": ids,
            "response_text": "a",
            "rollout_logprobs": [0.0] * len(ids),
            "loss_mask": [True] * len(ids),
            "policy_versions": [0] * len(ids),
            "truncated": False,
        }
        for ids in RESPONSES
    ]
    store.write(claim, pa.RecordBatch.from_pylist(made, schema=arrow_schema(ROLLOUT_COLUMNS)), ack=True)


def written(store: RedisStore) -> list[list[float]]:
    """What the reference wrote, read as the reward stage, which waits for nothing else."""
    claim = store.claim("train", "reward", max_rows=10, columns=("ref_logprobs",))
    assert claim is not None
    found: list[list[float]] = claim.rows.column("ref_logprobs").to_pylist()
    return found


def expected(folder: Path) -> list[list[float]]:
    """One row at a time, unpadded, in float64."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0] / TEMPERATURE
        table = torch.log_softmax(logits, -1)
        rows.append([table[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)])
    return rows


@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_are_those_of_the_starting_model(open_role: Open, model_folder: Path, deterministic: bool) -> None:
    role, store = open_role(deterministic=deterministic)
    put_generated(store)

    assert role.work()

    found = written(store)
    for row, wanted in zip(found, expected(model_folder), strict=True):
        assert row == pytest.approx(wanted, abs=2e-5)
    assert store.counts("train").acked["reference"] == 3
    assert not role.work()


def test_small_micro_batches_give_the_same_rows(open_role: Open, model_folder: Path) -> None:
    role, store = open_role(train={"steps": 3, "micro_batch_tokens": 8})
    put_generated(store)

    role.work()

    for row, wanted in zip(written(store), expected(model_folder), strict=True):
        assert row == pytest.approx(wanted, abs=2e-5)


def test_greedy_rows_have_no_logprobs(open_role: Open, model_folder: Path) -> None:
    role, store = open_role()
    put_generated(store, member="greedy")

    assert role.work()

    greedy, *others = written(store)
    assert greedy is None
    for row, wanted in zip(others, expected(model_folder)[1:], strict=True):
        assert row == pytest.approx(wanted, abs=2e-5)
    assert store.counts("train").acked["reference"] == 3
