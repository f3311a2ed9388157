"""One connection to the server: packed commands out, parsed replies in, for as little CPU as Python allows.

redis-py makes the connection (unix socket, TCP or TLS, credentials, client options); from then on the socket is
driven here. Large arguments go to the kernel from the buffers that they lie in; hiredis parses the replies, and
redis-py's own table turns error replies into its exceptions. Time-outs are the kernel's: Python's own cost one
more system call for every read and write.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.retry import Retry

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ANSWER_S = 30.0
_READ_BYTES = 256 * 1024  # more than a TLS record, of which nothing may stay behind unseen by a poll
_KEPT_BYTES = 2 * 1024 * 1024  # of the parser's buffer, so that it need not grow anew for each large reply
_LARGE_BYTES = 32 * 1024  # from here on an argument is cheaper to hand over than to copy
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")
_SMALL = frozenset((str, bytes, int, float))
_NOTHING = object()

packed: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command  # a command of small arguments as it is sent


class Scattered(Protocol):
    """One argument that lies in several buffers; `nbytes` is the sum of their lengths in bytes."""

    @property
    def parts(self) -> Sequence[ReadableBuffer]:
        """The buffers, each contiguous, in order."""

    @property
    def nbytes(self) -> int:
        """Length of the argument."""


Small = str | bytes | int | float
Command = (
    tuple[Small | Scattered, ...] | bytes
)  # only the last argument may be scattered; bytes: as `packed` made them


class Wire:
    """One connection, for one thread at a time. It connects when first used, and again after it broke.

    Whatever interrupts a `send` or `receive` ends the connection, so that no reply is taken for that of a later
    command. An error tells that a command may or may not have run.

    Args:
        client: how to connect.
        timeout_s: longest silence in a send or receive; None: the client's `socket_timeout`, or `ANSWER_S`.
    """

    def __init__(self, client: redis.Redis, *, timeout_s: float | None = None) -> None:
        self._connection = _new_connection(client)
        self._timeout_s: float = timeout_s or self._connection.socket_timeout
        self._socket: socket.socket | None = None
        self._encrypted = False
        self._buffer = bytearray(_READ_BYTES)
        self._reader = _new_reader()
        self._next: Any = _NOTHING  # a reply that `pending` parsed

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as known without reading."""
        return self._socket is not None

    @property
    def timeout_s(self) -> float:
        """Longest silence in a `send` or `receive`; may be set at any time."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self._timeout_s = value
        if self._socket is not None:
            self._set_timeout(self._socket)

    def connect(self) -> socket.socket:
        """Connect and authenticate, unless connected; returns the socket.

        Raises:
            redis.RedisError: as redis-py raises it.
        """
        if self._socket is None:
            try:
                self._connection.connect()
                self._encrypted = isinstance(self._connection._sock, ssl.SSLSocket)
                self._set_timeout(self._connection._sock)
            except BaseException:
                self._connection.disconnect()  # an interrupted greeting must not go on with a command
                raise
            self._socket = self._connection._sock
        return self._socket

    def _set_timeout(self, sock: socket.socket) -> None:
        if self._encrypted:  # OpenSSL would wait on after the kernel's time-out
            sock.settimeout(self._timeout_s)
            return
        sock.settimeout(None)
        seconds, rest_s = divmod(max(self._timeout_s, 0.001), 1)  # zero would mean for ever
        timeval = struct.pack("ll", int(seconds), int(rest_s * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def fileno(self) -> int:
        """The socket, to poll for a reply; ask `pending` first.

        Raises:
            redis.ConnectionError: not connected.
        """
        return self._connected().fileno()

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise redis.ConnectionError("Not connected")
        return self._socket

    def send(self, commands: Sequence[Command]) -> None:
        """Send all commands; each has one reply to `receive`.

        Nothing is read meanwhile. That cannot block both sides: a Redis server keeps replies in its memory while
        nobody reads them, and goes on reading. So the replies of one `send` should be small beside its memory.

        Raises:
            redis.ConnectionError: no connection, or it ended. redis.TimeoutError: the server takes nothing.
        """
        buffers, total_bytes = pack(commands)
        sock = self._socket or self.connect()
        try:
            if len(buffers) == 1:
                sock.sendall(buffers[0])
            elif self._encrypted:
                sock.sendall(b"".join(buffers))
            else:
                _send_all(sock, buffers, total_bytes)
        except OSError as error:
            raise self._lost(error) from error
        except BaseException:
            self.disconnect()
            raise

    def receive(self) -> Any:
        """The next reply. An error reply is returned, as the exception that redis-py would raise.

        Raises:
            redis.ConnectionError: the connection ended. redis.TimeoutError: no answer.
            redis.InvalidResponse: not a Redis server.
        """
        if self._next is not _NOTHING:
            reply, self._next = self._next, _NOTHING
            return reply
        try:
            while (reply := self._reader.gets()) is _NOTHING:
                self._read()
        except OSError as error:
            raise self._lost(error) from error
        except BaseException:
            self.disconnect()
            raise
        return reply

    def _read(self) -> None:
        count = (self._socket or self._connected()).recv_into(self._buffer)
        if count == 0:
            raise ConnectionResetError("Connection closed by server")
        self._reader.feed(self._buffer, 0, count)  # type: ignore[arg-type]  # it takes any buffer

    def pending(self) -> bool:
        """Whether `receive` would return at once with what has been read already, whatever `fileno` shows."""
        if self._next is _NOTHING:
            try:
                self._next = self._reader.gets()
            except BaseException:
                self.disconnect()
                raise
        return self._next is not _NOTHING

    def _lost(self, error: OSError) -> redis.RedisError:
        self.disconnect()
        if isinstance(error, BlockingIOError | TimeoutError):
            return redis.TimeoutError(f"Silent for {self._timeout_s:g} s")
        return redis.ConnectionError(str(error))

    def disconnect(self) -> None:
        """End the connection; replies that were not received are lost."""
        self._socket = None
        self._next = _NOTHING
        self._reader = _new_reader()
        self._connection.disconnect()


def _new_connection(client: redis.Redis) -> Any:
    """A connection like the client's (redis-py does not type them), that leaves retries to its user."""
    pool = client.connection_pool
    options = dict(pool.connection_kwargs)
    options["socket_timeout"] = options.get("socket_timeout") or ANSWER_S
    options |= {
        "protocol": 2,
        "decode_responses": False,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
    }
    return pool.connection_class(**options)


