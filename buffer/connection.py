"""Connections to the Redis server: who is there, is it fit, and one round trip per operation.

Every operation sent through a `Link` is idempotent, so that a lost connection is answered by sending it
again, with back-off, until the server is back or `retry_s` is over.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from rlmq.buffer import library
from rlmq.buffer.wire import ANSWER_S, Command, Scattered, Wire, packed
from rlmq.common.errors import DependencyError, IntegrityError, RlmqError, UsageError

RETRY_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_LEAST_REDIS, _LEAST_VALKEY = (7, 0), (8, 0)
_DENIED = ("executing the script can't", "ACL failure in script")  # what a function may not do, by server version
_RIGHTS = "Give the server's user the rules of rlmq.buffer.acl.acl_rules(RUN)"
_NOT_THERE = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, redis.InvalidResponse)

_MULTI, _EXEC = packed(("MULTI",)), packed(("EXEC",))

Payload = bytes | Scattered
Argument = str | bytes | int | float | msgspec.Raw  # of a function


class Refusable(bytes):
    """A packed command that the server may refuse: None is its answer then."""


class _LibraryMissing(DependencyError):
    """The server lacks the functions, and this user may not load them."""


class _Backoff:
    """Pauses that double, until an absolute `time.monotonic()`."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._pause_s = _FIRST_PAUSE_S

    def sleep(self) -> bool:
        """One pause; False, at once, when it would last beyond the end."""
        if time.monotonic() + self._pause_s > self._until:
            return False
        time.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


def connect(url: str, deadline: float) -> redis.Redis:
    """A client of a fit server, with the library of functions loaded.

    Args:
        url: `redis://host:port/0`, `rediss://…` or `unix:///path/to.sock`.
        deadline: `time.monotonic()` until which an absent or loading server is waited for, and one without
            the functions where this user may not load them.

    Raises:
        UsageError: not such a URL.
        DependencyError: no server, not a Redis, wrong password, missing rights, too old, or it evicts keys.
    """
    try:
        client = redis.Redis.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=ANSWER_S)
    except ValueError as error:
        expected = "redis://host:port, rediss://host:port or unix:///path/to.sock"
        raise UsageError("redis.url", got=repr(_shown(url)), expected=expected) from error
    backoff = _Backoff(deadline)
    while True:
        try:
            prepare(client)
            return client
        except _LibraryMissing:
            if not backoff.sleep():
                client.close()
                raise
        except RlmqError:
            client.close()
            raise
        except redis.AuthenticationError as error:
            client.close()
            raise _wrong_password(url, error) from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if not backoff.sleep():
                client.close()
                remedy = "Start it, or correct redis.url"
                raise _unfit(url, f"{error}", "a Redis server that answers", remedy) from error
        except redis.RedisError as error:
            client.close()
            raise _unfit(url, f"{type(error).__name__}: {error}", "a Redis server", "Correct redis.url") from error


def prepare(client: redis.Redis) -> None:
    """Check version and eviction policy, and load the functions where they are missing.

    Raises:
        DependencyError: the server is unfit, or its user lacks rights. redis.RedisError: as it comes.
    """
    name = _address(client)
    try:
        info = client.info()
    except NoPermissionError as error:
        raise _unfit(name, str(error), "a user that may run INFO", _RIGHTS) from error
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
    _load(client)


def _load(client: redis.Redis) -> None:
    """Load the library unless the server has it.

    Raises:
        DependencyError: it is missing and the user may not load it. redis.RedisError: as it comes.
    """
    try:
        library.load(client)
    except NoPermissionError as error:
        if "function|load" not in str(error):
            raise _unfit(_address(client), str(error), "a user that may run FUNCTION LIST", _RIGHTS) from error
        raise _LibraryMissing(
            f"Redis at {_address(client)}",
            got=f"no library {library.library_name()}, and a user without the right to load it",
            expected="the library, loaded by the run's controller, whose user has +function|load",
            remedy="Start the controller first, with the same version of rlmq",
        ) from error


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


def _address(client: redis.Redis) -> str:
    """Where the client connects to."""
    options = client.connection_pool.connection_kwargs
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def _unfit(url: str, got: str, expected: str, remedy: str) -> DependencyError:
    return DependencyError(f"Redis at {_shown(url)}", got=got, expected=expected, remedy=remedy)


def _wrong_password(url: str, error: redis.AuthenticationError) -> DependencyError:
    return _unfit(url, str(error), "a password that the server accepts", "Correct redis.url")


@dataclass(frozen=True, slots=True)
class _Posted:
    """A call whose answer nobody waits for yet."""

    commands: Sequence[Command]
    then: Callable[[Any], None]


