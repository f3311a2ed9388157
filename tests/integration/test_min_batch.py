"""`dataflow.min_batch_for_reward` in a whole run, which is stopped in the middle to see who wrote what."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Interest, RowRange

pytestmark = pytest.mark.timeout(150)

REWARDS = """\
import time
from pathlib import Path


def vowels(completions, n, **_):
    while n[0] >= 40 and not (Path(__file__).parent / "go").exists():
        time.sleep(0.02)
    return [float(sum(c.count(v) for v in "aeiou")) for c in completions]
"""


@pytest.fixture
def recipe(cli: Any, tmp_path: Path, redis_url: str) -> Path:
    """Two steps of 40 rows, generated 8 at once; the reward function waits in the second until `go` is there."""
    rows = [{"prompt": f"Say {n}: ", "n": n} for n in range(80)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
run: {{name: own, seed: 7}}
model: {cli.root}/recipes/tiny_model.py:folder
data: {{train: train.jsonl, prompts_per_step: 40, shuffle: false}}
algorithm: {{name: reinforce_pp}}
rollout: {{max_response_tokens: 8, batch_size_per_device: 8}}
reward: [{{function: "rewards.py:vowels", timeout_s: 100}}]
dataflow: {{min_batch_for_reward: 32}}
train: {{steps: 2, lr: 1.0e-3}}
deadlines: {{step_s: 60}}
redis: {{url: "{redis_url}"}}
"""
    )
    return path


def scored(run: Path) -> list[int]:
    """Rows of each claim of the reward worker, in order."""
    log = (run / "logs" / "reward-0.log").read_text()
    return [int(rows) for rows in re.findall(r"reward\.scored .*\brows=(\d+)", log)]


@dataclass
class Wrote:
    """What one process wrote of a row, and when (Unix time in seconds)."""

    at: list[float] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)
    versions: set[int | None] = field(default_factory=set)
    tag: str = ""


def by_writer(store: RedisStore, *, step: int) -> dict[str, Wrote]:
    """Lineage of a row of the step by writer."""
    found: dict[str, Wrote] = {}
    for piece in store.lineage("train", [RowRange(f"prompts-train.{step}000000", 3, 1)]):
        one = found.setdefault(piece.writer, Wrote(tag=piece.tag))
        assert not one.columns & set(piece.columns), "each column once"
        one.at.append(piece.at)
        one.columns |= set(piece.columns)
        one.versions.add(piece.version)
    return found


def test_rows_are_scored_by_32_with_a_rest_and_their_lineage_shows_the_order(
    cli: Any, recipe: Path, tmp_path: Path, redis_url: str
) -> None:
    # given a run whose first step is trained and whose second is being scored
    began = time.time()
    process = cli.start("up", recipe)
    cli.wait_until(lambda: list((cli.folder / "runs").glob("own-*/metrics.jsonl")), "the run has begun")
    cli.wait_until(lambda: len(cli.metrics("own")) == 1, "one step is trained")
    run = cli.newest_run("own")
    store = RedisStore(redis_url, run_id=run.name, worker="test")
    store.attach(["train"])
    # then the rows of the first were scored as 32 + 8: the step's end, and no deadline, let the rest go
    assert scored(run) == [32, 8]
    # and of the second, too, 32 are with the worker while the rest waits for it
    cli.wait_until(lambda: store.counts("train").leased["reward"] == 32, "32 rows are being scored")
    assert store.wait([Interest("train", "reward", rows=8)], timeout_s=30)
    assert store.counts("train").ready["reward"] == 8
    # and a row of the first has been with each stage in turn, with what each of them told
    written = by_writer(store, step=1)
    assert list(written) == ["prompts-0", "rollout-0", "reward-0", "actor-0"]
    spans = [(began - 1, began), *((min(one.at), max(one.at)) for one in written.values()), (time.time(), math.inf)]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans)), spans
    assert written["prompts-0"].columns >= {"sample_id", "prompt_ids"}
    assert written["rollout-0"].columns >= {"response_ids", "policy_versions"}
    assert written["reward-0"].columns == {"reward", "reward.vowels", "reward_fields"}
    assert written["actor-0"].columns == {"advantages"}
    assert [one.versions for one in written.values()] == [{None}, {0}, {None}, {None}]
    assert re.fullmatch(r"config [0-9a-f]{16} seed 7", written["rollout-0"].tag)
    assert re.fullmatch(r"config [0-9a-f]{16} functions [0-9a-f]{16}", written["reward-0"].tag)
    # and rows of the second were made by the policy that the first trained
    assert by_writer(store, step=2)["rollout-0"].versions == {1}
    assert store.verify("train") == []
    store.close()
    # when the function goes on, then so does the run
    (tmp_path / "go").touch()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out[-2000:] + err[-2000:]
    assert scored(run) == [32, 8, 32, 8]
    assert cli.summary("own")["samples"] == 80
