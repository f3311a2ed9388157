"""Nodes of the user's own in whole runs, and a flow from the shell."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from integration.test_resume import reach_step

pytestmark = pytest.mark.timeout(170)

# What a user writes for a safety filter: two lines of Python, and one item of a recipe.
SAFETY = """\
def safe(rows):
    return [len(row.response_text) % 3 > 0 for row in rows]
"""
NODE = """
nodes:
  - name: safety
    function: safety.py:safe
    reads: [response_text]
    writes: {safe: bool}
    keep: safe
    reason: unsafe
"""
REWARD = """\
from pathlib import Path


def letters(completions, safe, **_):
    assert all(safe)
    with Path(__file__).with_name("scored.txt").open("a") as file:
        file.writelines(f"{len(text)}\\n" for text in completions)
    return [float(len(text) % 5) for text in completions]
"""


def recipe(cli: Any, folder: Path, node: str) -> Path:
    """The tiny recipe with a node, in a folder of its own."""
    (folder / "safety.py").write_text(SAFETY)
    (folder / "rewards.py").write_text(REWARD)
    text = cli.tiny.read_text()
    for file in ("tiny_model.py", "tiny_task.py:train", "tiny_task.py:held_out"):
        text = text.replace(f": {file}", f": {cli.root}/recipes/{file}")
    path = folder / "own.yaml"
    path.write_text(text.replace("tiny_task.py:letters", "rewards.py:letters") + node)
    return path


def test_a_safety_filter_ends_unsafe_rows_before_the_reward(cli: Any, tmp_path: Path) -> None:
    # given a filter of at most 12 lines
    assert len((SAFETY + NODE).strip().splitlines()) <= 12
    # when a run trains with it
    done = cli.run("up", recipe(cli, tmp_path, NODE), "train.steps=2", timeout_s=150)
    assert done.code == 0, done.text
    run = cli.newest_run("tiny")
    files = sorted((run / "samples").glob("train-*.parquet"))
    rows = {row["sample_id"]: row for file in files for row in pq.read_table(file).to_pylist()}
    # then every row of both steps has ended: trained with its reward where it is safe, without one where it is not
    assert len(rows) == 2 * 64
    unsafe = {name for name, row in rows.items() if len(row["response_text"]) % 3 == 0}
    assert 0 < len(unsafe) < len(rows)
    assert {name for name, row in rows.items() if row["reward"] is None} == unsafe
    assert {name for name, row in rows.items() if row["advantages"] is None} == unsafe
    metrics = cli.metrics("tiny")
    assert [line["samples"] + line["filtered"] for line in metrics] == [64, 64]
    assert sum(line["filtered"] for line in metrics) == len(unsafe)
    # and the reward function saw no unsafe response, of training or evaluation
    seen = (tmp_path / "scored.txt").read_text().split()
    assert seen and not [length for length in seen if int(length) % 3 == 0]


def test_a_flow_runs_from_the_shell(cli: Any, tmp_path: Path) -> None:
    # given the flow of the tutorial: rollout, a filter that refuses to paint, and a reward, as lambdas
    script, folder = cli.root / "docs" / "tutorials" / "safety_node.py", tmp_path / "flow"
    prompts = "['Name a bird: ', 'Paint a boat: ', 'Name a lamp: ']"
    argv = [sys.executable, script, "--prompts", prompts, "--max-tokens", "8", "--folder", folder]
    done = subprocess.run(
        [str(word) for word in argv],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=tmp_path,
    )
    # then there is a line per node and the rewards of what came through
    assert done.returncode == 0, done.stdout + done.stderr
    rollout, safety, reward, rewards = done.stdout.splitlines()
    assert re.fullmatch(r"\[rollout\] 3 responses in \d+\.\d s", rollout)
    assert re.fullmatch(r"\[safety\] 3 samples in \d+\.\d s, 1 filtered", safety)
    assert re.fullmatch(r"\[reward\] 2 samples in \d+\.\d s", reward)
    [samples] = folder.glob("runs/flow-*/samples/eval-000000.parquet")
    rows = pq.read_table(samples).sort_by("sample_id").to_pylist()
    told = [round(row["reward"], 4) for row in rows]
    assert len(told) == 2
    assert rewards == f"rewards: {told}"
    # and no process of it is left
    left = [
        one.pid for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or ())
    ]
    assert left == []


def test_a_wrong_flow_is_refused_before_it_starts(cli: Any, tmp_path: Path) -> None:
    # a missing column, a second writer, and a function that is not there: one message each, exit 2
    path = recipe(cli, tmp_path, NODE)
    good = path.read_text()
    for before, after, message in (
        ("reads: [response_text]", "reads: [response_txt]", "node safety reads: got 'response_txt'"),
        ("{safe: bool}", "{safe: bool, reward: float}", "column reward: got two writers"),
        ("safety.py:safe", "safety.py:saef", "Did you mean safety.py:safe?"),
        ("name: safety", "name: actor", "the name 'actor'"),
    ):
        path.write_text(good.replace(before, after))
        done = cli.run("check", path)
        assert done.code == 2, done.text
        assert message in done.err


@pytest.mark.timeout(300)
def test_a_node_joins_a_live_run_and_sees_what_ends_from_then_on(cli: Any, tmp_path: Path) -> None:
    # given a run that is paused after its first step, and a node in a file of its own
    (tmp_path / "judge.py").write_text(
        "def judged(rows):\n"
        "    lengths = [len(row.response_text) for row in rows]\n"
        "    return {'length': lengths, 'praise': [row.reward > 0.5 for row in rows]}\n"
    )
    item = tmp_path / "judge.yaml"
    good = "{name: judge, function: judge.py:judged, reads: [response_text, reward], writes: "
    good += "{length: int, praise: bool}}"
    process = cli.start("up", cli.tiny, "train.steps=300", "data.eval=null", "rollout.max_response_tokens=8")
    run = reach_step(cli, "tiny", 1)
    paused = cli.run("pause")
    assert paused.code == 0, paused.text
    open_step = len(cli.metrics("tiny")) + 1
    assert cli.run("set", f"train.steps={open_step + 5}").code == 0
    # then an item that cannot join is refused, and another one joins
    for before, after, message in (
        ("reads: [response_text, reward]", "reads: [score]", "node judge reads: got 'score'"),
        ("praise: bool}", "praise: bool}, keep: praise", "keep, before or scope"),
    ):
        item.write_text(good.replace(before, after))
        refused = cli.run("node", "add", item)
        assert (refused.code, message in refused.text) == (2, True), refused.text
    item.write_text(good)
    added = cli.run("node", "add", item)
    assert added.code == 0, added.text
    log = run / "logs" / "judge-0.log"
    cli.wait_until(lambda: log.is_file() and "ready" in log.read_text(), "the judge is ready", 90)
    assert cli.run("resume").code == 0
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "judge-0 joins the run" in output
    # and it saw every row of the steps from then on, with what it made of it; the run's own rows know nothing of it
    samples = run / "samples"
    rows = {row["sample_id"]: row for path in samples.glob("train-*") for row in pq.read_table(path).to_pylist()}
    seen = {row["sample_id"]: row for path in samples.glob("judge-*") for row in pq.read_table(path).to_pylist()}
    whole = range(open_step + 1, open_step + 4)  # the open one may have had its rows, the last one may be too late
    assert len(rows) == (open_step + 5) * 64
    assert set(whole) <= {row["step"] for row in seen.values()}
    for name, row in rows.items():
        assert "praise" not in row
        if row["step"] in whole:
            told = {"length": len(row["response_text"]), "praise": row["reward"] > 0.5}
            assert seen[name] == {"sample_id": name, "step": row["step"], **told}


SCORERS = """\
import time
from pathlib import Path

