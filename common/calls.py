"""Calls and desired states: what the controller wants, as records with one truth.

A *call* is an edge ("train on step 12"): deterministic id, claimed, completed and fenced. A *desired
state* is a level (phase, target policy version): one versioned record per role. Doorbells only make
them quicker to notice.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from rlmq.common.control import Order

Phase = Literal["run", "pause", "drain", "stop"]
Activity = Literal["generating", "scoring", "training", "syncing", "checkpointing", "evaluating", "idle"]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of commanded work.

    `id` is `"step/ordinal/role.method"`: the same loop makes the same ids. `ranks` are the workers of the
    role that take part, each of which completes its own sub-call; with `everyone` they are those that were there
    when it was first submitted, and a known call keeps them. `args` holds plain data only.
    """

    id: str
    role: str
    method: str
    ranks: tuple[int, ...]
    args: dict[str, Any] = {}
    epoch: int = 0
    everyone: bool = False


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """The plain value with which one rank's sub-call ended. A call that failed has none: its process ends.

    `released` says why the controller ended it for a worker that was not there.
    """

    call_id: str
    rank: int
    value: dict[str, Any] = {}
    released: str = ""


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it was first submitted, and its results so far, by rank."""

    call: Call
    results: tuple[CallResult, ...]


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """What a role should be doing. A worker ignores a lower `version` than it has seen.

    `settings` are values that an operator changed, for rows of a step and later: recipe key to [(step, value),
    …], by step.
    """

    role: str
    version: int
    phase: Phase
    policy_version: int = 0
    epoch: int = 0
    settings: dict[str, list[tuple[int, str]]] = {}


class Calls(Protocol):
    """Records of calls and desired states; every write is fenced and idempotent."""

    def submit(self, call: Call) -> CallRecord:
        """Queue the call for its ranks; a known id with the same content is not queued again. Returns its record.

        Raises:
            ControlLoopDiverged: the id is known with another role, method or arguments.
            Fenced: the epoch is not the newest.
        """

    def next(self, role: str, rank: int) -> Call | None:
        """The oldest call of this rank without a result, or None. Repeats after a restart."""

    def complete(self, result: CallResult, *, incarnation: int) -> bool:
        """Store a rank's result, once. False when it was already there, or when the records do not know the call:

        they came back older, and whoever asked asks again.

        Raises:
            Fenced: a newer incarnation of this rank has joined.
        """

    def release(self, result: CallResult, *, epoch: int) -> None:
        """Store a result for a rank whose worker is not there, unless it has one. Raises Fenced."""

    def look(self, call_id: str) -> CallRecord | None:
        """The call and its results so far, or None when it is not known."""

    def results(self, call_id: str) -> list[CallResult]:
        """Results stored so far, by rank; the call is done when all its ranks have one."""

    def want(self, desired: Desired) -> None:
        """Store a role's desired state; refused as `Fenced` when the epoch is old."""

    def wanted(self, role: str) -> Desired | None:
        """The role's desired state."""

    def note(self, name: str, value: dict[str, Any], *, epoch: int | None = None) -> None:
        """Leave a small record that other processes of the run may read: an address, the open step.

        Raises:
            Fenced: the epoch, where one is given, is not the newest.
        """

    def noted(self, name: str) -> dict[str, Any] | None:
        """The record left under this name, or None."""

    def order(self, order: Order) -> int:
        """Append an operator's order; returns its number, from 1 on."""

    def orders(self, after: int) -> list[Order]:
        """Orders with a number greater than `after`, in order."""

    def join(self, role: str, rank: int, *, fingerprint: str) -> int:
        """Register a worker process; returns its incarnation, greater than any before it.

        Raises:
            SchemaMismatch: the run has another schema fingerprint; both are named.
        """

    def begin_epoch(self, *, fingerprint: str, lease_s: float) -> int:
        """Become the controller: the next epoch. The lease of a process of this machine that has ended is void.

        Raises:
            SecondController: another controller's lease is still live.
        """

    def renew_epoch(self, epoch: int, lease_s: float) -> None:
        """Keep the controller's lease. Raises Fenced when another controller took over."""

    def end_epoch(self, epoch: int) -> None:
        """Give the controller's lease back."""

    def controller(self) -> tuple[int, bool]:
        """The newest epoch, and whether its controller's lease is live."""
