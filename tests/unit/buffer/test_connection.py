"""Connecting: fit servers, unfit ones, and names; links: servers that go, come back, or refuse."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time

import pytest
import redis

from rlmq.buffer import acl, connection, keys, library
from rlmq.buffer.connection import Link
from rlmq.buffer.wire import Wire
from rlmq.common.errors import DependencyError, IntegrityError, UsageError

pytestmark = pytest.mark.timeout(60)
RUN = keys.run_prefix("run-1")


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


# -- links ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _linked(url, retry_s=20):
    """A client with all rights on the server, and a link of a user of the URL's."""
    with redis.Redis.from_url(url, protocol=2) as client:
        link = Link(client, retry_s=retry_s)
        yield link
        link.close()


@contextlib.contextmanager
def _meanwhile(action):
    """Run the action in a thread; an error in it fails the test."""
    errors = []

    def run():
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(30)
    assert not thread.is_alive() and errors == []


def _when(condition, action):
    """Wait for the condition, then act."""

    def run():
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.002)
        action()

    return run


def _denied(admin):
    """What users were refused."""
    entries = (dict(zip(entry[::2], entry[1::2], strict=True)) for entry in admin.execute_command("ACL", "LOG"))
    return {entry[b"object"].decode() for entry in entries}


@pytest.fixture
def admin(own_server):
    with redis.Redis.from_url(own_server.url, protocol=2) as admin:
        library.load(admin)
        yield admin


@pytest.fixture
def worker_url(own_server, admin):
    """URL of a user with exactly the rights of a worker of the run."""
    admin.execute_command("ACL", "SETUSER", "worker", "on", ">secret", *acl.acl_rules("run-1"))
    return f"unix://worker:secret@{own_server.socket}"


def test_calls_with_payload_are_one_transaction(redis_url):
    with redis.Redis.from_url(redis_url) as client, _linked(redis_url) as link:
        library.load(client)
        payload = [("a", b"x" * 10_000), ("b", b"y")]
        assert link.call("note", RUN, "name", b"value", payload=payload) == ["ok"]
        assert link.calls([("noted", RUN, "name"), ("noted", RUN, "none")]) == [["ok", b"value"], ["none"]]
        assert link.exchange([("MGET", "a", "b", "c")]) == [[b"x" * 10_000, b"y", None]]


def test_an_error_of_a_function_is_raised_and_one_of_a_command_returned(redis_url):
    with redis.Redis.from_url(redis_url) as client, _linked(redis_url) as link:
        library.load(client)
        client.set(f"{RUN}{keys.RUN_SUFFIXES['notes']}", "not a hash")
        for payload in ([], [("a", b"x")]):
            with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
                link.call("note", RUN, "name", "value", payload=payload)
        (reply,) = link.exchange([("LPOP", f"{RUN}{keys.RUN_SUFFIXES['notes']}")])
        assert isinstance(reply, redis.ResponseError)


def test_a_table_that_the_server_does_not_know_is_an_integrity_error(redis_url):
    with redis.Redis.from_url(redis_url) as client, _linked(redis_url) as link:
        library.load(client)
        with pytest.raises(IntegrityError, match="came back empty"):
            link.call("counts", keys.table_prefix("run-1", "none"))


def test_a_server_that_restarts_between_and_during_calls_is_waited_for(own_server, admin):
    with _linked(own_server.url) as link:
        link.call("note", RUN, "first", "1")
        own_server.kill()
        own_server.start()
        assert link.call("note", RUN, "second", "2") == ["ok"]  # on a connection that ended unnoticed
        own_server.kill()
        with _meanwhile(own_server.start):
            assert link.call("note", RUN, "third", "3") == ["ok"]
        assert link.call("noted", RUN, "third") == ["ok", b"3"]


def test_a_server_that_hangs_is_asked_again(own_server, admin):
    with redis.Redis.from_url(own_server.url, socket_timeout=0.1) as client:
        link = Link(client, retry_s=20)
        link.call("note", RUN, "name", "value")
        server = own_server._process.pid
        os.kill(server, signal.SIGSTOP)
        resume = threading.Timer(0.5, os.kill, (server, signal.SIGCONT))
        resume.start()
        assert link.call("noted", RUN, "name") == ["ok", b"value"]
        resume.join()
        link.close()


