"""Runs that generate ahead of the training: how far, with which weights, and to the same weights after any kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from integration.test_resume import reach_step, weights

pytestmark = pytest.mark.timeout(240)

STEPS = ("train.steps=6", "evaluate.every_steps=0")
AHEAD = "schedule.kind=one_step_off"


def staleness(cli: Any, name: str) -> list[tuple[float, float]]:
    """Mean and greatest of each step."""
    return [(line["staleness_mean"], line["staleness_max"]) for line in cli.metrics(name)]


def recorded(run: Path) -> list[dict[str, Any]]:
    rows = {}
    for path in sorted(run.glob("samples/train-*.parquet")):
        rows |= {row["sample_id"]: row for row in pq.read_table(path).to_pylist()}
    return list(rows.values())


@pytest.fixture(scope="module")
def ahead(module_cli: Any) -> str:
    """The weights of an undisturbed run one step off."""
    done = module_cli.run("up", module_cli.tiny, *STEPS, AHEAD, "run.name=calm")
    assert done.code == 0, done.text
    return weights(module_cli.newest_run("calm"), 6)


def test_async_without_staleness_is_sync_and_one_step_off_is_one_step_off(module_cli: Any, ahead: str) -> None:
    # given a synchronous run, and an asynchronous one that may not be ahead
    for name, schedule in (("sync", ()), ("async", ("schedule.kind=async", "schedule.max_staleness=0"))):
        done = module_cli.run("up", module_cli.tiny, *STEPS, *schedule, f"run.name={name}")
        assert done.code == 0, done.text
    # then they end with the same bits, and one step off with others
    same = {weights(module_cli.newest_run(name), 6) for name in ("sync", "async")}
    assert len(same) == 1
    assert ahead not in same
    # and every row of a step is as old as the schedule says
    assert staleness(module_cli, "async") == [(0, 0)] * 6
    assert staleness(module_cli, "calm") == [(0, 0), *[(1, 1)] * 5]


@pytest.mark.parametrize("role", ["rollout", "actor", "controller"])
def test_a_process_that_is_killed_changes_no_bit(cli: Any, ahead: str, role: str) -> None:
    # given a run one step off, in its third step
    process = cli.start("up", cli.tiny, *STEPS, AHEAD, f"run.name=kill-{role}")
    run = reach_step(cli, f"kill-{role}", 2)
    # when one of its processes is killed -9
    words = ["controller"] if role == "controller" else ["worker", role]
    [victim] = [p for p in cli.processes() if all(word in p.cmdline() for word in words) and p.pid != process.pid]
    os.kill(victim.pid, signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    # then the run ends with the undisturbed one's weights
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    assert weights(run, 6) == ahead


def test_responses_go_on_with_new_weights_and_none_is_older_than_the_bound(cli: Any) -> None:
    # given an asynchronous run whose responses are long, and two workers that generate few at once
    own = ("rollout.max_response_tokens=160", "rollout.batch_size_per_device=16", "placement.rollout.workers=2")
    schedule = ("schedule.kind=async", "schedule.max_staleness=2", "deterministic=false")
    done = cli.run("up", cli.tiny, *STEPS, *own, *schedule, "run.name=loose", timeout_s=200)
    assert done.code == 0, done.text
    # then each token has a log-prob and its version, which never falls; no row is too old, lost, or there twice
    rows = recorded(cli.newest_run("loose"))
    assert len(rows) == 6 * 64
    for row in rows:
        versions = row["policy_versions"]
        assert len(versions) == len(row["response_ids"]) == len(row["rollout_logprobs"]) <= 160
        assert versions == sorted(versions)
        assert 0 <= row["step"] - 1 - versions[0] <= 2
    assert max(found for _, found in staleness(cli, "loose")) <= 2


def test_what_needs_the_step_before_is_refused_by_name(cli: Any) -> None:
    refused = cli.run("check", cli.tiny, AHEAD, "algorithm.dynamic_sampling=true")
    assert refused.code == 2
    assert "dynamic_sampling" in refused.text
