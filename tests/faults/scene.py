"""What a fault test works with: a server that can be killed, workers that can be killed, and what they all did."""

from __future__ import annotations

import json
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
import redis
from faults import oracle
from faults.workers import RUN, TABLE, make_table, read_journal
from redis.backoff import NoBackoff
from redis.retry import Retry

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import TableCounts

WORKERS = Path(__file__).with_name("workers.py")
_POLL_S = 0.01


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0, state: Callable[[], str] = str) -> None:
    """Poll until `condition` holds; fail naming `what` and the `state` in which it does not."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {timeout_s:g} s: {what}\n{state()}")
        time.sleep(_POLL_S)


class Server:
    """A Redis with an append-only file, synced every second, in a folder of its own."""

    def __init__(self, binary: str) -> None:
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="rlmq-faults-", dir=memory if memory.is_dir() else None))
        self.socket = self.folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What the server said since it was created."""
        return (self.folder / "redis.log").read_text("utf-8", "replace")

    @property
    def aof(self) -> Path:
        """The file that transitions are appended to."""
        return max((self.folder / "appendonlydir").glob("*.incr.aof"))

    def launch(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the process, without waiting for its answers."""
        command = [self._binary, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        command += ["--save", "", "--maxmemory-policy", "noeviction", "--logfile", str(self.folder / "redis.log")]
        command += ["--appendonly", "yes", "--appendfsync", "everysec"]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self._process

    def start(self) -> None:
        """Start, and wait until it answers."""
        process = self.launch()
        until(lambda: process.poll() is not None or self.answers(), "the server answers")
        assert process.poll() is None, self.log

    def answers(self) -> bool:
        """Whether a PING is answered now."""
        with suppress(redis.RedisError, OSError), self.client() as client:
            return bool(client.ping())
        return False

    def client(self) -> redis.Redis:
        """A client of its own, without retries."""
        return redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0))

    def kill(self, rng: random.Random | None = None) -> None:
        """`kill -9`. With `rng`, at a moment at which everything acknowledged is in the file.

        Under `everysec` the server syncs at the start of each second of its clock, and holds back what it would
        append until that is over; at other times the file is written before the answer goes out.
        """
        if self._process is None:
            return
        if rng is not None:
            moment = rng.uniform(0.4, 0.95)
            until(lambda: 0 <= time.time() % 1 - moment < 0.05, "the chosen part of a second")
        self._process.kill()
        self._process.wait(timeout=20)
        self._process = None

    def rewrite(self) -> None:
        """Write the append-only file anew: needed after a start from a torn one.

        Redis 7.0 cuts a file that is torn within a transaction after the last whole command, not before its MULTI:
        what is appended from then on would be a part of that transaction for the next start, and be lost.
        """
        with self.client() as client:
            client.bgrewriteaof()

            def over() -> bool:
                about = client.info("persistence")
                return not about["aof_rewrite_in_progress"] and not about["aof_rewrite_scheduled"]

            until(over, "the append-only file is rewritten")
            assert client.info("persistence")["aof_last_bgrewrite_status"] == "ok", self.log

    def forget(self) -> None:
        """Kill it and delete its files."""
        self.kill()
        shutil.rmtree(self.folder / "appendonlydir")

    def close(self) -> None:
        """Kill it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Process:
    """A worker process (`workers.py`)."""

    def __init__(self, role: str, config: dict[str, Any]) -> None:
        self.name: str = config["name"]
        self.folder = Path(config["folder"])
        self._config = config
        errors = (self.folder / f"{self.name}.stderr").open("ab")
        command = [sys.executable, str(WORKERS), role, json.dumps(config)]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        errors.close()

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What every process of this name wrote down."""
        return read_journal(self.folder / f"{self.name}.jsonl")

    def did(self, what: str) -> list[dict[str, Any]]:
        """Its facts of one kind."""
        return [fact for fact in self.facts if fact["did"] == what]

    @property
    def code(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self._popen.poll()

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by SIGSTOP."""
        stat = Path(f"/proc/{self._popen.pid}/stat").read_text("ascii")
        return stat.rpartition(")")[2].split()[0] == "T"

    def wait_ready(self) -> None:
        """Wait until its table is open."""
        out: IO[bytes] | None = self._popen.stdout
        assert out is not None
        readable = select.select([out], [], [], 60)[0]
        assert readable and out.readline() == b"ready\n", self.errors

    @property
    def errors(self) -> str:
        """What it wrote to standard error."""
        return (self.folder / f"{self.name}.stderr").read_text("utf-8", "replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._popen.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code."""
        return self._popen.wait(timeout_s)

    def end(self) -> None:
        """Tell it to end."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()

    def kill(self) -> None:
        """`kill -9`."""
        self._popen.kill()
        self._popen.wait(20)

    def close(self) -> None:
        """Kill it if it is still there."""
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait(20)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


class Scene:
    """One table on one server, its workers, and a store that looks on."""

    def __init__(self, server: Server, folder: Path, rng: random.Random) -> None:
        self.server = server
        self.folder = folder
        self.rng = rng
        self.url = server.url
        self.table: dict[str, Any] = {}
        self._store: RedisStore | None = None
        self._workers: list[Process] = []

    def open(self, **table: Any) -> RedisStore:
        """Create the table (`workers.make_table` says what differs) and return the store that looks on."""
        self.table = table
        self._store = RedisStore(self.server.url, run_id=RUN, worker="observer", retry_s=20)
        self._store.open([make_table(table)])
        return self._store

    @property
    def store(self) -> RedisStore:
        """The store that looks on."""
        assert self._store is not None
        return self._store

    @property
    def counts(self) -> TableCounts:
        """The table's counters now."""
        return self.store.counts(TABLE)

    def ended(self, *states: str) -> int:
        """Rows that ended so (all states by default)."""
        ended = self.counts.ended
        return sum(rows for label, rows in ended.items() if not states or label.split("(")[0] in states)

    def start(self, role: str, name: str | None = None, *, ready: bool = True, **config: Any) -> Process:
        """Start a worker."""
        whole = {"name": name or role, "folder": str(self.folder), "url": self.url, "table": self.table} | config
        worker = Process(role, whole)
        self._workers.append(worker)
        if ready:
            worker.wait_ready()
        return worker

    def start_all(self, **workers: dict[str, Any]) -> dict[str, Process]:
        """Start workers at once, by name; the role is the name without its last digit. Waits for all of them."""
        started = {n: self.start(n.rstrip("0123456789"), n, ready=False, **c) for n, c in workers.items()}
        for worker in started.values():
            worker.wait_ready()
        return started

    def worker(self, name: str) -> Process:
        """The newest worker of this name."""
        return next(worker for worker in reversed(self._workers) if worker.name == name)

    def payload_keys(self) -> list[str]:
        """Names of the payload that the server holds."""
        with self.server.client() as client:
            return sorted(key.decode() for key in client.scan_iter("*:payload:*"))

    def facts(self, did: str) -> list[dict[str, Any]]:
        """Facts of one kind from all workers."""
        return [fact for facts in oracle.journals(self.folder).values() for fact in facts if fact["did"] == did]

    def until_ended(self, rows: int, timeout_s: float = 90.0) -> None:
        """Wait until so many rows ended and were recorded."""

        def over() -> bool:
            counts = self.counts
            return sum(counts.ended.values()) >= rows and counts.acked["recorder"] >= rows

        until(over, f"{rows} rows ended and recorded", timeout_s, self.state)

    def state(self) -> str:
        """What the table, its leases and its workers look like now."""
        lines: list[Any] = [self.folder, self.counts, *self.store.leases(TABLE), *self.store.verify(TABLE)]
        lines += [(w.name, w.code, w.did("raised"), w.facts[-1:]) for w in self._workers]
        return "\n".join(map(str, lines))

    def kill_workers(self) -> None:
        """`kill -9` all of them."""
        for worker in self._workers:
            worker.kill()

    def end_workers(self) -> None:
        """Tell all workers to end, and wait; each must end well or have been killed."""
        living = [worker for worker in self._workers if worker.code is None]
        for worker in living:
            worker.end()
        for worker in living:
            assert worker.wait() == 0, worker.errors + str(worker.did("raised"))

    def check(self, *, rewound: bool = False) -> None:
        """End the workers, then ask the oracle."""
        self.end_workers()
        oracle.snapshot(self.folder, self.store, make_table(self.table))
        broken = oracle.broken(self.folder, rewound=rewound)
        if broken:
            pytest.fail("\n".join(["the oracle:", *broken]), pytrace=False)

    def close(self) -> None:
        """Kill what is left."""
        for worker in self._workers:
            worker.close()
        if self._store is not None:
            self._store.close()
