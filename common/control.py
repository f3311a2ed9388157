"""What a run's control plane leaves for people and programs to read: the snapshot, orders, and what they mean.

The controller rewrites `control.json` (a `Snapshot`) at least twice a second, and appends what it heard and did to
`control_log.jsonl` (see `rlmq.controller.plan`). The supervisor appends what it did to `supervisor.jsonl`. So
`rlmq status`, `why` and `log` can tell a live run and one that ended alike.
"""

from __future__ import annotations

from typing import Literal

import msgspec

OBEYED = "control"
"""Name of the controller's note of what operators ordered: phase, settings, and up to which order."""

Verb = Literal["pause", "resume", "drain", "stop", "set"]

TRAINERS = ("critic", "reward_model", "actor")
"""Roles whose weights are trained, beside the items of `critics`. All but the actor learn from the steps that it
logs."""

FIXED = frozenset({"prompts", "recorder", *TRAINERS})
"""Roles whose workers are all needed, as those of the items of `critics`. Those of every other role, the user's
nodes included, may come and go while the run goes on, as long as one is there; also beyond their `workers`."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process as the controller knows it. Seconds are as of the snapshot's `at_unix_s`.

    `silent_s` since its last heartbeat; `still_s` since it last made progress; `call` is the id of the call that it
    works on; `wait` says what it sleeps for, `wait_s` how long; `lost` when it was silent for longer than
    `deadlines.silence_s`.
    """

    role: str
    rank: int
    incarnation: int
    pid: int
    host: str
    activity: str
    ready: bool
    serving: int
    silent_s: float
    still_s: float
    call: str = ""
    wait: str = ""
    wait_s: float = 0.0
    lost: bool = False

    @property
    def name(self) -> str:
        """`role-rank`."""
        return f"{self.role}-{self.rank}"


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody waits: an edge of the wait graph.

    `who` waits for `what` ("call 12/3/actor.train", "64 rows of stage actor in table train", "workers"), which
    `on` owns
    (names of processes or stages); without progress it ends at `until_unix_s` (None: never).
    """

    who: str
    what: str
    on: tuple[str, ...]
    since_unix_s: float
    until_unix_s: float | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The control plane at one moment. `phase` is what is wanted of the run; `ended` its exit code, once it
    has one."""

    at_unix_s: float
    run_id: str
    epoch: int
    pid: int
    host: str
    phase: str
    step: int
    steps: int
    policy_version: int
    members: tuple[Member, ...]
    missing: tuple[str, ...]
    waits: tuple[Wait, ...]
    ended: int | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asked for. Orders are records of the run, in order; a controller that restarts reads
    them again.

    `set` has `settings`, recipe key to value; they apply from the step after the open one.
    """

    verb: Verb
    at_unix_s: float
    by: str = ""
    settings: dict[str, str] = {}


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `supervisor.jsonl`: a process was started, ended or was ended.

    `exit_code` is as `subprocess` gives it (negative: the signal); `call` the call that it worked on,
    `last_lines` the
    end of its log.
    """

    at_unix_s: float
    name: str
    what: Literal["started", "ended", "killed"]
    pid: int
    exit_code: int | None = None
    why: str = ""
    call: str = ""
    last_lines: tuple[str, ...] = ()
