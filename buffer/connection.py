"""Connections to the Redis server: who is there, is it fit, and one round trip per operation.

Every operation sent through a `Link` is idempotent, so that a lost connection is answered by sending it
again, with back-off, until the server is back or `retry_s` is over.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from rlmq.buffer import library
from rlmq.common.errors import DependencyError, IntegrityError, RlmqError, UsageError

RETRY_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_ANSWER_S = 30.0
_LEAST_REDIS, _LEAST_VALKEY = (7, 0), (8, 0)

Argument = str | bytes | int | float
Command = tuple[Argument, ...]


def connect(url: str, deadline: float) -> redis.Redis:
    """A client of a fit server, with the library of functions loaded.

    Args:
        url: `redis://host:port/0`, `rediss://…` or `unix:///path/to.sock`.
        deadline: `time.monotonic()` until which an absent or loading server is waited for.

    Raises:
        UsageError: not such a URL.
        DependencyError: no server, not a Redis, wrong password, too old, or it evicts keys.
    """
    try:
        client = redis.Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=_ANSWER_S)
    except ValueError as error:
        expected = "redis://host:port, rediss://host:port or unix:///path/to.sock"
        raise UsageError("redis.url", got=repr(_shown(url)), expected=expected) from error
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            prepare(client, _shown(url))
            return client
        except RlmqError:
            client.close()
            raise
        except redis.AuthenticationError as error:
            client.close()
            raise _unfit(url, str(error), "a password that the server accepts", "Correct redis.url") from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if time.monotonic() + pause_s > deadline:
                client.close()
                remedy = "Start it, or correct redis.url"
                raise _unfit(url, f"{error}", "a Redis server that answers", remedy) from error
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except redis.RedisError as error:
            client.close()
            raise _unfit(url, f"{type(error).__name__}: {error}", "a Redis server", "Correct redis.url") from error


def prepare(client: redis.Redis, name: str = "the Redis server") -> None:
    """Check version and eviction policy, and load the functions.

    Raises:
        DependencyError: the server is unfit. redis.RedisError: as it comes.
    """
    info = client.info()
    if not isinstance(info, dict) or "redis_version" not in info:
        raise _unfit(name, "an answer to INFO without a version", "a Redis server", "Correct redis.url")
    valkey = info.get("server_name") == "valkey"
    version = str(info["valkey_version"] if valkey else info["redis_version"])
    least = _LEAST_VALKEY if valkey else _LEAST_REDIS
    if tuple(int(part) for part in version.split(".")[:2]) < least:
        product = "Valkey" if valkey else "Redis"
        expected = f"{product} {least[0]}.{least[1]} or newer (functions)"
        raise _unfit(name, f"{product} {version}", expected, "Install a newer server")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction" and int(info.get("maxmemory", 0)) > 0:
        remedy = "Run: redis-cli CONFIG SET maxmemory-policy noeviction"
        raise _unfit(name, f"maxmemory-policy {policy}", "noeviction (others lose rows silently)", remedy)
    library.load(client)


def as_client(client_or_url: redis.Redis | str, wait_s: float = RETRY_S) -> redis.Redis:
    """The client of a fit server: connected to the URL, or the given one after the same checks."""
    if isinstance(client_or_url, str):
        return connect(client_or_url, time.monotonic() + wait_s)
    if client_or_url.connection_pool.connection_kwargs.get("decode_responses"):
        raise UsageError("Redis client", got="decode_responses=True", expected="a client that returns bytes")
    prepare(client_or_url)
    return client_or_url


def _shown(url: str) -> str:
    """The URL without its password."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@") if password else url


def _unfit(url: str, got: str, expected: str, remedy: str) -> DependencyError:
    return DependencyError(f"Redis at {_shown(url)}", got=got, expected=expected, remedy=remedy)


