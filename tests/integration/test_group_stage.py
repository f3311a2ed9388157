"""Whole runs of algorithms that judge groups before they are trained on: ReMax and DAPO."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlmq.buffer.batch_log import BatchEntry
from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.common.columns import is_greedy
from rlmq.common.run_folder import RunFolder

pytestmark = pytest.mark.timeout(300)

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "algorithms"
COARSE = """
def coarse(completions, **_):
    return [float("a" <= text[:1] <= "z") for text in completions]
def equal(completions, **_):
    return [1.0] * len(completions)
"""


def recorded(folder: Path) -> tuple[list[dict[str, Any]], list[BatchEntry]]:
    files = sorted((folder / "samples").glob("train-*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return rows, list(FileBatchLog(RunFolder(folder).batch_log).entries())


def test_remax_trains_on_what_is_better_than_the_greedy_response(cli: Any) -> None:
    sizes = ("data.prompts_per_step=8", "algorithm.group_size=4")
    done = cli.run("up", RECIPES / "remax.yaml", "train.steps=2", *sizes)
    assert done.code == 0, done.text
    rows, entries = recorded(cli.newest_run("remax"))
    greedy = {row["group_id"]: row for row in rows if is_greedy(row["sample_id"])}
    logged = {row for entry in entries for row in entry.rows}
    assert len(greedy) == 16 and len(logged) == 64 and not any(map(is_greedy, logged))
    for row in rows:
        if row["sample_id"] in logged:
            gain = row["reward"] - greedy[row["group_id"]]["reward"]
            np.testing.assert_allclose(row["advantages"], gain, atol=1e-6)
    assert [line["filtered"] for line in cli.metrics("remax")] == [0, 0]


def test_dapo_trains_on_no_group_of_equal_rewards_and_refills(cli: Any) -> None:
    (cli.folder / "coarse.py").write_text(COARSE)
    reward = f"reward.0.function={cli.folder / 'coarse.py'}:coarse"
    done = cli.run("up", RECIPES / "dapo.yaml", reward, "train.steps=2", "data.shuffle=false", "data.passes=9")
    assert done.code == 0, done.text
    rows, entries = recorded(cli.newest_run("dapo"))
    logged = {row for entry in entries for row in entry.rows}
    rewards: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        rewards[row["group_id"]].append(row["reward"])
        assert (row["sample_id"] in logged) == (row["advantages"] is not None)
    trained = {sample.rpartition("-")[0] for sample in logged}
    assert trained == {group for group, own in rewards.items() if min(own) != max(own)}
    lines = cli.metrics("dapo")
    assert [len(entry.prompts) - 1 for entry in entries] == [line["refills"] for line in lines]
    assert any(line["refills"] for line in lines)
    for entry, line in zip(entries, lines, strict=True):
        assert entry.prompts[0] == 8 and line["groups"] <= 8
        assert line["groups_dropped"] == sum(entry.prompts) - line["groups"]
    used = list(dict.fromkeys(row["group_id"] for row in sorted(rows, key=lambda row: row["sample_id"])))
    texts = {row["group_id"]: row["prompt_text"] for row in rows}
    assert len(used) == sum(sum(entry.prompts) for entry in entries)
    in_file_order = list(dict.fromkeys(texts[group] for group in used))
    assert [texts[group] for group in used] == [in_file_order[i % 24] for i in range(len(used))]


def test_rewards_that_never_differ_end_the_run_with_their_count(cli: Any) -> None:
    # given 12 prompts, all of whose samples are worth the same
    (cli.folder / "coarse.py").write_text(
        COARSE + "def train():\n    return [{'prompt': f'Say {n}'} for n in range(12)]\n"
    )
    given = [
        f"{key}={cli.folder / 'coarse.py'}:{name}"
        for key, name in (("reward.0.function", "equal"), ("data.train", "train"))
    ]
    done = cli.run("up", RECIPES / "dapo.yaml", *given, "algorithm.most_refills=2", "algorithm.group_size=2")
    # then it ends after as many refills as it may, says how many groups that were, and which key to change
    assert done.code == 2, done.text
    rows, entries = recorded(cli.newest_run("dapo"))
    groups = len({row["group_id"] for row in rows})
    assert groups > 12 and len(rows) == 2 * groups
    assert f"rewards of step 1: got equal ones in all {groups} groups, after 2 refills" in done.err
    assert "Raise algorithm.most_refills or group_size" in done.err
    # and nothing was trained
    assert entries == [] and all(row["advantages"] is None for row in rows)
    assert not (cli.newest_run("dapo") / "checkpoints").exists()
