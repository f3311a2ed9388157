"""Processes that are forked from one that has their imports: children of the caller like any others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlmq.common.processes import reap
from rlmq.controller.commands import ProcessSpec
from rlmq.controller.fork_server import ForkedChild, Forks

pytestmark = pytest.mark.timeout(60)

RLMQ = (sys.executable, "-P", "-m", "rlmq.cli")
KEEPER = """
import sys, time
from pathlib import Path
from rlmq.controller.commands import ProcessSpec
from rlmq.controller.fork_server import Forks
forks = Forks(["slow"], Path(sys.argv[1]) / "forks.log", print)
forks.wait_ready(30, stop=lambda: False, tick=lambda: None)
with open(Path(sys.argv[1]) / "out", "ab") as out:
    print(forks.start(ProcessSpec("actor", 0, tuple(sys.argv[2:]), {}, forked=True), out).pid, flush=True)
time.sleep(60)
"""
SLOW = """
import os, sys, time
def hook(event, arguments):
    if event == "rlmq.forked" and "sleep" in arguments:
        print(os.environ.get("MARK"))
        time.sleep(60)
sys.addaudithook(hook)
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


@pytest.fixture
def told() -> list[str]:
    """What the supervisor would show."""
    return []


@pytest.fixture
def forks(tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    """A fork server with a module of the test's own, ready."""
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Forks(["slow", "rlmq.cli"], tmp_path / "forks.log", told.append)
    made.wait_ready(30, stop=lambda: False, tick=lambda: None)
    yield made
    made.close()


def start(forks: Forks, folder: Path, *words: str, **environment: str) -> ForkedChild:
    spec = ProcessSpec("actor", 0, (*RLMQ, *words), environment, forked=True)
    with (folder / "out").open("ab") as output:
        child = forks.start(spec, output)
    assert isinstance(child, ForkedChild)
    return child


def ended(child: ForkedChild) -> int:
    wait_until(lambda: reap(child) is not None, "its end")
    assert child.returncode is not None
    return child.returncode


def test_it_runs_the_command_in_its_environment_and_is_the_callers_child(forks: Forks, tmp_path: Path) -> None:
    child = start(forks, tmp_path, "sleep", "a b", MARK="it")
    process = psutil.Process(child.pid)
    assert process.ppid() == os.getpid()
    assert [word for word in process.cmdline() if word] == [*RLMQ, "sleep", "a b"]
    assert os.getsid(child.pid) == child.pid
    wait_until(lambda: (tmp_path / "out").read_text() == "it\n", "its environment")
    child.send_signal(signal.SIGTERM)
    assert ended(child) == -signal.SIGTERM


def server_of(forks: Forks) -> int:
    """Pid of the server: the test session has one of its own."""
    assert forks._server is not None
    return forks._server._server.pid


def test_output_and_exit_code_are_its_own(forks: Forks, tmp_path: Path) -> None:
    assert ended(start(forks, tmp_path, "--version")) == 0
    assert ended(start(forks, tmp_path, "up", "nothing.yaml")) == 2
    said = (tmp_path / "out").read_text()
    assert "rlmq 0" in said
    assert "nothing.yaml" in said


def test_a_killed_server_is_started_again_and_meanwhile_processes_start_from_nothing(
    forks: Forks, tmp_path: Path, told: list[str]
) -> None:
    # given a server that is gone
    child = start(forks, tmp_path, "sleep")
    os.kill(server_of(forks), signal.SIGKILL)
    # when a process is started, then it runs all the same, and it is told
    spec = ProcessSpec("actor", 0, (*RLMQ, "--version"), {}, forked=True)
    with (tmp_path / "out").open("ab") as output:
        plain = forks.start(spec, output)
    assert isinstance(plain, subprocess.Popen)
    assert plain.wait() == 0
    assert "fork server" in told[0]
    # and the next server forks again; what the first one had started lives
    forks.wait_ready(30, stop=lambda: False, tick=lambda: None)
    assert ended(start(forks, tmp_path, "--version")) == 0
    assert psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE
    child.send_signal(signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(tmp_path), *RLMQ, "sleep"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    pid = int(keeper.stdout.readline())
    assert psutil.Process(pid).ppid() == keeper.pid
    keeper.kill()
    keeper.wait()
    wait_until(lambda: not psutil.pid_exists(pid), "its end")