class Link:
    """One connection, one round trip at a time, from any thread.

    At most one call is *posted*: sent, its answer left for the next call to collect. When the connection is lost,
    it is sent again before anything else.
    """

    def __init__(self, client: redis.Redis, *, retry_s: float = RETRY_S) -> None:
        self._client = client
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._wire = Wire(client)
        self._posted: _Posted | None = None

    def call(
        self,
        verb: str,
        prefix: str,
        *args: Argument,
        payload: Sequence[tuple[str, Payload]] = (),
        then: Refusable | None = None,
    ) -> list[Any]:
        """Run a function; `payload` is set in the same transaction before it.

        Args:
            prefix: the function's key, or a key, a space and a second key of its slot.
            then: a command to run after it, in the same round trip.

        Returns:
            The function's reply; its first element is the status, as text, and its last one what `then` answered.

        Raises:
            DependencyError: no server within `retry_s`, or one that refuses writes or lacks rights or functions.
            IntegrityError: the server does not know the table.
            redis.ResponseError: as it comes, `OutOfMemoryError` included (nothing was written).
        """
        command = function_call(verb, prefix, *args)
        if then is not None:
            reply, answer = self._run((command, then), 2)
            return checked(prefix, reply, answer)
        (reply,) = self._run(_with_payload(command, payload), 1)
        return checked(prefix, reply)

    def post(
        self,
        verb: str,
        prefix: str,
        *args: Argument,
        payload: Sequence[tuple[str, Payload]] = (),
        then: Callable[[Any], None],
    ) -> None:
        """Send a call and go on; where the connection is lost at once, wait for the answer.

        Args:
            then: gets the function's reply, its status as bytes, or a `redis.RedisError`, during a later call of
                this link or `settle`; it must not call this link.

        Raises:
            DependencyError: see `settle`.
        """
        commands = _with_payload(function_call(verb, prefix, *args), payload)
        self.settle()
        with self._lock:
            self._posted = _Posted(commands, then)
            try:
                self._wire.send(commands)
                return
            except redis.RedisError:
                pass
            except BaseException:
                self._posted = None
                raise
        self.settle()

    def settle(self) -> None:
        """Wait for the answer of the call that was posted.

        Raises:
            DependencyError: no server within `retry_s`; it stays posted.
        """
        if self._posted is not None:
            self.exchange(())

    def calls(self, calls: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        """Several functions, each with its prefix and arguments, in one round trip; see `call`."""
        replies = self._run([function_call(*call) for call in calls], len(calls))
        return [checked(str(call[1]), reply) for call, reply in zip(calls, replies, strict=True)]

    def _run(self, commands: Sequence[Command], count: int) -> Sequence[Any]:
        """The replies of `count` functions, the last commands but for the end of a transaction."""
        backoff: _Backoff | None = None
        loaded = False
        while True:
            replies = self.exchange(commands)
            if len(commands) > count:
                replies = _of_transaction(replies)[-count:]
            for reply in replies:
                if isinstance(reply, redis.RedisError):
                    break
            else:
                return replies
            if "Function not found" not in str(reply):
                raise self._refusal(reply) or reply
            backoff = backoff or _Backoff(time.monotonic() + self._retry_s)
            if loaded and not backoff.sleep():
                name = library.library_name()
                remedy = f"Run: redis-cli FUNCTION DELETE {name}"
                raise _unfit(_address(self._client), str(reply), f"all functions of {name}", remedy) from reply
            loaded = self._load_again(backoff)  # the server came back without it

    def _load_again(self, backoff: _Backoff) -> bool:
        """Load the library, or leave a pause in which somebody who may can do it, or the server comes back.

        Returns:
            Whether the server has a library of that name now.
        """
        try:
            _load(self._client)
            return True
        except _LibraryMissing:
            if not backoff.sleep():
                raise
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if not backoff.sleep():
                raise self._away(error) from error
        return False

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands at once and read all replies; an error reply is an exception in the list, or None.

        A server that is loading, or read-only, is not there yet.

        Raises:
            DependencyError: no server within `retry_s`, or one that refuses writes or this user.
        """
        with self._lock:
            backoff: _Backoff | None = None
            start = time.monotonic()
            while True:
                try:
                    return self._round_trip(commands)
                except redis.AuthenticationError as error:
                    raise _wrong_password(_address(self._client), error) from error
                except _NOT_THERE as error:
                    self._wire.disconnect()
                    backoff = backoff or _Backoff(start + self._retry_s)
                    if not backoff.sleep():
                        raise self._away(error) from error

    def attempt(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Run functions once, for tidying up: a server that is away or refuses is left alone."""
        with self._lock, suppress(redis.RedisError, DependencyError):
            if self._wire.connected:
                self._round_trip([function_call(*call) for call in calls])

    def _round_trip(self, commands: Sequence[Command]) -> list[Any]:
        wire = self._wire
        try:
            if self._posted is None:
                wire.send(commands)
            else:
                self._send_after_posted(self._posted, commands)
            replies = [wire.receive() for _ in commands]
        except BaseException:
            wire.disconnect()  # what is left unread must not answer the next command
            raise
        for k, reply in enumerate(replies):
            if isinstance(reply, redis.RedisError):
                if isinstance(reply, _NOT_THERE):
                    raise reply
                if isinstance(commands[k], Refusable):
                    replies[k] = None
                elif refusal := self._refusal(reply):
                    raise refusal from reply
        return replies

    def _send_after_posted(self, posted: _Posted, commands: Sequence[Command]) -> None:
        wire = self._wire
        if not wire.connected:
            wire.send(posted.commands)
        if commands:
            wire.send(commands)
        replies = [wire.receive() for _ in posted.commands]
        for reply in replies:
            if isinstance(reply, _NOT_THERE):
                raise reply
        self._posted = None
        try:
            reply = _of_transaction(replies)[-1] if len(replies) > 1 else replies[0]
        except redis.RedisError as error:
            reply = error
        posted.then(reply)

    def _away(self, error: redis.RedisError) -> DependencyError:
        got = f"no answer for {self._retry_s:g} s ({error})"
        remedy = "Look at its log, start it again; the run goes on where it was"
        return _unfit(_address(self._client), got, "the run's server", remedy)

    def _refusal(self, error: redis.RedisError) -> DependencyError | None:
        """What the user can do about an answer that no second try would change; None for others."""
        text = str(error)
        if text.startswith("MISCONF"):
            expected = "a server that can write its append-only file"
            remedy = "Free disk space and give the same command again"
        elif isinstance(error, NoPermissionError) or any(sign in text for sign in _DENIED):
            expected, remedy = "a user with the rights of a worker", _RIGHTS
        else:
            return None
        return _unfit(_address(self._client), text, expected, remedy)

    def close(self) -> None:
        """Close the connection."""
        self._wire.disconnect()


def checked(prefix: str, reply: list[Any], *more: Any) -> list[Any]:
    """A function's reply, with its status as text, and what came after it.

    Raises:
        IntegrityError: the server does not know the table.
    """
    reply[0] = reply[0].decode()
    if reply[0] == "unknown":
        raise IntegrityError(
            f"table behind {prefix}*",
            got="no such table in the server",
            expected="the table that this run opened",
            remedy="The server came back empty or was flushed: restore its data, or start a new run",
        )
    reply += more
    return reply


def _with_payload(command: bytes, payload: Sequence[tuple[str, Payload]]) -> Sequence[Command]:
    """The commands that set payload and then call a function, as one transaction."""
    if not payload:
        return (command,)
    return [_MULTI, *[("SET", key, data) for key, data in payload], command, _EXEC]


def _of_transaction(replies: list[Any]) -> list[Any]:
    """The replies inside that of EXEC.

    Raises:
        redis.RedisError: the first command that was refused.
    """
    last = replies[-1]
    if isinstance(last, redis.RedisError):
        raise next((reply for reply in replies if isinstance(reply, redis.RedisError)), last)
    return last  # type: ignore[no-any-return]


def function_call(verb: str, prefix: str, *args: Argument) -> bytes:
    """The packed command that runs a function; see `Link.call`. It gets its arguments as one msgpack array."""
    if bytes in map(type, args):
        args = tuple([_as_text(one) if type(one) is bytes else one for one in args])
    packed_args = _encode(args)
    return b"%b$%d\r\n%b\r\n" % (_head(verb, prefix), len(packed_args), packed_args)


_encode = msgspec.msgpack.Encoder().encode


def _as_text(data: bytes) -> msgspec.Raw:
    """As msgpack's text, which in Lua is any bytes: Redis' own msgpack knows no other kind."""
    return msgspec.Raw(b"\xdb%b%b" % (len(data).to_bytes(4, "big"), data))


@functools.lru_cache(maxsize=4096)
def _head(verb: str, prefix: str) -> bytes:
    """The command, but for its last argument."""
    keys = prefix.split(" ", 1)
    command = packed(("FCALL", library.function_name(verb), len(keys), *keys, ""))
    return command.removesuffix(b"$0\r\n\r\n")
