"""A live run under its operator: who is named when a process stops, and what orders do."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rlmq.controller.culprit import Answer, explain
from rlmq.run_view import look_at

pytestmark = pytest.mark.timeout(280)

LOOPS = """
import ctypes, os, threading, time

flag = f"{os.environ['RLMQ_TEST_LOOP']}-{os.getpid()}"

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def loop(_):
    while os.path.exists(flag):
        pass
    return 0

def watch():
    while not os.path.exists(flag):
        time.sleep(0.1)
    ctypes.pythonapi.Py_AddPendingCall(loop, None)

threading.Thread(target=watch, daemon=True).start()
"""
"""Each process of the run imports it: while a file with its pid is there, its main thread does nothing else."""

STOPPED = ("rollout-0", "redis-0", "controller-0", "supervisor", "actor-0", "critic-0", "reference-0", "reward-0")


def started(cli: Any, name: str, *words: str, recipe: str = "tiny.yaml") -> Any:
    """A run of many steps that has trained some."""
    options = ("train.steps=3000", "evaluate.every_steps=0", f"run.name={name}", *words)
    process = cli.start("up", cli.root / "recipes" / recipe, *options)
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


def told(cli: Any, name: str, culprit: str, words: str, verdicts: Sequence[str] = ("still", "stuck")) -> Answer:
    """The answer that names this culprit in these words."""
    deadline = time.monotonic() + 60
    while True:
        answer = ask(cli, name)
        if answer.culprit == culprit and words in answer.sentence and answer.verdict in verdicts:
            return answer
        assert time.monotonic() < deadline, f"{culprit} ({words}) was not named; last: {answer}"
        time.sleep(0.1)


def test_whoever_is_stopped_is_named_and_goes_on(cli: Any) -> None:
    # given a run that moves, of an algorithm that has every role
    process = started(cli, "held", "algorithm.kl_coef=0.01", recipe="algorithms/ppo.yaml")
    pids = {name: state.pid for name, state in look_at(cli.folder / "runs", "held").evidence.processes.items()}
    assert set(STOPPED) <= set(pids)
    for name in STOPPED:
        # when one of its processes is stopped
        os.kill(pids[name], signal.SIGSTOP)
        began = time.monotonic()
        try:
            # then it is named, with its pid and what happened to it
            told(cli, "held", name, f"process {pids[name]} is stopped (SIGSTOP", ("stuck",))
            print(f"{name} named after {time.monotonic() - began:.1f} s")
        finally:
            os.kill(pids[name], signal.SIGCONT)
        # and after SIGCONT the run goes on
        goes_on(cli, "held")
    done = cli.run("why", "held")
    assert (done.code, "run held-1 moves" in done.out or "waits for" in done.out) == (0, True), done.text
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
    code = cli.folder / "code" / "sitecustomize.py"
    code.parent.mkdir()
    code.write_text(LOOPS)
    monkeypatch.setenv("RLMQ_TEST_LOOP", str(cli.folder / "loop"))
    monkeypatch.setenv("PYTHONPATH", str(code.parent))
    monkeypatch.setenv("RLMQ_FORK_SERVER", "0")  # each process has a start of its own
    started(cli, "loops")
    processes = look_at(cli.folder / "runs", "loops").evidence.processes
    for name in ("rollout-0", "controller-0"):
        # when one does nothing else any more, though it lives and, a worker, its heartbeats go on
        flag = cli.folder / f"loop-{processes[name].pid}"
        flag.touch()
        # then it is named, and that it computes
        assert told(cli, "loops", name, "computes").pid == processes[name].pid
        # and when it comes out of it, the run goes on
        flag.unlink()
        goes_on(cli, "loops")
    # when the supervisor loops, and so does not see that a worker dies
    flag = cli.folder / f"loop-{processes['supervisor'].pid}"
    flag.touch()
    time.sleep(1)  # until it loops; one that does not yet starts the worker again
    os.kill(processes["reward-0"].pid, signal.SIGKILL)
    # then it is named, and not the worker
    told(cli, "loops", "supervisor", "does not notice that reward-0")
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
    cli.wait_until(
        lambda: json.loads(cli.run("status", "led", "--json").out)["control"]["steps"] == 2999, "status says so"
    )
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
