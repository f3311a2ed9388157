"""Connecting: fit servers, unfit ones, and names."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import redis

from rlmq.buffer import connection, keys, library
from rlmq.common.errors import DependencyError, UsageError


def _soon():
    return time.monotonic() + 0.2


def _listener(reply):
    """A TCP server that answers anything with `reply`; returns its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer:
                peer.recv(4096)
                peer.sendall(reply)

    threading.Thread(target=serve, daemon=True).start()
    return server


def test_a_fit_server_is_connected_and_knows_the_functions(redis_url):
    with connection.connect(redis_url, _soon()) as client:
        names = [dict(zip(e[::2], e[1::2], strict=True)).get(b"library_name") for e in client.function_list()]
        assert library.library_name().encode() in names


def test_loading_the_functions_twice_is_the_same(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        library.load(client)
        library.load(client)


def test_an_absent_server_is_a_dependency_error_with_its_address(tmp_path):
    with pytest.raises(DependencyError, match=rf"Redis at unix://{tmp_path}/none\.sock.*Start it"):
        connection.connect(f"unix://{tmp_path}/none.sock", _soon())


def test_a_server_that_starts_late_is_waited_for(own_server):
    own_server.kill()
    thread = threading.Timer(0.2, own_server.start)
    thread.start()
    with connection.connect(own_server.url, time.monotonic() + 20) as client:
        assert client.ping()
    thread.join()


def test_something_else_than_a_redis_is_a_dependency_error():
    server = _listener(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(DependencyError, match=r"Redis at redis://127\.0\.0\.1"):
        connection.connect(f"redis://127.0.0.1:{server.getsockname()[1]}", _soon())
    server.close()


def test_a_wrong_password_is_a_dependency_error_that_does_not_show_it(own_server):
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("requirepass", "right")
    try:
        with pytest.raises(DependencyError, match="password") as raised:
            connection.connect(f"unix://:wrong@{own_server.socket}", _soon())
        assert "wrong" not in str(raised.value).replace("WRONGPASS", "")
    finally:
        with redis.Redis.from_url(f"unix://:right@{own_server.socket}") as client:
            client.config_set("requirepass", "")


def test_a_server_that_evicts_keys_is_refused(own_server):
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 100_000_000)
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(DependencyError, match=r"allkeys-lru, expected noeviction"):
            connection.connect(own_server.url, _soon())


@pytest.mark.parametrize(
    ("info", "fit"),
    [
        ({"redis_version": "6.2.14"}, False),
        ({"redis_version": "7.0.0"}, True),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "7.2.5"}, False),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.0.1"}, True),
        ({"redis_version": "10.0.0"}, True),
    ],
)
def test_old_servers_are_refused(redis_url, info, fit):
    with redis.Redis.from_url(redis_url) as client:
        client.info = lambda: info
        if fit:
            connection.prepare(client)
        else:
            with pytest.raises(DependencyError, match="or newer"):
                connection.prepare(client)


@pytest.mark.parametrize("url", ["http://localhost:6379", "localhost:6379", ""])
def test_another_kind_of_url_is_a_usage_error(url):
    with pytest.raises(UsageError, match=r"redis\.url"):
        connection.connect(url, _soon())


def test_a_client_that_decodes_replies_is_refused(redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as client, pytest.raises(UsageError, match="bytes"):
        connection.as_client(client)


def test_keys_have_one_hash_tag_per_table():
    assert keys.table_prefix("math-1", "train") == "rlmq:{math-1:train}:"
    assert keys.run_prefix("math-1") == "rlmq:{math-1}:"


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a}b", "a\n", "-a", "é", "x" * 121])
def test_names_that_would_break_a_key_are_refused(name):
    with pytest.raises(UsageError, match="run name"):
        keys.run_prefix(name)
