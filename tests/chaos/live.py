"""A run of `rlmq up` seen and disturbed from outside: its processes, what they do, and how far it is.

What is known of the run comes from the process table and from files of its folder. Nothing of rlmq is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
ACTIVITIES = ("generating", "scoring", "training", "syncing", "checkpointing", "evaluating", "idle")
SLOW_TASK = Path(__file__).with_name("slow_task.py")
SLOW_REWARD = "reward=" + json.dumps([{"function": f"{SLOW_TASK}:letters", "timeout_s": 60.0}])
"""An override: scoring takes long enough to be met by a fault."""

SERVER, CONTROLLER, RECORDER = "redis-0", "controller-0", "recorder-0"
_LOOK_S = 0.25
_SHORT_FIRST = ("checkpointing", "syncing", "evaluating", "scoring", "training", "generating")
"""Which of several activities names the moment: the one that is met most seldom."""


@dataclass(frozen=True)
class Heard:
    """What a worker told of itself, when (Unix seconds)."""

    at: float
    incarnation: int
    activity: str
    ready: bool


@dataclass(frozen=True)
class Seen:
    """The run at one moment. `pid` is by process; `worker` by worker, as far as its process is still there."""

    step: int
    epoch: int
    worker: Mapping[str, Heard]
    pid: Mapping[str, int]
    evaluating: bool = False

    def activity(self, name: str) -> str:
        """What a worker does; for the controller and the server, what goes on in the run as a whole.

        The recorder is said to evaluate as long as the loop does: it tells so only for the instant of the sums.
        """
        if name in self.worker:
            return "evaluating" if name == RECORDER and self.evaluating else self.worker[name].activity
        if name not in (CONTROLLER, SERVER):
            return ""
        told = [heard.activity for heard in self.worker.values()]
        return busiest([*told, "evaluating"] if self.evaluating else told)

    def ready(self, name: str) -> bool:
        """Whether the worker takes work."""
        return name in self.worker and self.worker[name].ready


def busiest(activities: Iterable[str]) -> str:
    """The one of several activities that names the moment."""
    now = set(activities)
    return next((name for name in _SHORT_FIRST if name in now), "idle")


class ControlLog:
    """What `control_log.jsonl` has told so far."""

    def __init__(self) -> None:
        self.step = self.epoch = 0
        self.heard: dict[str, list[Heard]] = {}
        self._evaluations: list[tuple[float, bool]] = [(0.0, False)]
        self._at_byte = 0

    @property
    def evaluating(self) -> bool:
        """Whether the loop evaluates now: from its call for the rows until its next call for something else."""
        return self._evaluations[-1][1]

    def follow(self, path: Path) -> None:
        """Read what is new."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._at_byte)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._at_byte += len(whole) + len(newline)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):
                    self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        event = line["event"]
        self.epoch = max(self.epoch, line["epoch"])
        self.step = max(self.step, event.get("step", 0) if event["type"] in ("began", "opened") else 0)
        if event["type"] == "asked":
            self._evaluations.append((event["at"], event["method"] in ("admit_eval", "evaluate")))
        if event["type"] == "heard":
            told = Heard(
                event["at"], event["incarnation"], event.get("activity", "idle"), event.get("ready", False)
            )
            self.heard.setdefault(f"{event['role']}-{event['rank']}", []).append(told)

    def at(self, name: str, unix_s: float) -> str:
        """What a worker did at this time; for others, what went on in the run."""
        evaluating = next(on for at, on in reversed(self._evaluations) if at <= unix_s)
        if name in self.heard:
            told_by = next((h.activity for h in reversed(self.heard[name]) if h.at <= unix_s), "")
            return "evaluating" if name == RECORDER and evaluating else told_by
        told = [self.at(worker, unix_s) for worker in self.heard]
        return busiest([*told, "evaluating"] if evaluating else told)