def _new_reader() -> hiredis.Reader:
    reader = hiredis.Reader(
        protocolError=redis.InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=_NOTHING
    )
    reader.setmaxbuf(_KEPT_BYTES)
    return reader


def pack(commands: Sequence[Command]) -> tuple[list[ReadableBuffer], int]:
    """The commands as buffers to send one after another, and their length in bytes.

    Large arguments are buffers of their own, not copied; what lies between is joined.
    """
    buffers: list[ReadableBuffer] = []
    texts: list[ReadableBuffer] = []
    total_bytes = 0
    for command in commands:
        if isinstance(command, bytes):
            texts.append(command)
        elif type(command[-1]) in _SMALL:
            texts.append(packed(command))  # none is scattered
        else:
            total_bytes += _pack_scattered(command, texts, buffers)  # the last one is
    text = b"".join(texts)
    buffers.append(text)
    return buffers, total_bytes + len(text)


def _pack_scattered(command: tuple[Any, ...], texts: list[ReadableBuffer], buffers: list[ReadableBuffer]) -> int:
    """A command that ends with a scattered argument; returns how many bytes went to the buffers."""
    argument: Scattered = command[-1]
    parts, nbytes = argument.parts, argument.nbytes
    if len(command) == 3 and command[0] == "SET":  # as nearly always
        key = command[1].encode()
        texts.append(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, nbytes))
    else:
        small = packed(command[:-1])
        texts.append(b"*%d%b$%d\r\n" % (len(command), small[small.index(b"\r") :], nbytes))
    if nbytes < _LARGE_BYTES:
        whole = parts[0] if len(parts) == 1 else b"".join(parts)
        if (excess := memoryview(whole).nbytes - nbytes) != 0:
            raise _wrong_length(excess)
        texts += (whole, b"\r\n")
        return 0
    text = b"".join(texts)
    buffers.append(text)
    buffers.extend(parts)
    texts[:] = (b"\r\n",)
    return len(text) + nbytes


def _wrong_length(excess_bytes: int) -> ValueError:
    return ValueError(f"scattered argument: its parts make {excess_bytes:+} bytes of its nbytes")


def _send_all(sock: socket.socket, buffers: Sequence[ReadableBuffer], total_bytes: int) -> None:
    """Send from many buffers. A blocking socket takes all at once, but for time-outs and signals."""
    sent = sock.sendmsg(buffers) if len(buffers) <= _MOST_BUFFERS else 0
    if sent == total_bytes:
        return
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    real_bytes = sum(view.nbytes for view in views)
    if real_bytes != total_bytes:
        raise _wrong_length(real_bytes - total_bytes)
    at = 0
    while True:
        while at < len(views) and sent >= views[at].nbytes:
            sent -= views[at].nbytes
            at += 1
        if at == len(views):
            return
        views[at] = views[at][sent:]
        sent = sock.sendmsg(views[at : at + _MOST_BUFFERS])
