"""What ZeroMQ tells of connections that come about, and of those that do not (socket monitors).

ZeroMQ itself drops a refused peer without a word, on both sides.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from rlmq.common.curve import CONTROLLER, Keys
from rlmq.common.errors import DependencyError
from rlmq.common.metrics import CONTROL_DISCONNECTED, CONTROL_REFUSED

_LOG_EVERY_S = 10.0
_UNANSWERED_S = 30.0
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


class Refusals:
    """Counts what was refused, and logs it: for each reason the first time, then at most once in ten seconds."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._logged_at: dict[str, float] = {}

    def add(self, reason: str, **peer: str) -> None:
        """One more. `reason` is a label of the metric, `peer` says what is known of the peer."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        CONTROL_REFUSED.labels(reason=reason).inc()
        now = time.monotonic()
        if now - self._logged_at.get(reason, float("-inf")) >= _LOG_EVERY_S:
            self._logged_at[reason] = now
            log = structlog.get_logger()
            log.warning("refused", reason=reason, **{k: v for k, v in peer.items() if v}, so_far=dict(self.counts))


class Arrivals:
    """The controller's side: peers that failed to shake hands are counted, and named as long as they are there.

    The events of a failure and of the end of its connection follow each other. A peer that sent no handshake at all
    is told by its connection's end without any handshake since it came.
    """

    def __init__(self, watched: zmq.Socket[bytes], refusals: Refusals) -> None:
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(_CONNECTED | zmq.EVENT_ACCEPTED)
        self._refusals = refusals
        self._succeeded = 0
        self._came: dict[int, tuple[str, int]] = {}
        self._failure: tuple[int, int] | None = None

    def take(self) -> None:
        """Take in one event. Raises zmq.Again."""
        event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
        kind, value = int(event["event"]), int(event["value"])
        if kind == zmq.EVENT_ACCEPTED:
            self._came[value] = (_peer_of(value), self._succeeded)
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._succeeded += 1
        elif kind == zmq.EVENT_DISCONNECTED:
            self._ended(*self._came.pop(value, ("", -1)))
        else:
            self._failure = (kind, value)

    def _ended(self, peer: str, succeeded_then: int) -> None:
        CONTROL_DISCONNECTED.inc()
        failure, self._failure = self._failure, None
        if failure is None:
            if succeeded_then == self._succeeded:
                self._refusals.add("handshake", address=peer)
        elif failure[0] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refusals.add("plain" if failure[1] == _MISMATCH else "handshake", address=peer)
        elif failure[0] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # it hung up first, as plain peers may
            self._refusals.add("unfinished", address=peer)


class Attempts:
    """A worker's side: a handshake that fails for good becomes one error that names the key."""

    def __init__(self, watched: zmq.Socket[bytes], endpoint: str, keys: Keys | None, name: str) -> None:
        self.socket: zmq.Socket[bytes] = watched.get_monitor_socket(_CONNECTED)
        self.failure: DependencyError | None = None
        self.patience_s = _UNANSWERED_S
        self._endpoint = endpoint
        self._keys = keys
        self._name = name
        self._since = 0.0

    def take(self) -> None:
        """Take in one event. Raises zmq.Again."""
        event = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
        match int(event["event"]):
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._since = 0.0
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.failure = self._refused()
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.failure = self._other_tongue()
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if self._keys is not None:
                self._since = self._since or time.monotonic()
                if time.monotonic() - self._since >= self.patience_s:
                    self.failure = self._unanswered(self._keys)

    def _refused(self) -> DependencyError:
        key = self._keys.file(self._name) if self._keys is not None else "none"
        return DependencyError(
            f"key {key}",
            got=f"refused by the controller at {self._endpoint}",
            expected=f"a key whose public half is {self._name}.pub in the controller's key folder",
            remedy=f"Copy {self._name}.key and {self._name}.pub of one `rlmq keys` to both places",
        )

    def _other_tongue(self) -> DependencyError:
        if self._keys is None:
            got, remedy = "a controller that asks for a key", "Set control.keys to the folder of `rlmq keys`"
        else:
            got, remedy = "no controller with keys", f"{self._keys.file(self._name)} is of no use there"
        return DependencyError(
            f"controller at {self._endpoint}", got=got, expected="control.keys alike on both sides", remedy=remedy
        )

    def _unanswered(self, keys: Keys) -> DependencyError:
        return DependencyError(
            f"key {keys.public_file(CONTROLLER)}",
            got=f"no answer to it from {self._endpoint} for {self.patience_s:g} s",
            expected="the public key of the controller that listens there",
            remedy=f"Copy {CONTROLLER}.pub from the controller's key folder",
        )


def _peer_of(descriptor: int) -> str:
    """Address of the peer of a connection, where it is still there."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            name: Any = connection.getpeername()
    except OSError:
        return ""
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) >= 2 else ""