def test_a_loading_server_is_not_there_yet(own_server, admin):
    with admin.pipeline(transaction=False) as pipeline:
        for k in range(2000):
            pipeline.set(f"key-{k}", "x" * 100)
        pipeline.execute()
    admin.bgrewriteaof()
    end = time.monotonic() + 20
    while admin.info("persistence")["aof_rewrite_in_progress"] and time.monotonic() < end:
        time.sleep(0.005)
    with _linked(own_server.url) as link:
        own_server.kill()
        own_server._options += ("--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024")
        seen = []

        def loading():
            try:
                admin.ping()
            except redis.BusyLoadingError:
                seen.append(True)
            except redis.ConnectionError:
                return False
            return bool(seen)

        with _meanwhile(own_server.start):
            _when(loading, lambda: None)()
            assert link.call("note", RUN, "name", "value") == ["ok"]
        assert admin.info("persistence")["loading"] == 0


def test_a_read_only_server_is_not_there_yet(own_server, admin):
    with _linked(own_server.url) as link:
        admin.replicaof("127.0.0.1", "1")
        refused = admin.info("stats")["total_error_replies"]

        def was_refused():
            return admin.info("stats")["total_error_replies"] > refused

        with _meanwhile(_when(was_refused, lambda: admin.replicaof("NO", "ONE"))):
            assert link.call("note", RUN, "name", "value", payload=[("a", b"x")]) == ["ok"]
        assert admin.get("a") == b"x"


def test_a_server_that_cannot_write_its_file_is_a_dependency_error(own_server, admin):
    with _linked(own_server.url) as link:
        admin.config_set("save", "1 1")
        (own_server.folder / "dump.rdb").mkdir()
        admin.set("a", "x")
        with contextlib.suppress(redis.ResponseError):
            admin.bgsave()
        end = time.monotonic() + 20
        while admin.info("persistence")["rdb_last_bgsave_status"] != "err" and time.monotonic() < end:
            time.sleep(0.005)
        for payload in ([], [("a", b"x")]):
            with pytest.raises(DependencyError, match=r"MISCONF.*Free disk space"):
                link.call("note", RUN, "name", "value", payload=payload)


def test_calls_of_several_threads_do_not_mix(redis_url):
    with redis.Redis.from_url(redis_url) as client, _linked(redis_url) as link:
        library.load(client)
        right = []

        def work(name):
            for k in range(100):
                link.call("note", RUN, name, f"{name} {k}", payload=[(name, b"%d" % k)])
                right.append(link.call("noted", RUN, name) == ["ok", f"{name} {k}".encode()])

        threads = [threading.Thread(target=work, args=(f"t{k}",), daemon=True) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert right == [True] * 400


@pytest.mark.parametrize("where", [Wire.send, Wire.receive])
def test_a_call_that_is_interrupted_between_replies_leaves_none_behind(redis_url, where):
    entered = []

    def interrupt(frame, event, _):
        if event == "call" and frame.f_code is where.__code__:
            entered.append(event)
            if len(entered) == 2:
                raise KeyboardInterrupt  # as a signal that arrives before the function's first line

    with _linked(redis_url) as link:
        link.exchange([("ECHO", "before")])
        before = sys.getprofile()
        sys.setprofile(interrupt)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                link.exchange([("ECHO", "one"), ("ECHO", "two"), ("ECHO", "three")])
                link.exchange([("ECHO", "four")])
        finally:
            sys.setprofile(before)
        assert link.exchange([("ECHO", "mine")]) == [b"mine"]
    assert len(entered) >= 2


def test_an_attempt_leaves_a_server_alone_that_is_away_or_refuses(own_server, admin):
    with _linked(own_server.url) as link:
        link.attempt([("note", RUN, "name", "never connected")])
        assert link.call("noted", RUN, "name") == ["none"]
        link.attempt([("note", RUN, "name", "done")])
        assert link.call("noted", RUN, "name") == ["ok", b"done"]
        link.attempt([("no-such-verb", RUN)])
        own_server.kill()
        link.attempt([("note", RUN, "name", "away")])


# -- rights --------------------------------------------------------------------------------------------------


def test_a_worker_needs_no_more_than_the_rules(own_server, admin, worker_url):
    with connection.connect(worker_url, _soon()) as client:
        link = Link(client, retry_s=0.2)
        link.call("note", RUN, "name", "value", payload=[(f"{RUN}a", b"x")])
        assert link.call("noted", RUN, "name") == ["ok", b"value"]
        table = keys.table_prefix("run-1", "train")
        assert link.exchange([("MGET", f"{RUN}a", f"{table}b")]) == [[b"x", None]]
        assert link.exchange([("BLPOP", f"{table}wake:w", "0.01")]) == [None]
        link.close()
    assert _denied(admin) <= {"client|setinfo", "client"}, "redis-py tells its name; it takes no for an answer"


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
        ("FUNCTION", "FLUSH"),
        ("FUNCTION", "LOAD", "#!lua name=x"),
        ("EVAL", "return 1", 0),
        ("SET", "rlmq:{run-10}:a", "x"),
        ("SET", "rlmq:{run-10:train}:a", "x"),
        ("SET", "other", "x"),
        ("PUBLISH", "channel", "x"),
    ],
)
def test_a_worker_may_do_nothing_else(worker_url, command):
    with connection.connect(worker_url, _soon()) as client:
        link = Link(client, retry_s=0.2)
        with pytest.raises(DependencyError, match=r"(?i)no permissions.*rights of a worker.*acl_rules"):
            link.exchange([command])
        link.close()


