"""The server of the state machines; how long they run: a fixed walk, or N random ones (RLMQ_MODEL_EXAMPLES=N)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Server
from hypothesis import HealthCheck, Phase, settings

EXAMPLES = "RLMQ_MODEL_EXAMPLES"

_common = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, stateful_step_count=40)
_fixed = settings(_common, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
_random = settings(_common, max_examples=int(os.environ.get(EXAMPLES, "1")), print_blob=True)
settings.register_profile("machine", _random if EXAMPLES in os.environ else settings(_fixed, max_examples=100))
settings.register_profile("mutants", settings(_fixed, max_examples=80))
settings.register_profile("restarts", settings(_fixed, max_examples=8))


@pytest.fixture(scope="module")
def machine_url() -> Iterator[str]:
    """URL of a server that nothing stops."""
    with _server("--appendonly", "no") as server:
        yield server.url


@pytest.fixture
def lasting_server() -> Iterator[Server]:
    """A server that may be killed. (With `everysec`, answered writes wait in its memory during a sync.)"""
    with _server("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@contextmanager
def _server(*options: str) -> Iterator[Server]:
    """A server that looks at its clocks often: blocked clients are not late."""
    folder = Path(tempfile.mkdtemp(prefix="rlmq-"))
    server = Server(folder, "--hz", "500", *options)
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder, ignore_errors=True)
