"""Calls, desired states and incarnations as records in Redis; see `common/calls.py` for the semantics."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, TypeVar

import msgspec
import redis

from rlmq.buffer.connection import RETRY_S, Link, as_client
from rlmq.buffer.keys import checked_name, run_prefix
from rlmq.common.calls import Call, CallRecord, CallResult, Calls, Desired
from rlmq.common.control import Order
from rlmq.common.errors import (
    ControlLoopDiverged,
    DecodeError,
    Fenced,
    SchemaMismatch,
    SecondController,
)
from rlmq.common.processes import is_gone, process_mark

_T = TypeVar("_T")


class RedisCalls(Calls):
    """The control records of one run. Safe to use from several threads.

    Args:
        client_or_url: a `redis.Redis` that returns bytes, or a URL.
        run_id: part of every key.
        retry_s: how long a lost server is waited for.
    """

    def __init__(self, client_or_url: redis.Redis | str, *, run_id: str, retry_s: float = RETRY_S) -> None:
        self._run_id = run_id
        self._prefix = run_prefix(run_id)
        self._owns_client = isinstance(client_or_url, str)
        self._client = as_client(client_or_url, retry_s)
        self._link = Link(self._client, retry_s=retry_s)

    def submit(self, call: Call) -> CallRecord:
        """Queue the call for its ranks; see `Calls.submit`."""
        head = (call.id, _digest(call), checked_name("role", call.role), call.epoch)
        reply = self._link.call("submit", self._prefix, *head, msgspec.msgpack.encode(call), *call.ranks)
        if reply[0] == "diverged":
            raise ControlLoopDiverged(
                f"call '{call.id}'",
                got=f"{call.role}.{call.method} on ranks {list(call.ranks)} with other content than before",
                expected="the same role, method, ranks and arguments under a known id",
                remedy="The control loop must be deterministic between calls",
            )
        self._check_epoch(reply, call.epoch)
        return _record(reply)

    def next(self, role: str, rank: int) -> Call | None:
        """The oldest call of this rank without a result; see `Calls.next`."""
        reply = self._link.call("next", self._prefix, role, rank)
        return None if reply[0] == "none" else _decoded(reply[1], Call)

    def complete(self, result: CallResult, *, incarnation: int) -> bool:
        """Store a rank's result, once; see `Calls.complete`.

        Raises:
            Fenced: a newer incarnation has joined.
        """
        args = (result.call_id, result.rank, incarnation, msgspec.msgpack.encode(result))
        reply = self._link.call("complete", self._prefix, *args)
        if reply[0] == "fenced":
            raise Fenced(
                f"result of call '{result.call_id}' from rank {result.rank}",
                got=f"incarnation {incarnation}",
                expected=f"the newest, {reply[1]}",
                remedy="A newer process has taken over this rank: stop this one",
            )
        return reply[0] == "ok" and bool(reply[1] == 1)

    def release(self, result: CallResult, *, epoch: int) -> None:
        """Store a result for a worker that is not there; see `Calls.release`."""
        args = (result.call_id, result.rank, epoch, msgspec.msgpack.encode(result))
        self._check_epoch(self._link.call("release", self._prefix, *args), epoch)

    def look(self, call_id: str) -> CallRecord | None:
        """The call and its results so far; see `Calls.look`."""
        reply = self._link.call("look", self._prefix, call_id)
        return None if reply[0] == "none" else _record(reply)

    def results(self, call_id: str) -> list[CallResult]:
        """Results stored so far, by rank; see `Calls.results`."""
        record = self.look(call_id)
        return [] if record is None else list(record.results)

    def want(self, desired: Desired) -> None:
        """Store a role's desired state; see `Calls.want`.

        Raises:
            Fenced: the epoch is old, or a greater version is stored.
        """
        args = (checked_name("role", desired.role), desired.version, desired.epoch, msgspec.msgpack.encode(desired))
        reply = self._link.call("want", self._prefix, *args)
        self._check_epoch(reply, desired.epoch)
        if reply[0] == "older":
            subject = f"desired state of role '{desired.role}'"
            raise Fenced(subject, got=f"version {desired.version}", expected=f"at least {reply[1]}")

    def wanted(self, role: str) -> Desired | None:
        """The role's desired state; see `Calls.wanted`."""
        reply = self._link.call("wanted", self._prefix, role)
        return None if reply[0] == "none" else _decoded(reply[1], Desired)

    def note(self, name: str, value: dict[str, Any], *, epoch: int | None = None) -> None:
        """Leave a small record for other processes; see `Calls.note`."""
        fence = () if epoch is None else (epoch,)
        reply = self._link.call("note", self._prefix, name, msgspec.msgpack.encode(value), *fence)
        self._check_epoch(reply, epoch)

    def noted(self, name: str) -> dict[str, Any] | None:
        """The record left under this name; see `Calls.noted`."""
        reply = self._link.call("noted", self._prefix, name)
        return None if reply[0] == "none" else _decoded(reply[1], dict[str, Any])

    def order(self, order: Order) -> int:
        """Append an operator's order; see `Calls.order`."""
        return int(self._link.call("order", self._prefix, msgspec.msgpack.encode(order))[1])

    def orders(self, after: int) -> list[Order]:
        """Orders after this number; see `Calls.orders`."""
        return [_decoded(one, Order) for one in self._link.call("orders", self._prefix, after)[1:]]

    def join(self, role: str, rank: int, *, fingerprint: str) -> int:
        """Register a worker process; see `Calls.join`."""
        who = checked_name("role", role)
        reply = self._link.call("join", self._prefix, who, rank, fingerprint, secrets.token_hex(8))
        self._check_fingerprint(reply, fingerprint, f"worker {role}-{rank}")
        return int(reply[1])

    def begin_epoch(self, *, fingerprint: str, lease_s: float) -> int:
        """Become the controller; see `Calls.begin_epoch`."""
        args = (fingerprint, max(1, int(lease_s * 1000)), f"{process_mark()} {secrets.token_hex(8)}")
        reply = self._link.call("begin_epoch", self._prefix, *args, "")
        if reply[0] == "second" and is_gone((owner := (reply[2] or b"").decode()).rpartition(" ")[0]):
            reply = self._link.call("begin_epoch", self._prefix, *args, owner)
        if reply[0] == "second":
            raise SecondController(
                f"run '{self._run_id}'",
                got=f"a live controller (its lease ends in {reply[1] / 1000:.1f} s unless it renews)",
                expected="none",
                remedy="Leave it alone, or stop it first",
            )
        self._check_fingerprint(reply, fingerprint, "controller")
        return int(reply[1])

    def renew_epoch(self, epoch: int, lease_s: float) -> None:
        """Keep the controller's lease; see `Calls.renew_epoch`."""
        reply = self._link.call("renew_epoch", self._prefix, epoch, max(1, int(lease_s * 1000)))
        self._check_epoch(reply, epoch)

    def end_epoch(self, epoch: int) -> None:
        """Give the controller's lease back; nothing when another controller has it."""
        self._link.call("renew_epoch", self._prefix, epoch, 0)

    def controller(self) -> tuple[int, bool]:
        """The newest epoch and whether its lease is live; see `Calls.controller`."""
        reply = self._link.call("controller", self._prefix)
        return int(reply[1]), int(reply[2]) > 0

    def close(self) -> None:
        """Close the connection (not that of a client that was given)."""
        self._link.close()
        if self._owns_client:
            self._client.close()

    def _check_epoch(self, reply: list[Any], epoch: int | None) -> None:
        if reply[0] == "fenced":
            raise Fenced(
                f"controller of run '{self._run_id}'",
                got=f"epoch {epoch}",
                expected=f"the newest, {reply[1]}",
                remedy="Another controller has taken over: stop this one",
            )

    def _check_fingerprint(self, reply: list[Any], fingerprint: str, who: str) -> None:
        if reply[0] == "schema":
            raise SchemaMismatch(
                f"{who} of run '{self._run_id}'",
                got=f"fingerprint {fingerprint}",
                expected=f"the run's {reply[1].decode()}",
                remedy="Start every process from the same recipe, version, and files that the recipe names (code)",
            )


def _digest(call: Call) -> str:
    """Changes with what the call asks for; not with the epoch, nor with who was there to be everyone."""
    ranks = None if call.everyone else list(call.ranks)
    content = [call.role, call.method, ranks, call.args]
    return hashlib.sha256(msgspec.msgpack.encode(content, order="deterministic")).hexdigest()


def _record(reply: list[Any]) -> CallRecord:
    results = [_decoded(one, CallResult) for one in reply[2:] if one is not None]
    by_rank = tuple(sorted(results, key=lambda result: result.rank))
    return CallRecord(call=_decoded(reply[1], Call), results=by_rank)


def _decoded(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise DecodeError(
            f"control record of type {getattr(kind, '__name__', kind)}", got=str(error), expected="its msgpack"
        ) from error
