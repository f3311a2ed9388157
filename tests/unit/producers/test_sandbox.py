"""Model-written code behind walls: what it reaches for is not there, and a limit that it meets is no verdict."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from rlmq.producers.reward_values import NoVerdict
from rlmq.producers.sandbox import CodeTests, run_python


@pytest.fixture(scope="module")
def tests() -> CodeTests:
    return CodeTests("tests", timeout_s=20.0, memory_mb=256)


def verdict(scorer: CodeTests, response: str, *tests: object) -> object:
    (value,) = scorer(["p"], [response], tests=[list(tests)])
    return value


def test_the_share_of_passed_tests_is_the_value(tests: CodeTests) -> None:
    code = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."

    assert verdict(tests, code, "assert add(1, 2) == 3", "assert add(1, 2) == 4") == 0.5


def test_a_program_is_judged_by_what_it_writes(tests: CodeTests) -> None:
    double = {"input": "3\n", "output": "6"}, {"input": "4\n", "output": "9"}

    assert verdict(tests, "print(int(input()) * 2)", *double) == 0.5


def test_code_that_ends_the_program_before_its_test_has_not_passed_it(tests: CodeTests) -> None:
    assert verdict(tests, "import os\nos._exit(0)", "assert False") == 0.0
    assert verdict(tests, "raise SystemExit", "assert False") == 0.0


def test_code_that_does_not_compile_is_wrong(tests: CodeTests) -> None:
    assert verdict(tests, "def f(:", "f()") == 0.0


def test_a_row_without_tests_has_no_verdict(tests: CodeTests) -> None:
    assert isinstance(verdict(tests, "x = 1"), NoVerdict)
    (value,) = tests(["p"], ["x = 1"])
    assert isinstance(value, NoVerdict)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = bytearray(10 << 30)", "MemoryError"),
        ("import os\nwhile True: os.fork()", "Errno 11"),
        ("while True: print('y' * 10000)", "Errno 27"),
        ("f = open('/tmp/x', 'wb')\nwhile True: f.write(b'y' * 100000)", "Errno 27"),
        ("keep = []\nwhile True: keep.append(open('/dev/null'))", "Errno 24"),
    ],
    ids=["memory", "processes", "output", "disk", "files"],
)
def test_a_bomb_ends_as_no_verdict(tests: CodeTests, code: str, told: str) -> None:
    value = verdict(tests, code, "pass")

    assert isinstance(value, NoVerdict)
    assert told in value.reason


def test_endless_code_and_what_it_started_end_with_their_time() -> None:
    scorer = CodeTests("tests", timeout_s=3.0, memory_mb=256)
    mark = f"rlmq-{os.getpid()}"
    code = (
        "import ctypes, os, time\n"
        f"ctypes.CDLL(None).prctl(15, {mark.encode()!r}, 0, 0, 0)\n"
        "os.fork()\n"
        "os.setsid() if os.fork() == 0 else None\n"
        "time.sleep(600)"
    )

    value = verdict(scorer, code, "pass")

    assert isinstance(value, NoVerdict)
    assert "not " in value.reason
    deadline = time.monotonic() + 20.0
    while mark in (left := [_name(path) for path in Path("/proc").glob("[0-9]*/comm")]):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _name(path: Path) -> str:
    """A process's name, where it still lives."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def test_files_outside_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("secret")
    secret.chmod(0o644)
    places = [str(secret), "/etc/passwd", __file__, "/proc/1/environ", str(Path.home() / ".ssh")]

    ended = run_python(
        f"import os\nprint([os.path.exists(p) for p in {places!r}], os.listdir('/tmp'), dict(os.environ))"
    )

    assert ended.out.startswith("[False, False, False, False, False] []"), ended
    assert "PATH" not in ended.out


def test_nothing_outside_its_tmp_can_be_written() -> None:
    code = (
        "import os\n"
        "for place in ('/x', '/usr/x', '/dev/x', '/response.py'):\n"
        "    try: open(place, 'w')\n"
        "    except OSError: print('refused')\n"
        "open('/tmp/x', 'w').write('mine')\n"
        "print(open('/tmp/x').read())"
    )

    assert run_python(code).out.split() == ["refused"] * 4 + ["mine"]


def test_no_socket_is_reached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0rlmq-test-" + tmp_path.name)
        unix.listen()
        code = (
            "import socket\n"
            f"for kind, place in ((socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]})),"
            f" (socket.AF_UNIX, {unix.getsockname()!r})):\n"
            "    try: socket.socket(kind).connect(place); print('reached')\n"
            "    except OSError: print('refused')\n"
        )

        assert run_python(code).out.split() == ["refused", "refused"]


def test_its_parents_cannot_be_killed(tests: CodeTests) -> None:
    code = (
        "import os\n"
        "for pid in (os.getppid(), -1, *range(2, 300)):\n"
        "    try: os.kill(pid, 9) if pid else None\n"
        "    except OSError: pass\n"
    )

    assert verdict(tests, code, "assert True") == 1.0
    assert os.getppid() > 0
