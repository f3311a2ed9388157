"""Sleeping until a claim or a put may succeed:

a registration in the server, and a token list on a connection of its own.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from rlmq.buffer.connection import Argument, Link, Refusable, checked, function_call
from rlmq.buffer.keys import wake_key
from rlmq.buffer.wire import Wire

_GRACE_S, _MOST_GRACE_S = 1.0, 5.0  # so long after its time a blocked pop is given up
_PAUSE_S = 0.05  # after a lost connection
_LOOK_S = 2.0  # a token may have gone to a process that died before it could claim: look again
# Table (as `Link.call` takes it) to (stage index or 0 for room, rows, settled or bytes)...
_Interests = Mapping[str, Sequence[int]]


class Waiter:
    """One sleeper at a time; `link` carries its registrations, its own connection the blocking pop."""

    def __init__(self, client: redis.Redis, link: Link, worker: str, name: str) -> None:
        self._link = link
        self._worker = worker
        self._name = name
        self._lock = threading.Lock()
        self._wire = Wire(client)

    @property
    def name(self) -> str:
        """What the functions register."""
        return self._name

    def wait(self, interests: _Interests, *, timeout_s: float, wake_fd: int | None = None) -> bool:
        """True when an interest may be met; False when the time is over or `wake_fd` is readable.

        Leases and flushes make rows ready by time alone, so the sleep ends when the server says that time may help
        and the registration is made again, which takes expired leases back.
        """
        with self._lock:
            start = time.monotonic()
            while True:
                now = time.monotonic()
                left_s = max(0.0, start + timeout_s - now)
                met, due_s = self._register(interests, left_s, now - start)
                if met:
                    self._unregister(interests)
                    return True
                sleep_s = min(left_s, _LOOK_S if due_s is None else min(due_s + 0.002, _LOOK_S))
                woken = self._sleep(interests, sleep_s, wake_fd)
                if woken is not None:
                    return woken
                if time.monotonic() - start >= timeout_s:
                    return not self._unregister(interests)

    def until(
        self,
        target: str,
        verb: str,
        head: Sequence[Argument],
        tail: Sequence[Argument],
        timeout_s: float,
        then: Refusable | None = None,
    ) -> list[Any]:
        """Repeat a function that registers this waiter when it answers "none", until it answers something else.

        Args:
            head: the function's arguments before those of the wait: waiter, milliseconds left and waited.
            tail: its arguments after them.
            then: a packed command to run after it.

        Returns:
            The function's answer, and behind it that of `then`: "none", ready rows, waiting rows and when time may
            help, when the time is over (this waiter is not registered then).
        """
        with self._lock:
            start = time.monotonic()
            first = (*head, self._name, int(timeout_s * 1000) + 1000, 0, *tail)
            reply = self._link.call(verb, target, *first, then=then)
            while reply[0] == "none":
                waited_s = time.monotonic() - start
                left_s = timeout_s - waited_s
                if left_s <= 0:
                    self._unregister({target: ()})
                    return reply
                due_ms = int(reply[3])
                sleep_s = min(left_s, _LOOK_S if due_ms < 0 else min(due_ms / 1000 + 0.002, _LOOK_S))
                waits = (self._name, int(left_s * 1000) + 1000, max(1, int(waited_s * 1000)))
                reply = self._pop_and_call(target, sleep_s, verb, (*head, *waits, *tail), then)
            return reply

    def _pop_and_call(
        self, target: str, sleep_s: float, verb: str, args: Sequence[Argument], then: Refusable | None
    ) -> list[Any]:
        """Sleep for a token, then run the function and what comes after it, in one round trip."""
        wire = self._wire
        try:
            if not sleep_s + _GRACE_S <= wire.timeout_s <= sleep_s + _MOST_GRACE_S:  # setting it costs system calls
                wire.timeout_s = sleep_s + _GRACE_S
            pop = ("BLPOP", _wake_key(target, self._name), f"{max(sleep_s, 0.001):.3f}")
            commands = (pop, function_call(verb, target, *args), *(() if then is None else (then,)))
            wire.send(commands)
            token, reply, *more = [wire.receive() for _ in commands]
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            wire.disconnect()
            return self._link.call(verb, target, *args, then=then)
        if isinstance(token, Exception) or isinstance(reply, Exception) or reply[0] == b"unknown":
            return self._link.call(verb, target, *args, then=then)  # it knows what to do about it
        return checked(target, reply, *more)

    def _register(self, interests: _Interests, left_s: float, waited_s: float) -> tuple[bool, float | None]:
        head = (self._name, int(left_s * 1000) + 1000, self._worker, int(waited_s * 1000))
        replies = self._link.calls([("wait", prefix, *head, *wanted) for prefix, wanted in interests.items()])
        dues = [int(reply[1]) / 1000 for reply in replies if int(reply[1]) >= 0]
        return any(reply[0] != "wait" for reply in replies), min(dues, default=None)

    def _unregister(self, interests: _Interests) -> bool:
        """Take the registrations away; False when one was fulfilled meanwhile."""
        replies = self._link.calls([("unwait", prefix, self._name, 0) for prefix in interests])
        return all(int(reply[1]) == 1 for reply in replies)

    def _sleep(self, interests: _Interests, sleep_s: float, wake_fd: int | None) -> bool | None:
        """True: a token came; False: `wake_fd`; None: the time is over, or the connection broke."""
        if not interests:
            readable = select.select([wake_fd] if wake_fd is not None else [], [], [], sleep_s)[0]
            return False if readable else None
        if sleep_s <= 0:
            return False if wake_fd is not None and select.select([wake_fd], [], [], 0)[0] else None
        keys = [_wake_key(target, self._name) for target in interests]
        try:
            self._wire.send([("BLPOP", *keys, f"{max(sleep_s, 0.001):.3f}")])
            readable = self._readable(wake_fd, sleep_s + _GRACE_S)
            if wake_fd is not None and wake_fd in readable:
                return self._cancel(interests)
            if not readable:
                raise redis.TimeoutError("a blocked pop did not end")
            token = self._wire.receive()
            if isinstance(token, Exception):
                raise token
        except (redis.RedisError, OSError):
            self._wire.disconnect()
            time.sleep(min(_PAUSE_S, sleep_s))
            return None
        except BaseException:
            self._wire.disconnect()  # an interrupted pop must not answer the next one
            raise
        if token is None:
            return None
        self._unregister(interests)
        return True

    def _readable(self, wake_fd: int | None, timeout_s: float) -> list[int]:
        own = self._wire.fileno()
        if self._wire.pending():
            return [own]
        poller = select.poll()
        poller.register(own, select.POLLIN)
        if wake_fd is not None:
            poller.register(wake_fd, select.POLLIN)
        return [fd for fd, _ in poller.poll(timeout_s * 1000)]

    def _cancel(self, interests: _Interests) -> bool:
        """End the blocked pop by a token of our own; True when a real one had come before."""
        prefixes = list(interests)
        own = [("unwait", prefix, self._name, 1 if k == 0 else 0) for k, prefix in enumerate(prefixes)]
        replies = self._link.calls(own)
        self._wire.receive()
        return any(int(reply[1]) == 0 for reply in replies)

    def close(self) -> None:
        """Close the connection."""
        self._wire.disconnect()


def _wake_key(target: str, waiter: str) -> str:
    return wake_key(target.split(" ", 1)[0], waiter)
