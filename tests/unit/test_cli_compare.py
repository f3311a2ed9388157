"""`rlmq diff`, `report`, `sweep`, `rescore` and `train-offline`: what they compute before anything is run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean, stdev

import pyarrow as pa
import pytest

from rlmq.buffer.recording import RecordingWriter
from rlmq.cli_compare import _axis, first_divergence, grouped
from rlmq.cli_offline import offline_overrides
from rlmq.cli_rescore import Rescored, compared
from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import dump_recipe, load_recipe
from rlmq.common.run_folder import RunFolder
from rlmq.consumers.run_report import activities, band, series

RECIPES = Path(__file__).parents[2] / "recipes"


def make_run(folder: Path, name: str, *overrides: str, losses: tuple[float, ...] = ()) -> RunFolder:
    run = RunFolder(folder / name)
    run.path.mkdir(parents=True)
    run.recipe.write_text(dump_recipe(load_recipe(RECIPES / "tiny.yaml", overrides).recipe))
    lines = [{"kind": "train", "step": n, "loss": loss, "step_s": n * 0.1} for n, loss in enumerate(losses, 1)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_band_is_students_interval_at_steps_that_all_runs_have() -> None:
    values = [0.1, 0.4, 0.5]
    found = band([{1: value, 2: 0.0, 3 + n: 1.0} for n, value in enumerate(values)])
    assert sorted(found) == [1, 2]
    assert found[1][0] == pytest.approx(mean(values))
    assert found[1][1] == pytest.approx(4.303 * stdev(values) / math.sqrt(3))
    assert found[2] == (0.0, 0.0)
    assert band([{1: 2.0}]) == {1: (2.0, 0.0)}


def test_runs_that_differ_in_their_seed_alone_are_one_group(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"r{seed}", f"run.seed={seed}") for seed in (1, 2)]
    other = make_run(tmp_path, "x", "train.lr=1e-3")
    assert list(grouped([*runs, other]).values()) == [runs, [other]]


def test_the_first_step_with_other_figures_is_named_whatever_the_clock_says(tmp_path: Path) -> None:
    a = make_run(tmp_path, "a", losses=(0.5, 0.25, 0.125))
    b = make_run(tmp_path, "b", losses=(0.5, 0.25, 0.5))
    b.metrics.write_text(b.metrics.read_text().replace('"step_s": 0.1', '"step_s": 9'))
    assert first_divergence(a, b) == (3, "loss")
    assert first_divergence(a, a) == (None, "steps 1 to 3 are the same in their figures")
    assert series(a, "loss") == {1: 0.5, 2: 0.25, 3: 0.125}


def test_what_processes_did_is_read_from_what_the_controller_heard(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    heard = [
        (10.0, 0, "idle"),
        (11.0, 0, "training"),
        (11.5, 1, "generating"),
        (13.0, 0, "idle"),
        (14.0, 1, "idle"),
    ]
    lines = [{"at": at, "event": {"type": "heard", "role": "w", "rank": r, "activity": a}} for at, r, a in heard]
    run.control_log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert activities(run) == {"w-0": [("training", 1.0, 3.0)], "w-1": [("generating", 1.5, 4.0)]}


def test_axes_of_a_sweep() -> None:
    assert _axis("train.lr=1e-3, 5e-3") == ("train.lr", ["1e-3", "5e-3"])
    assert _axis("train.betas=[0.9,0.99],[0.8,0.9]") == ("train.betas", ["[0.9,0.99]", "[0.8,0.9]"])
    with pytest.raises(UsageError, match="key=value,value"):
        _axis("train.lr")


def test_pairs_that_a_new_reward_turns_round_are_counted() -> None:
    made = [
        Rescored({"sample_id": f"{group}{n}", "group_id": group, "reward": old}, new, {})
        for group, pairs in {"a": [(0.0, 1.0), (1.0, 0.0), (2.0, 3.0)], "b": [(5.0, 5.0), (None, 1.0)]}.items()
        for n, (old, new) in enumerate(pairs)
    ]
    figures = compared(made)
    assert (figures["samples"], figures["without_verdict_before"], figures["changed"]) == (5, 1, 3)
    assert (figures["pairs_in_the_same_order"], figures["pairs_in_the_other_order"]) == (2, 1)
    assert figures["mean_before"] == 2.0
    assert figures["mean_now"] == 2.25
    old, new = [0.0, 1.0, 2.0, 5.0], [1.0, 0.0, 3.0, 5.0]
    x, y = [v - 2.0 for v in old], [v - 2.25 for v in new]
    expected = sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(
        sum(a * a for a in x) * sum(b * b for b in y)
    )
    assert figures["correlation"] == pytest.approx(expected, rel=1e-12)


def test_recordings_become_the_data_of_a_recipe(tmp_path: Path) -> None:
    for name in ("a", "b"):
        RecordingWriter(tmp_path / name).add("train", 1, pa.table({"sample_id": ["train-000001-0000-00"]}))
    places = [f"{tmp_path}/a:3", f"{tmp_path}/b"]
    values = offline_overrides(RECIPES / "tiny.yaml", places, ["train.lr=0.1"], tmp_path, "groups")
    recipe = load_recipe(RECIPES / "tiny.yaml", values).recipe
    assert recipe.training_sets == {"r1": f"{tmp_path}/a", "r2": f"{tmp_path}/b"}
    assert recipe.data.mixture[0].weights == {"r1": 3.0, "r2": 1.0}
    assert (recipe.data.recorded, recipe.data.eval, recipe.run.name) == ("groups", None, "tiny-offline")
    assert recipe.algorithm.old_logprobs == "rollout"
    assert set(recipe.workers()) == {"prompts", "actor", "recorder"}
    steps = offline_overrides(RECIPES / "tiny.yaml", [f"{tmp_path}/a"], ["run.name=x"], tmp_path, "steps")
    recipe = load_recipe(RECIPES / "tiny.yaml", steps).recipe
    assert (recipe.algorithm.old_logprobs, recipe.run.name, recipe.data.recorded) == ("trainer", "x", "steps")
    with pytest.raises(UsageError, match="a recording, or a run in"):
        offline_overrides(RECIPES / "tiny.yaml", ["nowhere"], [], tmp_path, "groups")
