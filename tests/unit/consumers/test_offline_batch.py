"""A batch of pairs: what is read of it, and its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rlmq.common.algorithms import algorithm_of
from rlmq.common.columns import DATA_COLUMNS, REFERENCE_COLUMNS, arrow_schema
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.loss_block import LossBlock
from rlmq.common.recipe.schema import Recipe
from rlmq.consumers.batch import Batch, batch_columns, plan_loss, plan_step, read_batch

PAIRS = 5


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    def made(*overrides: str) -> Recipe:
        (tmp_path / "r.yaml").write_text(
            "run: {name: r}\nmodel: m\nalgorithm: {name: dpo}\ndata: {train: t.jsonl}\n"
            "train: {steps: 1, micro_batch_tokens: 1}\n"
        )
        return load_recipe(tmp_path / "r.yaml", overrides).recipe

    return made


def rows(*, without: str = "") -> pa.RecordBatch:
    """Five pairs of different lengths, in the order of nobody."""
    found = []
    for pair in range(PAIRS):
        for place, kind in enumerate(("chosen", "rejected")):
            tokens = [1] * (1 + pair + place)
            found.append(
                {
                    "sample_id": f"train-000001-{pair:04d}-{kind}",
                    "group_id": f"train-000001-{pair:04d}",
                    "prompt_ids": [5, 6],
                    "response_ids": tokens,
                    "loss_mask": [True] * len(tokens),
                    "truncated": False,
                    "ref_logprobs": [-1.0] * len(tokens),
                }
            )
    kept = [row for row in found if row["sample_id"] != without]
    np.random.default_rng(0).shuffle(kept)  # type: ignore[arg-type]
    return pa.RecordBatch.from_pylist(kept, schema=arrow_schema((*DATA_COLUMNS, *REFERENCE_COLUMNS)))


def read(recipe: Recipe, *, without: str = "") -> Batch:
    algorithm = algorithm_of(recipe)
    return read_batch(rows(without=without).select(list(batch_columns(algorithm))), algorithm, {})


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_pairs_are_never_cut(recipe: Any, ranks: int, mini_batches: int) -> None:
    made = recipe(f"train.mini_batches={mini_batches}")
    batch = read(made)
    entry = plan_step(batch, [], step=1, recipe=made, algorithm=algorithm_of(made), world_size=ranks)
    micros = [micro for update in entry.updates for share in update.micro_batches for micro in share]
    assert len(micros) == PAIRS
    assert all(batch.groups[a] == batch.groups[b] and batch.ids[a].endswith("-chosen") for a, b in micros)
    assert sum(update.denominators[0] for update in entry.updates) == PAIRS
    assert [float(pull[0]) for pull in batch.estimates.advantages] == [1.0, -1.0] * PAIRS


def test_the_row_that_lost_its_partner_is_logged_and_not_learned_from(recipe: Any) -> None:
    made = recipe()
    batch = read(made, without="train-000001-0002-rejected")
    entry = plan_step(batch, [], step=1, recipe=made, algorithm=algorithm_of(made), world_size=2)
    alone = batch.ids.index("train-000001-0002-chosen")
    micros = [micro for share in entry.updates[0].micro_batches for micro in share]
    assert alone not in {row for micro in micros for row in micro}
    assert len(micros) == PAIRS - 1
    assert entry.updates[0].denominators == (PAIRS - 1,)
    assert len(entry.rows) == 2 * PAIRS - 1


def test_nothing_is_read_that_only_generated_rows_have(recipe: Any) -> None:
    batch = read(recipe())
    assert set(batch.ragged()) == {"advantages", "ref_logprobs"}
    assert batch.actor_columns().schema.names == ["advantages"]
    assert np.isnan(batch.rewards).all()


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_loss_has_a_part_in_every_update_even_if_it_has_too_few_rows(recipe: Any, ranks: int) -> None:
    # given an update in seven mini-batches of two passes, and another loss of five pairs
    made = recipe("train.mini_batches=7", "train.epochs=2", "algorithm.name=sft")
    block = LossBlock.model_validate(
        {"name": "pairs", "algorithm": {"name": "dpo"}, "data": "p.jsonl", "weight": 0.5, "prompts_per_step": PAIRS}
    )
    own = made.model_copy(update={"losses": (block,)}).tables["pairs"]
    entry = plan_step(read(made), [], step=1, recipe=made, algorithm=algorithm_of(made), world_size=ranks)
    batch = read(own)
    logged = plan_loss(block, own, algorithm_of(own), batch, [], entry)
    # then it has as many parts, and each pair is in one of each pass, on one rank
    assert len(logged.updates) == len(entry.updates) == 14
    for updates in (logged.updates[:7], logged.updates[7:]):
        micros = [micro for update in updates for share in update.micro_batches for micro in share]
        assert sorted(row for micro in micros for row in micro) == list(range(2 * PAIRS))
        assert all(batch.groups[a] == batch.groups[b] for a, b in micros)
    assert all(len(update.micro_batches) == ranks for update in logged.updates)
    # and its denominators are its own pairs, which a part without any does not divide by zero
    parts = [sum(len(share) for share in update.micro_batches) for update in logged.updates]
    assert [update.denominators for update in logged.updates] == [(float(max(1, n)),) for n in parts]
    assert 0 in parts
