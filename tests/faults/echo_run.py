"""An echo run under a fault test: started, watched, disturbed and judged from outside."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chaos.live import LiveRun, read_json
from chaos.recording import broken
from faults.echo import RECIPE, Echo, weights_after
from faults.scene import until

PROGRAM = (sys.executable, str(Path(__file__).with_name("echo.py")))


class EchoRun(LiveRun):
    """One `up` of the echo recipe in `folder`."""

    def __init__(self, folder: Path, *overrides: str, steps: int = 12, echo: Echo | None = None) -> None:
        super().__init__(RECIPE, folder, [f"train.steps={steps}", *overrides], PROGRAM)
        self.steps = steps
        self._environment = {"ECHO": msgspec.json.encode(echo or Echo()).decode()}

    def start(self) -> None:
        before = {key: os.environ.get(key) for key in self._environment}
        os.environ.update(self._environment)
        try:
            super().start()
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})

    def command_of(self, *words: str) -> subprocess.Popen[bytes]:
        """Another process of this run, started by hand."""
        argv = [*PROGRAM, *words, str(RECIPE), "--run", str(self.run)]
        environment = {**os.environ, **self._environment}
        with (self.run / "logs" / "by-hand.log").open("ab") as output:
            return subprocess.Popen(argv, cwd=self.folder, env=environment, stdout=output, stderr=output)

    # -- what is seen -----------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
        """Wait; the run must not end meanwhile."""
        until(lambda: condition() or self.over, what, timeout_s, self.state)
        if self.over and not condition():
            pytest.fail(f"the run ended before: {what}\n{self.state()}")

    def until_step(self, step: int) -> None:
        """Wait until a step is trained."""
        self.until(lambda: self.trained >= step, f"step {step} is trained")

    @property
    def trained(self) -> int:
        """The newest step in `metrics.jsonl`."""
        lines = [line for line in self.metrics() if line["kind"] == "train"]
        return max((int(line["step"]) for line in lines), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of `metrics.jsonl`."""
        path = self.path / "metrics.jsonl" if self.path is not None else None
        if path is None or not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def fired(self, number: int = 0) -> bool:
        """Whether this failure of `fail_at` has happened."""
        return self.path is not None and (self.path / f"fired-{number}").exists()

    def text(self, name: str) -> str:
        """A process's log."""
        path = self.run / "logs" / f"{name}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def starts(self, name: str) -> int:
        """How often a worker's process became ready."""
        return self.text(name).count("[info] ready ")

    @property
    def epochs(self) -> int:
        """Controllers so far."""
        return self.text("controller-0").count("[info] epoch ")

    def state(self) -> str:
        """For a failing test: the end of every log."""
        if self.path is None:
            return self.output[-3000:]
        tails = [f"--- {log.name}\n{log.read_text('utf-8', 'replace')[-1500:]}" for log in self.path.glob("logs/*")]
        return "\n".join([str(self.path), self.output[-2000:], *sorted(tails)])

    # -- what is done -----------------------------------------------------------------------------------------

    def send(self, name: str, number: signal.Signals) -> int:
        """A signal to a process of the run; its pid."""
        self.until(lambda: name in self.processes(), f"{name} is there")
        pid = self.processes()[name]
        os.kill(pid, number)
        return pid

    def kill(self, name: str) -> None:
        """`kill -9`."""
        self.send(name, signal.SIGKILL)

    def moment(self, rng: random.Random) -> None:
        """Wait for a random part of a step."""
        steps = [line["step_s"] for line in self.metrics() if line["kind"] == "train"]
        time.sleep(rng.uniform(0.0, min(2.0, max(steps, default=1.0))))

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after this time."""
        pid = self.send(name, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    # -- what must be true ------------------------------------------------------------------------------------

    def check(self, timeout_s: float = 120.0) -> None:
        """The run ends well, its files hold, and its weights are those of an undisturbed run."""
        code = self.wait(timeout_s)
        assert code == 0, f"exit {code}\n{self.state()}"
        self.check_files()

    def check_files(self) -> None:
        """What must be true of a run that ended with its last step."""
        found = broken(self.run, steps=self.steps)
        if found:
            pytest.fail("\n".join(["the oracle:", *found]), pytrace=False)
        assert self.weights() == weights_after(self.steps)
        lines = [line["step"] for line in self.metrics() if line["kind"] == "train"]
        assert lines == list(range(1, self.steps + 1))

    def weights(self) -> str:
        """Of the newest checkpoint."""
        return (sorted(self.run.glob("checkpoints/step-*"))[-1] / "model.safetensors").read_text()

    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        return read_json(self.run / "summary.json")


Start = Callable[..., EchoRun]


def overrides_of(**values: Any) -> Sequence[str]:
    """`deadlines__silence_s=5` as an override of the recipe."""
    return [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
