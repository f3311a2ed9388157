"""What the kernel says of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import eventually

from rlmq.controller.process_states import ProcessState, ProcessTable

pytestmark = pytest.mark.timeout(60)

LOOP = "any(iter(int, 1))"
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of the test, ended with it."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for child in found:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()


def start(started: list[subprocess.Popen[bytes]], program: str) -> int:
    started.append(subprocess.Popen([sys.executable, "-c", program]))
    return started[-1].pid


def look(pid: int, at: float | None = None) -> ProcessState:
    return ProcessTable({"x": (pid, time.time() if at is None else at)}).states()["x"]


def test_a_process_that_loops_runs_and_one_that_sleeps_does_not(started: list[subprocess.Popen[bytes]]) -> None:
    loops, sleeps = start(started, LOOP), start(started, SLEEP)
    eventually(lambda: look(sleeps).standing == "sleeps", "it sleeps")
    assert look(loops).standing == "runs"
    eventually(lambda: look(loops).busy > 0.01, "it gets a core")


def test_a_thread_that_loops_counts_too(started: list[subprocess.Popen[bytes]]) -> None:
    program = f"import threading, time; threading.Thread(target=lambda: {LOOP}).start(); time.sleep(600)"
    pid = start(started, program)
    eventually(lambda: look(pid).standing == "runs", "its thread runs")


def test_a_stopped_process_and_one_that_goes_on(started: list[subprocess.Popen[bytes]]) -> None:
    pid = start(started, SLEEP)
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: look(pid).standing == "stopped", "it is stopped")
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: look(pid).standing == "sleeps", "it sleeps again")


def test_a_killed_process_is_gone_before_and_after_it_is_reaped(started: list[subprocess.Popen[bytes]]) -> None:
    pid = start(started, SLEEP)
    started[0].kill()
    eventually(lambda: look(pid).standing == "gone", "it is gone while nobody reaped it")
    started.pop().wait()
    assert look(pid) == ProcessState(pid, "gone")


def test_a_process_that_began_later_is_another_one(started: list[subprocess.Popen[bytes]]) -> None:
    pid = start(started, SLEEP)
    assert look(pid).standing != "gone"
    assert look(pid, at=time.time() - 3600).standing == "gone"


def test_what_is_below_a_process_is_seen(started: list[subprocess.Popen[bytes]]) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOOP!r}])"
    pid = start(started, program)
    eventually(lambda: look(pid).busy_child is not None, "its child computes")
    child = look(pid).busy_child
    assert child is not None
    try:
        os.kill(child, signal.SIGSTOP)
        eventually(lambda: look(pid).stopped_child == child, "its child is stopped")
    finally:
        os.kill(child, signal.SIGKILL)
