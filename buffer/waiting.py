"""Sleeping until rows are ready: a registration in the server, and a token list on a connection of its own."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping, Sequence

import redis

from rlmq.buffer.connection import Link, new_connection
from rlmq.buffer.keys import wake_key

_GRACE_S = 1.0  # a blocked pop ends by itself; this long after its time-out the connection is given up
_Interests = Mapping[str, Sequence[int]]  # table prefix to (stage index or 0 for room, rows, settled)...


class Waiter:
    """One sleeper at a time; `link` carries its registrations, its own connection the blocking pop."""

    def __init__(self, client: redis.Redis, link: Link, worker: str, name: str) -> None:
        self._link = link
        self._worker = worker
        self._name = name
        self._lock = threading.Lock()
        self._connection = new_connection(client)

    def wait(self, interests: _Interests, *, timeout_s: float, wake_fd: int | None = None) -> bool:
        """True when an interest may be met; False when the time is over or `wake_fd` is readable.

        An expired lease makes rows ready without anybody's doing, so the sleep ends with the next deadline and
        the registration is made again, which takes expired leases back.
        """
        with self._lock:
            start = time.monotonic()
            while True:
                now = time.monotonic()
                left_s = max(0.0, start + timeout_s - now)
                met, expiry_s = self._register(interests, left_s, now - start)
                if met:
                    self._unregister(interests)
                    return True
                sleep_s = left_s if expiry_s is None else min(left_s, expiry_s + 0.002)
                woken = self._sleep(interests, sleep_s, wake_fd)
                if woken is not None:
                    return woken
                if time.monotonic() - start >= timeout_s:
                    return not self._unregister(interests)

    def _register(self, interests: _Interests, left_s: float, waited_s: float) -> tuple[bool, float | None]:
        head = (self._name, int(left_s * 1000) + 1000, self._worker, int(waited_s * 1000))
        replies = self._link.calls([("wait", prefix, *head, *wanted) for prefix, wanted in interests.items()])
        expiries = [int(reply[1]) / 1000 for reply in replies if int(reply[1]) >= 0]
        return any(reply[0] != "wait" for reply in replies), min(expiries, default=None)

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
        keys = [wake_key(prefix, self._name) for prefix in interests]
        try:
            self._connection.send_command("BLPOP", *keys, f"{max(sleep_s, 0.001):.3f}", check_health=False)
            readable = self._readable(wake_fd, sleep_s + _GRACE_S)
            if wake_fd is not None and wake_fd in readable:
                return self._cancel(interests)
            if not readable:
                raise redis.TimeoutError("a blocked pop did not end")
            token = self._connection.read_response()
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            self._connection.disconnect()
            time.sleep(min(0.05, sleep_s))
            return None
        except BaseException:
            self._connection.disconnect()  # an interrupted pop must not answer the next one
            raise
        if token is None:
            return None
        self._unregister(interests)
        return True

    def _readable(self, wake_fd: int | None, timeout_s: float) -> list[int]:
        poller = select.poll()
        own = self._connection._get_socket().fileno()
        poller.register(own, select.POLLIN)
        if wake_fd is not None:
            poller.register(wake_fd, select.POLLIN)
        return [fd for fd, _ in poller.poll(timeout_s * 1000)]

    def _cancel(self, interests: _Interests) -> bool:
        """End the blocked pop by a token of our own; True when a real one had come before."""
        prefixes = list(interests)
        own = [("unwait", prefix, self._name, 1 if k == 0 else 0) for k, prefix in enumerate(prefixes)]
        replies = self._link.calls(own)
        self._connection.read_response()
        return any(int(reply[1]) == 0 for reply in replies)

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()
