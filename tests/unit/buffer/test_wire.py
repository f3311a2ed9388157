"""The wire: what is sent arrives, what arrives is the reply, and whatever breaks in between ends the connection."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
import redis

from rlmq.buffer.wire import Wire

pytestmark = pytest.mark.timeout(60)


@dataclass
class Scattered:
    parts: tuple
    nbytes: int


def scattered(*parts):
    return Scattered(parts, sum(memoryview(part).nbytes for part in parts))


@pytest.fixture
def client(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def wire(client):
    wire = Wire(client, timeout_s=20)
    yield wire
    wire.disconnect()


def ask(wire, *commands):
    wire.send(commands)
    return [wire.receive() for _ in commands]


# -- arguments -----------------------------------------------------------------------------------------------


def test_arguments_of_every_kind_arrive(wire):
    sent = ("text", "ü", b"\x00\r\n", b"L" * 10_000, 7, -(2**60), 0.1, 1e300, "")
    pushed, found = ask(wire, ("RPUSH", "k", *sent), ("LRANGE", "k", 0, -1))
    assert pushed == len(sent)
    expected = [b"text", "ü".encode(), b"\x00\r\n", b"L" * 10_000, b"7", b"%d" % -(2**60), b"0.1", b"1e+300", b""]
    assert found == expected


def test_an_argument_in_several_buffers_arrives_as_one(wire):
    parts = (b"head", np.arange(5, dtype=np.int64), pa.py_buffer(b"arrow"), np.empty(0), bytearray(b"b"), b"")
    joined = b"head" + np.arange(5, dtype=np.int64).tobytes() + b"arrow" + b"b"
    replies = ask(wire, ("SET", "k", scattered(*parts)), ("GET", "k"), ("APPEND", "k", scattered()), ("GET", "k"))
    assert replies == [b"OK", joined, len(joined), joined]


def test_more_buffers_than_the_kernel_takes_at_once(wire):
    pieces = [bytes([k % 251]) * 3 for k in range(5000)]
    replies = ask(
        wire, ("SET", "k", scattered(np.empty(0), *pieces)), ("SET", "l", scattered(*pieces[:7])), ("GET", "k")
    )
    assert replies == [b"OK", b"OK", b"".join(pieces)]


def test_buffers_are_the_callers_own_until_they_are_sent(wire):
    data = np.zeros(100_000, np.uint8)
    argument = scattered(data)
    data[:] = 7
    assert ask(wire, ("SET", "k", argument), ("GET", "k"))[1] == b"\x07" * 100_000


@pytest.mark.parametrize("nbytes", [9, 11])
@pytest.mark.parametrize("pieces", [1, 3000])
def test_parts_that_are_not_as_long_as_told_end_the_connection(wire, nbytes, pieces):
    with pytest.raises(ValueError, match=r"scattered argument: its parts make [+-]1 bytes"):
        wire.send([("SET", "k", Scattered((b"0123456789", *[b""] * pieces), nbytes))])
    assert not wire.connected
    assert ask(wire, ("ECHO", "next")) == [b"next"]


def test_an_argument_of_another_kind_is_refused_before_anything_is_sent(wire):
    with pytest.raises(AttributeError):
        wire.send([("PING",), ("SET", "k", None)])
    assert ask(wire, ("ECHO", "next")) == [b"next"]


def test_a_send_that_signals_interrupt_goes_on_where_it_was(own_server):
    server = own_server._process.pid
    pieces = [os.urandom(4001) for _ in range(2000)]
    with redis.Redis.from_url(own_server.url) as client:
        wire = Wire(client, timeout_s=20)
        wire.connect()
        interrupts = []
        before = signal.signal(signal.SIGALRM, lambda *_: interrupts.append(1))
        os.kill(server, signal.SIGSTOP)
        try:
            resume = threading.Timer(0.3, os.kill, (server, signal.SIGCONT))
            resume.start()
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            wire.send([("SET", "k", scattered(*pieces))])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            resume.join()
        assert interrupts
        assert wire.receive() == b"OK"
        assert client.get("k") == b"".join(pieces)
        wire.disconnect()


# -- replies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("LPOP", "text"),
        ("NO-SUCH-COMMAND",),
        ("GET",),
        ("EVALSHA", "0" * 40, 0),
        ("EVAL", "return redis.error_reply('OOM of a kind')", 0),
        ("EVAL", "return redis.error_reply('MISCONF of a kind')", 0),
        ("EVAL", "return redis.error_reply('LOADING of a kind')", 0),
        ("EVAL", "return redis.error_reply('READONLY of a kind')", 0),
        ("EVAL", "return redis.error_reply('NOPERM of a kind')", 0),
        ("EVAL", "return redis.error_reply('NOAUTH of a kind')", 0),
        ("EVAL", "return redis.error_reply('MOVED 1 host:6379')", 0),
        ("EVAL", "return redis.error_reply('ERR max number of clients reached')", 0),
        ("EXEC",),
    ],
)
def test_an_error_reply_is_what_redis_py_would_raise(client, wire, command):
    client.set("text", "x")
    with pytest.raises(redis.RedisError) as raised:
        client.execute_command(*command)
    reply, after = ask(wire, command, ("ECHO", "after"))
    assert (type(reply), str(reply)) == (raised.type, str(raised.value))
    assert after == b"after"


def test_an_error_inside_a_transaction_is_inside_its_reply(client, wire):
    client.set("text", "x")
    *_, reply = ask(wire, ("MULTI",), ("LPOP", "text"), ("ECHO", "x"), ("EXEC",))
    assert isinstance(reply[0], redis.ResponseError)
    assert reply[1] == b"x"


def test_replies_larger_than_the_read_buffer(wire):
    large, odd = os.urandom(5_000_000), os.urandom(300_001)
    ask(wire, ("SET", "large", large), ("SET", "odd", odd))
    replies = ask(wire, ("MGET", "large", "none", "odd"), ("ECHO", "x"), ("MGET", "odd"))
    assert replies == [[large, None, odd], b"x", [odd]]


class Pieces:
    """Stands between a client and the server and hands the server's bytes on in pieces of `size`."""

    def __init__(self, path: str, size: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._path, self._size = path, size
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        near, _ = self._listener.accept()
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far = socket.socket(socket.AF_UNIX)
        far.connect(self._path)
        while ready := select.select([near, far], [], [])[0]:
            if near in ready:
                data = near.recv(65536)
                if not data:
                    break
                far.sendall(data)
            if far in ready:
                data = far.recv(65536)
                for at in range(0, len(data), self._size):
                    near.sendall(data[at : at + self._size])
        near.close()
        far.close()

    def close(self):
        self._listener.close()


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_replies_that_come_in_pieces(redis_server, redis_url, size):
    pieces = Pieces(str(redis_server.socket), size)
    with redis.Redis.from_url(pieces.url) as client:
        wire = Wire(client, timeout_s=20)
        value = b"\r\n$-1\r\n" * 700
        replies = ask(
            wire, ("SET", "k", value), ("MGET", "k", "none", "k"), ("NO-SUCH",), ("EVAL", "return {1,{'a'}}", 0)
        )
        assert replies[:2] == [b"OK", [value, None, value]]
        assert isinstance(replies[2], redis.ResponseError)
        assert replies[3] == [1, [b"a"]]
        wire.disconnect()
    pieces.close()


# -- ends ----------------------------------------------------------------------------------------------------


def test_a_connection_that_ends_is_a_connection_error_and_is_made_again(own_server):
    with redis.Redis.from_url(own_server.url) as client:
        wire = Wire(client, timeout_s=20)
        wire.send([("BLPOP", "nothing", 0)])
        own_server.kill()
        with pytest.raises(redis.ConnectionError):
            wire.receive()
        assert not wire.connected
        with pytest.raises(redis.ConnectionError):
            wire.send([("PING",)])
        with pytest.raises(redis.ConnectionError, match="Not connected"):
            wire.receive()
        with pytest.raises(redis.ConnectionError, match="Not connected"):
            wire.fileno()
        own_server.start()
        assert ask(wire, ("ECHO", "again")) == [b"again"]
        wire.disconnect()


@pytest.mark.parametrize("early", [True, False])
def test_a_silent_server_is_a_time_out_after_which_no_late_reply_is_taken(wire, client, early):
    wire.timeout_s = 0.05 if early else 20
    wire.send([("BLPOP", "k", 0)])
    wire.timeout_s = 0.05
    start = time.monotonic()
    with pytest.raises(redis.TimeoutError, match=r"Silent for 0\.05 s"):
        wire.receive()
    assert time.monotonic() - start < 10
    client.rpush("k", "late")
    assert ask(wire, ("ECHO", "mine")) == [b"mine"]


@pytest.mark.parametrize("pieces", [1, 1000, 5000])
def test_a_server_that_takes_nothing_is_a_time_out(own_server, pieces):
    with redis.Redis.from_url(own_server.url) as client:
        wire = Wire(client, timeout_s=0.1)
        wire.connect()
        server = own_server._process.pid
        os.kill(server, signal.SIGSTOP)
        try:
            with pytest.raises(redis.TimeoutError, match=r"Silent for 0\.1 s"):
                wire.send([("SET", "k", scattered(*[bytes(8_000_000 // pieces)] * pieces))])
            assert not wire.connected
        finally:
            os.kill(server, signal.SIGCONT)


def test_an_interrupted_receive_ends_the_connection(wire, client):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        wire.send([("BLPOP", "k", 0)])
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            wire.receive()
    finally:
        signal.signal(signal.SIGALRM, before)
    client.rpush("k", "late")
    assert ask(wire, ("ECHO", "mine")) == [b"mine"]


def test_the_clients_options_are_kept_but_for_its_protocol(redis_url):
    with redis.Redis.from_url(redis_url, db=3, client_name="me", protocol=3, socket_timeout=7) as client:
        wire = Wire(client)
        assert wire.timeout_s == 7
        client.set("k", "in three")
        name, value, nothing = ask(wire, ("CLIENT", "GETNAME"), ("GET", "k"), ("HGETALL", "none"))
        assert (name, value) == (b"me", b"in three")
        assert nothing == []  # RESP2, whatever the client speaks
        wire.disconnect()


# -- polling -------------------------------------------------------------------------------------------------


def test_a_blocking_pop_and_a_function_in_one_send_can_be_polled_beside_another_file(wire, client):
    read_end, write_end = os.pipe()
    poller = select.poll()
    wire.send([("BLPOP", "token", 20), ("EVAL", "return {'claimed', 1}", 0)])
    poller.register(wire.fileno(), select.POLLIN)
    poller.register(read_end, select.POLLIN)
    assert poller.poll(0) == [] and not wire.pending()

    os.write(write_end, b"!")
    assert [fd for fd, _ in poller.poll(20_000)] == [read_end]
    assert not wire.pending()
    os.read(read_end, 1)

    client.rpush("token", "t")
    assert [fd for fd, _ in poller.poll(20_000)] == [wire.fileno()]
    assert wire.receive() == [b"token", b"t"]
    assert wire.receive() == [b"claimed", 1]
    assert not wire.pending()
    os.close(read_end)
    os.close(write_end)


def test_pending_tells_of_a_reply_that_is_read_already(wire):
    wire.send([("ECHO", "one"), ("ECHO", "two"), ("ECHO", "three")])
    assert wire.receive() == b"one"  # the server answers what it read at once in one write
    assert wire.pending() and wire.pending()
    assert wire.receive() == b"two"
    assert wire.pending()
    assert wire.receive() == b"three"
    assert not wire.pending()


def test_replies_that_were_read_are_lost_with_their_connection(wire):
    wire.send([("ECHO", "one"), ("ECHO", "two"), ("ECHO", "three")])
    assert wire.receive() == b"one"
    assert wire.pending()
    wire.disconnect()
    assert not wire.pending()
    assert ask(wire, ("ECHO", "mine")) == [b"mine"]


def test_pending_tells_nothing_of_half_a_reply(wire):
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    wire.connect()
    wire._socket.close()
    wire._socket = near
    wire._set_timeout(near)
    far.sendall(b"+one\r\n$3\r\ntw")
    assert wire.receive() == b"one"
    assert not wire.pending()
    far.sendall(b"o\r\n")
    assert select.select([wire.fileno()], [], [], 20)[0]
    assert wire.receive() == b"two"
    far.sendall(b"?no such type\r\n")
    with pytest.raises(redis.InvalidResponse):
        wire.receive()
    assert not wire.connected
    for one in (near, far, listener):
        one.close()


def test_a_wire_not_yet_connected_has_nothing_pending(wire):
    assert not wire.connected
    assert not wire.pending()


def test_arrays_of_numbers_count_by_their_bytes(wire):
    numbers = array.array("d", [1.5, 2.5])
    assert ask(wire, ("SET", "k", scattered(numbers)), ("GET", "k"))[1] == numbers.tobytes()
