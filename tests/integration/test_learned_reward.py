"""A reward model that the run itself trains, on part of its rows."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from integration.test_resume import reach_step

pytestmark = pytest.mark.timeout(300)

RECIPE = Path(__file__).parents[2] / "recipes" / "learned_reward.yaml"


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    parts = sorted((run / "samples").glob(f"train-{step:06d}-*.parquet"))
    found = {row["sample_id"]: row for part in parts for row in pq.read_table(part).to_pylist()}
    return [found[name] for name in sorted(found)]


def score(model: Any, row: dict[str, Any]) -> float:
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits[0, 0])


def test_the_model_of_each_step_scores_the_next_ones_rows_though_it_is_killed(cli: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    # given a run whose reward model is killed -9 after its first step
    options = ("train.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=9", "reward_model.epochs=1")
    process = cli.start("up", RECIPE, *options)
    run = reach_step(cli, "learned_reward", 1)
    [role] = [p for p in cli.processes() if "worker" in p.cmdline() and "reward_model" in p.cmdline()]
    os.kill(role.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output

    lines = cli.metrics("learned_reward")
    entries = [json.loads(line)["entry"] for line in (run / "batch_log.jsonl").read_text().splitlines()]
    for step in (3, 4):
        rows = rows_of(run, step)
        # then rows have the scores of the checkpoint of the step before, by transformers in float64, and no other
        folder = run / "reward_model_checkpoints" / f"step-{step - 1:06d}"
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
        assert [row["learned_reward"] for row in rows[:8]] == pytest.approx(
            [score(model, r) for r in rows[:8]], rel=1e-4
        )
        # and the reward is the weighted sum
        for row in rows:
            assert row["reward"] == pytest.approx(0.5 * row["reward.letters"] + 0.1 * row["learned_reward"])
        # and the model learned from the best and worst of some groups: a part of them, no pair twice
        [update] = entries[step - 1]["beside"]["reward_model"]
        members = sorted(index for share in update["micro_batches"] for micro in share for index in micro)
        pairs = list(zip(members[::2], members[1::2], strict=True))
        margins = []
        for pair in pairs:
            assert len({rows[index]["group_id"] for index in pair}) == 1
            group = [row for row in rows if row["group_id"] == rows[pair[0]]["group_id"]]
            truths = [row["reward.letters"] for row in group]
            worst, best = sorted((rows[index] for index in pair), key=lambda row: row["reward.letters"])
            assert (worst["reward.letters"], best["reward.letters"]) == (min(truths), max(truths))
            margins.append(best["learned_reward"] - worst["learned_reward"])
        assert 0 < len(pairs) <= 4
        # and its loss is Bradley and Terry's
        loss = float(np.mean(np.log1p(np.exp(-np.array(margins)))))
        assert lines[step - 1]["reward_model_loss"] == pytest.approx(loss, rel=1e-4)


def test_labels_are_a_seeded_part_of_the_groups_and_no_verdict_is_no_label() -> None:
    from rlmq.common.recipe.load import load_recipe
    from rlmq.consumers.labels import learned_units, targets

    groups = [f"train-000001-{n:04d}" for n in range(400) for _ in range(3)]
    values: list[float | None] = [float(n % 3) for n in range(1200)]
    values[2], values[3], values[4], values[5] = None, 1.0, 1.0, 1.0

    def units(*overrides: str) -> list[tuple[int, ...]]:
        recipe = load_recipe(RECIPE, overrides).recipe
        return learned_units(groups, [[1]] * 1200, {"reward.letters": values}, recipe)

    everything = units("reward_model.share=1.0")
    assert everything[0] == (1, 0)  # the best one has no verdict
    assert len(everything) == 399  # a group of equal values has no pair
    part = units("reward_model.share=0.5")
    assert 150 < len(part) < 250
    assert part == units("reward_model.share=0.5") != units("reward_model.share=0.5", "run.seed=8")
    assert set(part) < set(everything)
    single = units("reward_model.share=1.0", "reward_model.loss=regression")
    assert single[:3] == [(0,), (1,), (3,)]
    assert targets(single, values)[1] == 1.0
    assert targets(everything, values) == {
        row: sign for pair in everything for row, sign in zip(pair, (1, -1), strict=True)
    }
