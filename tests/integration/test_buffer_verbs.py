"""`rlmq buffer` and `rlmq dead` on a whole run: in the middle of it, after Ctrl-C and after its end."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)


def test_a_live_run_can_be_looked_at_verified_and_goes_on(cli: Any) -> None:
    # given a run in the middle of its training, with more steps than the looks take
    process = cli.start("up", cli.tiny, "train.steps=400", "evaluate.every_steps=0", "run.name=seen")
    cli.wait_until(lambda: list((cli.folder / "runs").glob("seen-*/metrics.jsonl")), "the run has begun")
    cli.wait_until(lambda: len(cli.metrics("seen")) >= 2, "two steps are trained")
    # when it is looked at several times
    looks = []
    for _ in range(4):
        done = cli.run("buffer", "seen", "--verify", "--json")
        assert done.code == 0, done.text
        looks.append(json.loads(done.out))
    readable = cli.run("buffer")
    dead = cli.run("dead", "list")
    cli.run("drain", "seen")
    # then every invariant holds at every look, rows move, and the run ends well with all of its samples
    assert (readable.code, dead.code) == (0, 0), readable.text + dead.text
    assert "rollout" in readable.out
    assert "no dead letters" in dead.out
    assert all(table["broken"] == [] for look in looks for table in look["tables"])
    admitted = [look["tables"][0]["admitted"] for look in looks]
    assert 0 < admitted[0] < admitted[-1]
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, out[-2000:] + err[-2000:]
    summary = cli.summary("seen")
    assert summary["samples"] == summary["steps"] * 64
    # and of the ended run it says so
    done = cli.run("buffer", "seen")
    assert (done.code, done.out) == (3, "")
    assert "error: the buffer of run seen-1" in done.err


def test_after_ctrl_c_it_says_how_the_run_goes_on(cli: Any) -> None:
    process = cli.start("up", cli.tiny, "train.steps=200", "run.name=cut")
    cli.wait_until(lambda: list((cli.folder / "runs").glob("cut-*/metrics.jsonl")), "the run has begun")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)

    done = cli.run("buffer", "cut")

    assert done.code == 3
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.err
    assert "continues it" in done.err


def test_a_run_that_is_not_there_is_refused(cli: Any) -> None:
    for words in (("buffer", "nix"), ("dead", "list", "nix"), ("dead", "drop", "--all", "nix")):
        done = cli.run(*words)
        assert done.code == 2, done.text
        assert "RUN: got 'nix'" in done.err
