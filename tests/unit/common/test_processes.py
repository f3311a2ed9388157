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

from rlmq.common.processes import (
    describe_exit,
    is_gone,
    last_lines,
    process_mark,
    reap,
    signal_group,
    spawn,
)

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


MARKS = (
    "from rlmq.common.processes import process_mark; import time; print(process_mark(), flush=True); time.sleep(60)"
)


def test_a_mark_tells_a_process_that_ended_from_one_that_lives() -> None:
    # given a process of this machine, whose pid may be used again
    child = subprocess.Popen([sys.executable, "-c", MARKS], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    mark = child.stdout.readline().strip()
    assert not is_gone(mark)
    assert not is_gone(process_mark())
    # when it is killed, then it is gone before and after it is reaped
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(mark)
    child.wait()
    child.stdout.close()
    assert is_gone(mark)
    # and a later process with its pid is another
    words = process_mark().split()
    assert is_gone(" ".join([*words[:3], "1"]))


@pytest.mark.parametrize("place", [0, 1])
def test_of_a_process_elsewhere_nothing_is_known(place: int) -> None:
    words = process_mark().split()
    words[place], words[2] = "elsewhere", "999999999"
    assert not is_gone(" ".join(words))
    assert not is_gone("")
