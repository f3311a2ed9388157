"""Children that never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlmq.common.processes import describe_exit, last_lines, reap, signal_group, spawn

PARENT = """
import sys, time
from rlmq.common.processes import spawn
child = spawn([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, f"{pid} lives on"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(number: int) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())

    parent.send_signal(number)
    parent.wait()

    wait_gone(child)
    parent.stdout.close()


def test_a_child_has_a_group_of_its_own_and_hears_ctrl_c_even_under_nohup(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = spawn([sys.executable, "-c", "import time; time.sleep(60)"])
    finally:
        signal.signal(signal.SIGINT, before)

    assert os.getpgid(child.pid) == child.pid
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=10) != 0


def test_reaping_a_child_ends_its_own_children(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        child = spawn(["sh", "-c", "sleep 60 & echo $!"], output=log)

    deadline = time.monotonic() + 10
    while reap(child) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)

    assert reap(child) == 0
    wait_gone(int((tmp_path / "log").read_text()))


def test_a_group_that_is_gone_is_told() -> None:
    child = spawn(["true"])
    child.wait()

    assert not signal_group(child.pid, signal.SIGTERM)


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit 0"), (3, "exit 3"), (-9, "signal 9 (SIGKILL)"), (-11, "signal 11 (SIGSEGV)")]
)
def test_how_a_process_ended_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_last_lines_of_a_long_log_and_of_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n\n" % n for n in range(50_000)) + b"\xff broken\n")

    assert last_lines(log, 2) == ["line 49999", "\ufffd broken"]
    assert last_lines(log, 2, from_byte=log.stat().st_size - 9) == ["\ufffd broken"]
    assert last_lines(tmp_path / "none", 2) == []
