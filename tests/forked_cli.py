"""`rlmq` as tests run it: forked from a process of the session that has its imports, which cost seconds."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlmq.common.model_cache import torch_cache
from rlmq.compose import PRELOADED
from rlmq.controller.fork_server import ForkServer

_FORKING = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_PYTHONPATH = os.environ.get("PYTHONPATH")


class ForkedCli(subprocess.Popen[str]):
    """Popen whose child comes out of the fork server."""

    def _execute_child(self, *given: Any) -> None:
        named = _FORKING.bind(self, *given).arguments
        pipes = [named[name] for name in _PIPES]
        outputs = (named["c2pwrite"], named["errwrite"])
        child = _server().start(named["args"], named["env"], outputs, str(named["cwd"]))
        self.pid, self._child_created = child.pid, True
        self._close_pipe_fds(*pipes)


def start_cli(words: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start `rlmq` with these words. With another PYTHONPATH it is a process with a start of its own."""
    own_start = environment.get("PYTHONPATH") != _PYTHONPATH or environment.get("RLMQ_FORK_SERVER") == "0"
    return (subprocess.Popen if own_start else ForkedCli)(
        [sys.executable, "-P", "-m", "rlmq.cli", *map(str, words)],
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@cache
def _server() -> ForkServer:
    log = Path(tempfile.mkstemp(prefix="rlmq-tests-", suffix=".log")[1])
    environment = {**os.environ, **torch_cache(), "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONUNBUFFERED"] = "1"
    made = ForkServer(PRELOADED, environment, log)
    while not made.ready(1.0):
        pass
    return made