def new_connection(client: redis.Redis) -> Any:
    """A connection of its own like the client's (redis-py does not type them), that leaves retries to its user."""
    connection: Any = client.connection_pool.make_connection()
    connection.retry = Retry(NoBackoff(), 0)
    connection.socket_timeout = connection.socket_timeout or _ANSWER_S
    return connection


class Link:
    """One connection, one round trip at a time, from any thread."""

    def __init__(self, client: redis.Redis, *, retry_s: float = RETRY_S) -> None:
        self._client = client
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._connection = new_connection(client)

    def call(self, verb: str, prefix: str, *args: Argument, payload: Sequence[tuple[str, bytes]] = ()) -> list[Any]:
        """Run a function; `payload` is set in the same transaction before it.

        Returns:
            The function's reply; its first element is the status, as text.

        Raises:
            DependencyError: no server within `retry_s`. IntegrityError: the server does not know the table.
            redis.ResponseError: as it comes, `OutOfMemoryError` included (nothing was written).
        """
        return self.calls([(verb, prefix, *args)], payload=payload)[0]

    def calls(self, calls: Sequence[Command], *, payload: Sequence[tuple[str, bytes]] = ()) -> list[list[Any]]:
        """Several functions in one round trip; see `call`."""
        commands: list[Command] = [("FCALL", library.function_name(str(c[0])), 1, *c[1:]) for c in calls]
        if payload:
            commands = [("MULTI",), *(("SET", key, data) for key, data in payload), *commands, ("EXEC",)]
        try:
            replies = self._functions(commands, len(calls), in_transaction=bool(payload))
        except redis.ResponseError as error:
            if str(error).startswith("MISCONF"):
                raise DependencyError(
                    "Redis",
                    got=str(error),
                    expected="a server that can write its append-only file",
                    remedy="Free disk space and give the same command again",
                ) from error
            if "Function not found" not in str(error):
                raise
            library.load(self._client)  # the server came back without it
            replies = self._functions(commands, len(calls), in_transaction=bool(payload))
        for call, reply in zip(calls, replies, strict=True):
            if reply[0] == b"unknown":
                raise IntegrityError(
                    f"table behind {call[1]!s}*",
                    got="no such table in the server",
                    expected="the table that this run opened",
                    remedy="The server came back empty or was flushed: restore its data, or start a new run",
                )
        return [[reply[0].decode(), *reply[1:]] for reply in replies]

    def _functions(self, commands: Sequence[Command], count: int, *, in_transaction: bool) -> list[Any]:
        replies = self.exchange(commands)
        if in_transaction:
            last = replies[-1]
            if isinstance(last, redis.ResponseError):
                refused = [r for r in replies[:-1] if isinstance(r, redis.ResponseError)]
                raise refused[0] if refused else last
            replies = last
        functions = replies[-count:]
        for reply in functions:
            if isinstance(reply, Exception):
                raise reply
        return list(functions)

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands at once and read all replies; an error reply is an exception in the list."""
        with self._lock:
            end = time.monotonic() + self._retry_s
            pause_s = _FIRST_PAUSE_S
            while True:
                try:
                    return self._round_trip(commands)
                except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                    self._connection.disconnect()
                    if time.monotonic() + pause_s > end:
                        remedy = "Look at its log, start it again; the run goes on where it was"
                        got = f"no answer for {self._retry_s:g} s ({error})"
                        raise DependencyError(
                            "Redis", got=got, expected="the run's server", remedy=remedy
                        ) from error
                    time.sleep(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def attempt(self, calls: Sequence[Command]) -> None:
        """Run functions once, for tidying up: a server that is away or refuses is left alone."""
        commands: list[Command] = [("FCALL", library.function_name(str(c[0])), 1, *c[1:]) for c in calls]
        with self._lock, suppress(redis.RedisError, OSError):
            if self._connection.is_connected:
                self._round_trip(commands)

    def _round_trip(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(connection.read_response())
            except redis.ResponseError as error:
                replies.append(error)
        return replies

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()