def test_a_function_that_needs_more_rights_than_the_user_has_names_the_rules(admin, worker_url):
    admin.execute_command("ACL", "SETUSER", "worker", "-hset")
    with connection.connect(worker_url, _soon()) as client:
        link = Link(client, retry_s=0.2)
        for payload in ([], [(f"{RUN}a", b"x")]):
            with pytest.raises(DependencyError, match=r"rights of a worker.*acl_rules"):
                link.call("note", RUN, "name", "value", payload=payload)
        link.close()


@pytest.mark.parametrize("command", ["info", "function|list"])
def test_a_user_that_may_not_look_at_the_server_is_told_the_rules(admin, worker_url, command):
    admin.execute_command("ACL", "SETUSER", "worker", f"-{command}")
    with pytest.raises(DependencyError, match="acl_rules"):
        connection.connect(worker_url, _soon())


def test_a_worker_without_functions_is_told_who_loads_them(admin, worker_url):
    admin.function_flush("SYNC")
    with pytest.raises(DependencyError, match=r"no library rlmq_[0-9a-f]+.*loaded by the run's controller"):
        connection.connect(worker_url, _soon())
    with redis.Redis.from_url(worker_url) as client, pytest.raises(DependencyError, match="controller"):
        connection.as_client(client)


def test_a_worker_waits_until_the_controller_has_loaded_the_functions(own_server, admin, worker_url):
    admin.function_flush("SYNC")
    refused = _when(lambda: "function|load" in _denied(admin), lambda: library.load(admin))
    with _meanwhile(refused), connection.connect(worker_url, time.monotonic() + 20) as client:
        link = Link(client)
        assert link.call("note", RUN, "name", "value") == ["ok"]
        link.close()


def test_functions_that_the_server_lost_are_loaded_again_by_who_may(admin, own_server, worker_url):
    with connection.connect(worker_url, _soon()) as client, _linked(own_server.url) as mighty:
        link = Link(client, retry_s=20)
        admin.function_flush("SYNC")
        refused = _when(lambda: "function|load" in _denied(admin), lambda: mighty.call("noted", RUN, "name"))
        with _meanwhile(refused):
            assert link.call("note", RUN, "name", "value", payload=[(f"{RUN}a", b"x")]) == ["ok"]
        assert mighty.call("noted", RUN, "name") == ["ok", b"value"]
        impatient = Link(client, retry_s=0.2)
        admin.function_flush("SYNC")
        with pytest.raises(DependencyError, match="loaded by the run's controller"):
            impatient.call("noted", RUN, "name")
        for one in (link, impatient):
            one.close()


def test_a_password_that_no_longer_holds_is_a_dependency_error(admin, worker_url):
    with connection.connect(worker_url, _soon()) as client:
        link = Link(client, retry_s=20)
        admin.execute_command("ACL", "SETUSER", "worker", "resetpass", ">changed")
        with pytest.raises(DependencyError, match=r"password.*Correct redis\.url"):
            link.call("noted", RUN, "name")
        link.close()


def test_the_rules_refuse_a_name_that_would_widen_them():
    with pytest.raises(UsageError, match="run name"):
        acl.acl_rules("*")


def test_a_library_that_lacks_functions_is_named_in_time(own_server, admin):
    # given a server on which something else has the library's name
    name = library.library_name()
    admin.function_flush("SYNC")
    admin.function_load(f"#!lua name={name}\nredis.register_function('something_else', function() return 1 end)")
    # when a function is called, then the library is named before long
    named = pytest.raises(DependencyError, match=f"all functions of {name}.*FUNCTION DELETE {name}")
    with _linked(own_server.url, retry_s=0.5) as link, named:
        link.call("note", RUN, "name", "value")
