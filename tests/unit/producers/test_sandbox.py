"""Model-written code behind walls: what it reaches for is not there, and a limit that it meets is no verdict."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlmq.producers import sandbox_child
from rlmq.producers.reward_values import NoVerdict
from rlmq.producers.sandbox import CodeTests, _shown, run_python


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


REACHES = """
import os, socket, time
print([os.path.exists(path) for path in PLACES], os.listdir("/tmp"), dict(os.environ).get("SECRET"))
try: socket.create_connection(("127.0.0.1", PORT), 1)
except OSError: print("no network")
try: os.kill(PARENT, 9)
except OSError: print("no parent")
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(600)
except OSError: print("no more processes")
"""


def test_an_ordinary_user_has_the_same_walls(tmp_path: Path) -> None:
    """Without root's rights they are those of a user namespace; where there are none, the program does not run."""
    python, user = sys.executable, os.geteuid()
    if user == 0:  # nobody, with a Python that nobody can run
        python, user = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin") or "", 65534
        if not python:
            pytest.skip("no Python that others than root can run")
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as server:
        folder, python = Path(name), os.path.realpath(python)
        program = REACHES.replace("PLACES", repr([name, "/etc/passwd", __file__, "/proc/1/environ"]))
        program = program.replace("PORT", str(server.getsockname()[1])).replace("PARENT", str(os.getpid()))
        shown = ":".join(_shown()) if user == os.geteuid() else "/usr:/bin:/lib:/lib64"
        facts = {"folder": f"{name}/root", "shown": shown, "python": python, "program": program}
        (folder / "facts.json").write_text(json.dumps({**facts, "memory_bytes": 512 << 20, "cpu_s": 10}))
        (folder / "root").mkdir()
        (folder / "child.py").write_text(Path(sandbox_child.__file__).read_text())
        folder.chmod(0o755)
        other = {} if user == os.geteuid() else {"user": user, "group": user, "extra_groups": []}
        ended = subprocess.run(
            [python, "-I", "-S", f"{name}/child.py", f"{name}/facts.json"],
            env={"SECRET": "key"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **other,  # type: ignore[call-overload]
        )

    if ended.returncode == sandbox_child.REFUSED:
        assert ended.stderr.startswith("no walls: unshare") and ended.stdout == "", ended
        return
    told = ["[False, False, False, False] [] None", "no network", "no parent", "no more processes"]
    assert ended.stdout.splitlines() == told, ended
