"""Whole runs through the command line, in folders of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_cli import start_cli

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class Cli:
    """Runs `rlmq` in `folder`, and ends by pid what a test left running."""

    root = ROOT
    tiny = ROOT / "recipes" / "tiny.yaml"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_WAIT_POLICY": "passive", "COLUMNS": "200"}

    def run(self, *args: str | Path, timeout_s: float = 110.0, cwd: Path | None = None) -> Finished:
        process = self.start(*args, cwd=cwd)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
            pytest.fail(f"rlmq {args} did not end within {timeout_s} s\n{out[-3000:]}\n{err[-3000:]}")
        return Finished(process.returncode, out, err)

    def start(self, *args: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        process = start_cli(args, cwd or self.folder, self.environment())
        self._started.append(process)
        return process

    def newest_run(self, name: str = "") -> Path:
        found = sorted((self.folder / "runs").glob(f"{name}*/recipe.yaml"), key=lambda p: p.stat().st_mtime)
        assert found, f"no run of {name!r} in {self.folder / 'runs'}"
        return found[-1].parent

    def summary(self, name: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.newest_run(name) / "summary.json").read_text())
        return found

    def metrics(self, name: str = "", kind: str = "train") -> list[dict[str, Any]]:
        text = (self.newest_run(name) / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]

    def processes(self) -> list[psutil.Process]:
        """Live processes whose command line names a path under the test's folder."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = process.info["cmdline"] or []
            if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(self.folder) in word for word in line):
                found.append(process)
        return found

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
            time.sleep(0.05)

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """The command line in the test's own folder."""
    yield from _cli(tmp_path)


@pytest.fixture(scope="module")
def module_cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """The command line in a folder of the module's, for runs that several tests look at."""
    yield from _cli(tmp_path_factory.mktemp("module"))


def _cli(folder: Path) -> Iterator[Cli]:
    runner = Cli(folder)
    yield runner
    runner.end()
    runner.wait_until(lambda: not runner.processes(), "all processes of the test are gone", 15.0)