HERE = Path(__file__).parent


def meet(own, other):
    \"\"\"Return when both have begun; a run that lets one wait for the other would never come here.\"\"\"
    (HERE / own).touch()
    until = time.monotonic() + 60
    while not (HERE / other).exists():
        assert time.monotonic() < until, f"{other} has not begun"
        time.sleep(0.01)
    time.sleep(0.05)


def helpful(completions, **_):
    meet("helpful", "harmless")
    return [None if len(text) % 2 else float(len(text)) for text in completions]


def harmless(completions, **_):
    meet("harmless", "helpful")
    return [0.25] * len(completions)


class Counter:
    def __init__(self):
        self.calls = 0

    def __call__(self, rows):
        self.calls += 1
        return [self.calls * 1000 + len(row.response_text) for row in rows]
"""
THREE = """
nodes:
  - {name: helper, scorer: {function: "scorers.py:helpful", timeout_s: 90}, writes: {helpful: float}}
  - {name: guard, scorer: {function: "scorers.py:harmless", timeout_s: 90}, writes: {harmless: float}}
  - {name: counter, function: "scorers.py:Counter", reads: [response_text], writes: {counted: int}}
reward:
  - {function: "rewards.py:letters", weight: 0.0}
  - {column: helpful, weight: 0.5}
  - {column: harmless, weight: -2.0}
"""


def spans(run: Path, role: str) -> list[tuple[float, float]]:
    """When the role worked on each claim, as its log tells."""
    found = []
    for line in (run / "logs" / f"{role}-0.log").read_text().splitlines():
        if match := re.match(r"(\S+)Z \[info\] node\.done.* seconds=([\d.]+)", line):
            end = datetime.fromisoformat(match[1]).timestamp()
            found.append((end - float(match[2]), end))
    return found


def test_two_scorers_of_one_kind_are_roles_that_work_side_by_side_and_a_class_is_a_node(
    cli: Any, tmp_path: Path
) -> None:
    (tmp_path / "scorers.py").write_text(SCORERS)
    path = recipe(cli, tmp_path, THREE)
    path.write_text(re.sub(r"^reward: \[.*$", "", path.read_text(), count=1, flags=re.MULTILINE))
    (tmp_path / "rewards.py").write_text(REWARD.replace(", safe,", ",").replace("    assert all(safe)\n", ""))
    done = cli.run("up", path, "train.steps=1", "data.eval=null", timeout_s=150)
    assert done.code == 0, done.text
    # then each scorer had a process of its own, and their first claims overlap: each ended after the other began
    run = cli.newest_run("tiny")
    (helper, *_), (guard, *_) = spans(run, "helper"), spans(run, "guard")
    assert max(helper[0], guard[0]) < min(helper[1], guard[1])
    # and the reward is made of their columns; null is no verdict of one of them
    rows = [row for file in (run / "samples").glob("train-*.parquet") for row in pq.read_table(file).to_pylist()]
    assert len(rows) == 64
    for row in rows:
        size = len(row["response_text"])
        assert row["helpful"] == (None if size % 2 else float(size))
        assert row["reward"] == (0.5 * size if size % 2 == 0 else 0.0) - 2.0 * 0.25
        assert row["reward.helpful"] == row["helpful"]
        assert row["counted"] % 1000 == size
    assert {row["counted"] // 1000 for row in rows} >= {1}
