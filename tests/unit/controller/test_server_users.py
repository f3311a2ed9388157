"""The run's own server lets nobody in without a password, and the run's processes do no more than they need."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.calls import Call
from rlmq.common.run_folder import RunFolder
from rlmq.controller.addresses import write_addresses
from rlmq.controller.server import Server, find_binary, remove_socket_folder
from rlmq.controller.server_users import FILE


@contextmanager
def running(run: RunFolder) -> Iterator[Server]:
    run.path.mkdir(parents=True, exist_ok=True)
    server = Server(run, find_binary())
    try:
        server.start()
        server.wait_ready(30.0)
        yield server
    finally:
        server.stop()
        remove_socket_folder(run)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "b-1")


@pytest.mark.timeout(60)
def test_nobody_comes_in_without_a_password(run: RunFolder) -> None:
    with (
        running(run) as server,
        redis.Redis(unix_socket_path=str(server.socket)) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


@pytest.mark.timeout(60)
def test_a_process_of_the_run_does_its_work_and_nothing_else(run: RunFolder) -> None:
    with running(run) as server, redis.Redis.from_url(server.url) as client:
        # given what a process of the run does
        calls = RedisCalls(server.url, run_id=run.run_id)
        epoch = calls.begin_epoch(fingerprint="f", lease_s=10)
        calls.join("reward", 0, fingerprint="f")
        calls.submit(Call(id="1/1/reward.score", role="reward", method="score", ranks=(0,), epoch=epoch))
        assert calls.next("reward", 0) is not None
        calls.close()
        # when it tries more, then the server refuses
        for words in (
            ("CONFIG", "GET", "*"),
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("SHUTDOWN",),
            ("EVAL", "return 1", "0"),
            ("ACL", "LIST"),
            ("SET", "rlmq:{other-1}:x", "1"),
            ("MGET", "elsewhere"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)


@pytest.mark.timeout(60)
def test_passwords_lie_in_private_files_and_outlive_a_restart(run: RunFolder) -> None:
    with running(run) as server:
        write_addresses(run, server.url)
        before = server.url
    with running(run) as server, redis.Redis.from_url(before) as client:
        assert client.ping()
        assert server.url == before
    for path in (run.addresses, run.server / FILE):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.timeout(60)
def test_no_password_is_on_a_command_line_or_in_a_log(run: RunFolder) -> None:
    with running(run) as server:
        assert server.child is not None
        words = (run.server / FILE).read_text().replace(">", " ").split()
        passwords = [word for word in words if len(word) == 64]
        assert len(passwords) == 2
        seen = Path(f"/proc/{server.child.pid}/cmdline").read_text() + server.log.read_text()
    assert not [password for password in passwords if password in seen]
