"""What a reward runner and its child process say to each other: msgspec structs, length-prefixed, on one socket."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec

from rlmq.common.errors import DeadlineExceeded, DecodeError

_LENGTH = struct.Struct("!Q")
_GREATEST_BYTES = 1 << 32


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The child's first message: the function is there, or why it is not.

    `per_row` functions (verl's signature, not async) are called once per row, the others once per claim.
    """

    per_row: bool = False
    error: str = ""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Rows to score. `rows` is JSON, `[[prompt, response_text, fields], …]`: it holds any integer."""

    call: int
    rows: str


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """One value per row, None where there is none; `failure` explains a whole call, `notes` single rows.

    `raised`: it has no return value; `traceback` is then what the function raised, unless it lacked memory.
    `fields`: one mapping per row, of what was beside a score; [] where no row had anything.
    """

    call: int
    values: list[float | None]
    failure: str = ""
    notes: list[str] = []
    fields: list[dict[str, Any]] = []
    raised: bool = False
    traceback: str = ""


def encode_rows(rows: list[tuple[Any, str, dict[str, Any]]]) -> str:
    """Rows as JSON text; lone surrogates, integers of any size and NaN survive."""
    return json.dumps(rows)


def decode_rows(text: str) -> list[tuple[Any, str, dict[str, Any]]]:
    """The inverse of `encode_rows`."""
    return [(prompt, response, fields) for prompt, response, fields in json.loads(text)]


class Connection:
    """Whole messages over a stream socket, with a deadline for each."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct, *, timeout_s: float | None = None) -> None:
        """Send one message.

        Raises:
            DeadlineExceeded: the peer did not read it in time.
            OSError: the peer is gone.
        """
        body = msgspec.msgpack.encode(message)
        self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(_LENGTH.pack(len(body)) + body)
        except TimeoutError as error:
            raise DeadlineExceeded("reward function's process", expected="that it reads its rows") from error

    def receive(self, *, deadline: float | None = None, while_waiting: Callable[[], None] | None = None) -> bytes:
        """The next message's bytes; `b""` when the peer closed the connection.

        Args:
            deadline: a time of `time.monotonic()`; none: wait for ever.
            while_waiting: called about once a second.

        Raises:
            DeadlineExceeded: nothing whole came in time.
            DecodeError: the length is not one of ours.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        while True:
            message = self._whole_message()
            if message is not None:
                return message
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise DeadlineExceeded("reward function's process", expected="an answer")
            slice_s = 1.0 if left_s is None else min(1.0, left_s)
            if poller.poll(None if left_s is None and while_waiting is None else slice_s * 1000 + 1):
                data = self._read()
                if not data:
                    return b""
                self._buffer += data
            elif while_waiting is not None:
                while_waiting()

    def _read(self) -> bytes:
        try:
            return self._sock.recv(1 << 18)
        except ConnectionResetError:
            return b""

    def _whole_message(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _GREATEST_BYTES:
            raise DecodeError("reward function's process", got=f"a message of {length} bytes", expected="ours")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return message

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