@dataclass
class LiveRun:
    """One `rlmq up` in `folder`; its output goes to `up.log` there."""

    recipe: Path
    folder: Path
    overrides: Sequence[str] = ()
    command: Sequence[str] = (sys.executable, "-P", "-m", "rlmq.cli")
    up: subprocess.Popen[bytes] = field(init=False)
    log: ControlLog = field(default_factory=ControlLog)
    _alive: dict[str, tuple[int, float]] = field(default_factory=dict)
    _looked_at: float = 0.0
    _done: dict[str, tuple[int, int]] = field(default_factory=dict)

    def start(self) -> None:
        """Begin the run, or continue it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        argv = [*self.command, "up", str(self.recipe), *self.overrides]
        with (self.folder / "up.log").open("ab") as output:
            environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "COLUMNS": "200"}
            self.up = subprocess.Popen(argv, cwd=self.folder, stdout=output, stderr=output, env=environment)

    @property
    def path(self) -> Path | None:
        """The run's own folder, once there is one."""
        return next((p.parent for p in sorted(self.folder.glob("runs/*/recipe.yaml"))), None)

    @property
    def run(self) -> Path:
        """The run's own folder."""
        assert self.path is not None, self.output
        return self.path

    @property
    def output(self) -> str:
        """What `rlmq up` said."""
        return (self.folder / "up.log").read_text("utf-8", "replace")

    @property
    def over(self) -> bool:
        """Whether `rlmq up` has ended."""
        return self.up.poll() is not None

    def processes(self) -> dict[str, int]:
        """Pids of the run's living processes, by name (`rollout-1`, `redis-0`)."""
        return {name: pid for name, (pid, _) in self._processes().items()}

    def _processes(self) -> dict[str, tuple[int, float]]:
        """Pid and beginning (Unix seconds) of each."""
        found: dict[str, tuple[int, float]] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.up.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    name = None if child.status() == psutil.STATUS_ZOMBIE else process_name(child.cmdline())
                    if name is not None:
                        found[name] = (child.pid, child.create_time())
        return found

    def seen(self) -> Seen:
        """The run now; processes as of the last quarter of a second, what they told as of this moment.

        What a process told that is no longer there is left out.
        """
        if time.monotonic() - self._looked_at >= _LOOK_S:
            self._alive, self._looked_at = self._processes(), time.monotonic()
        began = self._alive
        if self.path is not None:
            self.log.follow(self.path / "control_log.jsonl")
        newest = {name: told[-1] for name, told in self.log.heard.items()}
        living = {name: told for name, told in newest.items() if name in began and told.at >= began[name][1]}
        pids = {name: pid for name, (pid, _) in began.items()}
        return Seen(self.log.step, self.log.epoch, living, pids, self.log.evaluating)

    def progress(self) -> tuple[int, ...]:
        """Another value whenever the run got further: its log, metrics, recording, checkpoints, finished work."""
        if self.path is None:
            return ()
        run = self.path
        sizes = [_size(run / name) for name in ("batch_log.jsonl", "metrics.jsonl")]
        names = [len(list(run.glob(pattern))) for pattern in ("samples/*.parquet", "checkpoints/step-*")]
        return (*sizes, *names, *(self._count_done(log) for log in sorted(run.glob("logs/*-*.log"))))

    def _count_done(self, log: Path) -> int:
        """Finished calls and scored claims that a log tells of; only what is new is read."""
        at_byte, count = self._done.get(log.name, (0, 0))
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(at_byte)
            whole, newline, _ = file.read().rpartition(b"\n")
            count += sum(whole.count(mark) for mark in (b"call done", b"reward.scored"))
            self._done[log.name] = (at_byte + len(whole) + len(newline), count)
        return count

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal to a process of the run; whether it was there."""
        self._looked_at = 0.0
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def wait(self, timeout_s: float) -> int | None:
        """Exit code of `rlmq up`; None when it has not ended by then."""
        try:
            return self.up.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Kill what is left of it."""
        if not hasattr(self, "up"):
            return
        pids = self.processes() if not self.over else {}
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if not self.over:
            self.up.kill()
        self.up.wait()


def process_name(argv: Sequence[str]) -> str | None:
    """`rollout-1` from the command line of a run's process; None for others."""
    words = list(argv)
    if "controller" in words:
        return CONTROLLER
    if "worker" in words and "--index" in words:
        return f"{words[words.index('worker') + 1]}-{words[words.index('--index') + 1]}"
    return SERVER if words and ("redis-server" in words[0] or "valkey-server" in words[0]) else None


def final_hash(run: Path) -> str:
    """SHA-256 of the newest checkpoint's weights, by `sha256sum`; with a critic, of the sums of both."""
    newest = [sorted(run.glob(f"{kind}/step-*"))[-1:] for kind in ("checkpoints", "critic_checkpoints")]
    files = [file for paths in newest for path in paths for file in sorted(path.glob("model*.safetensors"))]
    done = subprocess.run(["sha256sum", *map(str, files)], capture_output=True, text=True, check=True)
    sums = [line.split()[0] for line in done.stdout.splitlines()]
    return sums[0] if len(sums) == 1 else hashlib.sha256(" ".join(sums).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that may not be there yet."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def until(condition: Any, timeout_s: float, period_s: float = 0.02) -> bool:
    """Poll; whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(period_s)
    return True


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
