"""Messages between the controller and the workers: msgspec structs, msgpack on the wire.

Down (XPUB, topic = role): a doorbell that carries the command itself. Up (DEALER to ROUTER): reports.
All of them may be lost: the truth of calls and desired states is in the records (`common/calls.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from rlmq.common.calls import Call, CallResult, Desired
from rlmq.common.errors import DecodeError

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Greatest control message; ZeroMQ drops the peer that sends more."""


class CallBell(msgspec.Struct, frozen=True, tag="call"):
    """A call was queued."""

    call: Call


class DesiredBell(msgspec.Struct, frozen=True, tag="desired"):
    """A role's desired state changed."""

    desired: Desired


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The controller of this epoch lives: sent once a second, to every role (topic `EVERYONE`)."""

    epoch: int


EVERYONE = "*"
Doorbell = CallBell | DesiredBell | Beat


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """What a worker does: sent when that changes, and once a second.

    `serving` is the policy version that a rollout worker generates with (-1: none); `progress` only grows
    while work moves on; `activity_s` are the seconds spent in each activity since the process began;
    `ready` is false until the role is built; `desired` is the version of the desired state that it follows;
    `call` is the id of the call that it works on, `still_s` the seconds since it last made progress, `wait` what
    it sleeps for and `wait_s` for how long; `pid` on `host` is the process.
    """

    role: str
    rank: int
    incarnation: int
    activity: str
    ready: bool
    serving: int
    progress: int
    activity_s: dict[str, float]
    desired: int = 0
    pid: int = 0
    host: str = ""
    call: str = ""
    still_s: float = 0.0
    wait: str = ""
    wait_s: float = 0.0


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A sub-call's result was stored."""

    result: CallResult


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """A worker ends; with an exit code other than 0, `error` is its one message."""

    role: str
    rank: int
    incarnation: int
    exit_code: int
    error: str = ""


class Ordered(msgspec.Struct, frozen=True, tag="ordered"):
    """An operator's order was stored: look at the records now."""


Report = Heartbeat | Done | Goodbye | Ordered

_encoder = msgspec.msgpack.Encoder()
_doorbell_decoder: msgspec.msgpack.Decoder[Doorbell] = msgspec.msgpack.Decoder(Doorbell)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Doorbell | Report) -> bytes:
    """Bytes of a message."""
    return _encoder.encode(message)


def decode_doorbell(data: bytes) -> Doorbell:
    """A doorbell, or DecodeError."""
    message: Doorbell = _decode(_doorbell_decoder, data)
    return message


def decode_report(data: bytes) -> Report:
    """A report, or DecodeError."""
    message: Report = _decode(_report_decoder, data)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError("control message", got=f"{len(data)} bytes", expected=str(error)) from error
