"""A live run under its operator: who is named when a process stops, and what orders do."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from rlmq.controller.culprit import Answer, explain
from rlmq.run_view import look_at

pytestmark = pytest.mark.timeout(280)

LOOPS = """
import os, signal

def loop(*_):
    while os.path.exists(os.environ["RLMQ_TEST_LOOP"]):
        pass

signal.signal(signal.SIGUSR1, loop)
"""
"""Each process of the run imports it: told by SIGUSR1, its main thread computes until a file is gone."""

STOPPED = ("rollout-0", "redis-0", "controller-0", "supervisor", "actor-0", "reward-0")


def started(cli: Any, name: str, *words: str) -> Any:
    """A run of many steps that has trained some."""
    process = cli.start("up", cli.tiny, "train.steps=3000", "evaluate.every_steps=0", f"run.name={name}", *words)
    cli.wait_until(lambda: list((cli.folder / "runs").glob(f"{name}-*/metrics.jsonl")), "the run has begun", 110)
    goes_on(cli, name)
    return process


def steps(cli: Any, name: str) -> int:
    return len(cli.metrics(name))


def goes_on(cli: Any, name: str) -> None:
    """The run trains on."""
    before = steps(cli, name)
    cli.wait_until(lambda: steps(cli, name) > before, "one more step is trained", 110)


def ask(cli: Any, name: str) -> Answer:
    return explain(look_at(cli.folder / "runs", name).evidence)


def test_whoever_is_stopped_is_named_and_goes_on(cli: Any) -> None:
    # given a run that moves
    process = started(cli, "held")
    pids = {name: state.pid for name, state in look_at(cli.folder / "runs", "held").evidence.processes.items()}
    assert set(STOPPED) <= set(pids)
    for name in STOPPED:
        # when one of its processes is stopped
        os.kill(pids[name], signal.SIGSTOP)
        began = time.monotonic()
        try:
            # then it is named, with its pid and what happened to it
            cli.wait_until(lambda name=name: ask(cli, "held").culprit == name, f"{name} is named", 60)
            print(f"{name} named after {time.monotonic() - began:.1f} s")
            answer = ask(cli, "held")
            assert (answer.verdict, answer.pid) == ("stuck", pids[name])
            assert f"process {pids[name]} is stopped (SIGSTOP" in answer.sentence
        finally:
            os.kill(pids[name], signal.SIGCONT)
        # and after SIGCONT the run goes on
        goes_on(cli, "held")
    told = cli.run("why", "held")
    assert (told.code, "run held-1 moves" in told.out or "waits for" in told.out) == (0, True), told.text
    # when everything is killed, then the files tell it
    os.kill(pids["supervisor"], signal.SIGKILL)
    process.wait(timeout=30)
    cli.wait_until(lambda: ask(cli, "held").verdict == "ended", "the end is seen", 60)
    after = ask(cli, "held")
    assert after.culprit == "supervisor"
    assert "wrote no end" in after.sentence
    assert cli.run("status", "held").code == 3


def test_whoever_loops_for_ever_is_named(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a run that moves, whose processes can be made to loop
    flag, code = cli.folder / "loop", cli.folder / "code" / "sitecustomize.py"
    code.parent.mkdir()
    code.write_text(LOOPS)
    monkeypatch.setenv("RLMQ_TEST_LOOP", str(flag))
    monkeypatch.setenv("PYTHONPATH", str(code.parent))
    started(cli, "loops")
    processes = look_at(cli.folder / "runs", "loops").evidence.processes
    for name in ("rollout-0", "controller-0"):
        # when one does nothing else any more, though it lives and, a worker, its heartbeats go on
        flag.touch()
        os.kill(processes[name].pid, signal.SIGUSR1)
        # then it is named, and that it computes
        cli.wait_until(lambda: ask(cli, "loops").verdict in ("still", "stuck"), "somebody is named", 60)
        cli.wait_until(lambda: "computes" in ask(cli, "loops").sentence, "it is said to compute", 60)
        answer = ask(cli, "loops")
        assert (answer.culprit, answer.pid) == (name, processes[name].pid), answer.sentence
        # and when it comes out of it, the run goes on
        flag.unlink()
        goes_on(cli, "loops")
    assert cli.run("stop", "loops").code == 0


def test_orders_hold_change_and_end_a_run(cli: Any) -> None:
    process = started(cli, "led")
    # when it is paused, then nothing is trained until it is resumed
    done = cli.run("pause", "led")
    assert done.code == 0, done.text
    assert "paused at step" in done.out
    cli.wait_until(lambda: ask(cli, "led").verdict == "paused", "why says so")
    held = steps(cli, "led")
    assert json.loads(cli.run("status", "led", "--json").out)["control"]["phase"] == "pause"
    assert steps(cli, "led") <= held + 1, "at most the step that was in hand"
    # when a weight and the number of steps are changed meanwhile
    done = cli.run("set", "led", "reward.letters.weight=0.5", "train.steps=2999")
    assert done.code == 0, done.text
    assert "reward.letters.weight=0.5, train.steps=2999 from step" in done.out
    done = cli.run("resume", "led")
    assert "goes on" in done.out, done.text
    goes_on(cli, "led")
    # then the greatest reward that there can be is half of what it was
    goes_on(cli, "led")
    assert json.loads(cli.run("status", "led", "--json").out)["control"]["steps"] == 2999
    assert cli.metrics("led")[-1]["reward_mean"] <= 0.5
    # when it is drained, then it ends well with its last step saved, and the log has it all
    done = cli.run("drain", "led")
    assert done.code == 0, done.text
    assert "with exit 0" in done.out
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out[-2000:] + err[-2000:]
    last = steps(cli, "led")
    assert (cli.newest_run("led") / "checkpoints" / f"step-{last:06d}").is_dir()
    log = cli.run("log", "led").out
    for words in ("order 1: pause by ", "order 2: set reward.letters.weight=0.5", "order 4: drain", "exit 0"):
        assert words in log
    refused = cli.run("pause", "led")
    assert (refused.code, refused.err.count("error: ")) == (3, 1)
    assert "has ended (exit 0)" in refused.err
