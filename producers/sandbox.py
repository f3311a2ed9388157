"""Model-written code, run behind walls: what it does ends with it, and a limit that it meets is no verdict.

`producers/sandbox_child.py` says what the walls are. Where the machine gives none (no namespaces, neither as root
nor as a user), `code` rewards are refused at the start.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmq.common.errors import UsageError
from rlmq.common.processes import describe_exit, end_family
from rlmq.producers.reward_kinds import rows_of, text_of
from rlmq.producers.reward_values import NoVerdict

_SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_TOLD_BYTES = 1 << 20
_LAST_CHARACTERS = 2000
_KILLED = (128 + 9, 128 + 24, 128 + 25)  # by the kernel: memory, processor time, size of its output
# Last lines of a program that met a limit: memory, processes, output, open files.
_LIMITS = re.compile(
    r"MemoryError|\[Errno 11\]|\[Errno 12\]|\[Errno 24\]|\[Errno 27\]|\[Errno 28\]|can't start new thread"
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: its exit code (128 + signal), what it wrote, and the limit that ended it, if one did."""

    code: int
    out: str
    err: str
    limit: str = ""


def run_python(program: str, *, stdin: str = "", timeout_s: float = 5.0, memory_mb: int = 512) -> Ended:
    """Run a Python program (standard library only) behind walls.

    Args:
        program: its source; it finds nothing but Python, and an empty `/tmp` of 64 MB.
        stdin: what it reads.
        timeout_s: wall time; its processor time is about as much.
        memory_mb: address space of each of its processes, of which there are at most 32.
    """
    with tempfile.TemporaryDirectory(prefix="rlmq-sandbox-") as folder, tempfile.TemporaryFile() as given:
        facts = {
            "folder": folder,  # a root is mounted over it, in the sandbox only
            "shown": os.pathsep.join(_shown()),
            "python": os.path.realpath(sys.executable),
            "program": program,
            "memory_bytes": memory_mb << 20,
            "cpu_s": int(timeout_s) + 1,
        }
        path = Path(folder) / "facts.json"
        path.write_text(json.dumps(facts))
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        return _run(path, given.fileno(), timeout_s)


def _run(facts: Path, given: int, seconds: float) -> Ended:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_child.py")), str(facts)],
            stdin=given,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={},
        )
        limit = ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            limit = f"not done within {seconds:g} s"
        finally:
            end_family(process.pid)
            code = process.wait()
        said, told = _read(out), _read(err)
    met = _LIMITS.search(told[-_LAST_CHARACTERS:])
    if not limit and code in _KILLED:
        limit = describe_exit(128 - code)
    return Ended(code, said, told, limit or (f"a limit: {met.group()}" if met and code else ""))


def _read(file: Any) -> str:
    file.seek(0)
    return bytes(file.read(_TOLD_BYTES)).decode(errors="replace")


def _shown() -> list[str]:
    base = os.path.realpath(sys.base_prefix)
    return [*_SYSTEM, *([] if base.startswith(_SYSTEM) else [base])]


class CodeTests:
    """Runs a response's code against the row's tests; the value is the share of them that pass.

    The code is the last fenced block of the response, or all of it. A test is Python text that raises where the
    code is wrong, or `{"input": …, "output": …}`: what the program reads, and what it shall then have written
    (outer white space apart). A test that meets a limit is no verdict for the row.

    Args:
        field: the field with the tests: one or a list.
        timeout_s: the time limit of a call; all tests of a row have nine tenths of it.
        memory_mb: address space of a program.

    Raises:
        UsageError: this machine gives no walls.
    """

    per_row = True

    def __init__(self, field: str, *, timeout_s: float, memory_mb: int) -> None:
        self._field = field
        self._row_s, self._memory_mb = timeout_s * 0.9, memory_mb
        ended = run_python("print(6 * 7)", timeout_s=timeout_s, memory_mb=memory_mb)
        if ended.out.strip() != "42":
            raise UsageError(
                f"reward code {field}",
                got=(ended.limit or ended.err.strip()[-200:] or f"exit {ended.code}"),
                expected="namespaces, behind which model-written code can run",
                remedy="Run the reward workers where user namespaces are allowed, or raise memory_mb or timeout_s",
            )

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[Any]:
        """The share of passed tests, 0 to 1, per row; none where a limit was met or the row has no tests."""
        fields = rows_of(columns, len(completions))
        return [self._verdict(text_of(c), row.get(self._field)) for c, row in zip(completions, fields, strict=True)]

    def _verdict(self, response: str, tests: Any) -> float | NoVerdict:
        tests = tests if isinstance(tests, list) else [tests]
        if not tests or not all(isinstance(test, str | Mapping) for test in tests):
            return NoVerdict(f"code: no tests in the field {self._field!r}")
        blocks = _FENCE.findall(response)
        code, deadline, passed = blocks[-1] if blocks else response, time.monotonic() + self._row_s, 0
        for test in tests:
            ended, right = self._try(code, test, deadline - time.monotonic())
            if ended.limit or ended.err.startswith("no walls"):
                return NoVerdict(f"code: {ended.limit or ended.err.strip()}")
            passed += right
        return passed / len(tests)

    def _try(self, code: str, test: str | Mapping[str, Any], left_s: float) -> tuple[Ended, bool]:
        if left_s <= 0:
            return Ended(0, "", "", f"not all tests done within {self._row_s:g} s"), False
        if isinstance(test, str):
            # Code that ends the program before its test has not passed it.
            passed = secrets.token_hex(16)
            program = f"{code}\n\n{test}\nprint()\nprint({passed!r})\n"
            ended = run_python(program, timeout_s=left_s, memory_mb=self._memory_mb)
            return ended, ended.code == 0 and ended.out.rstrip().endswith(passed)
        given, wanted = str(test.get("input", "")), str(test.get("output", ""))
        ended = run_python(code, stdin=given, timeout_s=left_s, memory_mb=self._memory_mb)
        return ended, ended.code == 0 and ended.out.strip() == wanted.strip()
