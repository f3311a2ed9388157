"""Fixtures of the fault suite; `README.md` explains it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import server_binary
from faults.echo_run import EchoRun
from faults.scene import Scene, Server


@pytest.fixture
def rng() -> random.Random:
    """Draws of one test, from `RLMQ_SEED` or a new seed; either is printed."""
    given = os.environ.get("RLMQ_SEED")
    seed = int(given) if given else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}: RLMQ_SEED={seed} repeats these draws")
    return random.Random(seed)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of the test's own."""
    server = Server(server_binary())
    server.start()
    yield server
    server.close()


@pytest.fixture
def scene(server: Server, tmp_path: Path, rng: random.Random) -> Iterator[Scene]:
    """A server, workers, and a folder for what they write down."""
    scene = Scene(server, tmp_path, rng)
    yield scene
    scene.close()


@pytest.fixture
def echo(tmp_path: Path, rng: random.Random) -> Iterator[Callable[..., EchoRun]]:
    """Starts whole runs of echo workers (`echo_run.py`), and ends them."""
    runs: list[EchoRun] = []

    def start(*overrides: str, name: str = "run", **options: Any) -> EchoRun:
        run = EchoRun(tmp_path / name, *overrides, **options)
        runs.append(run)
        run.start()
        return run

    yield start
    for run in runs:
        run.end()
