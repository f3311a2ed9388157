"""What the plan hears and what it orders: the words of `control_log.jsonl`.

Every event has the time `at` (Unix seconds, of the controller's one clock). Neither events nor commands carry
results of calls or long arguments: those are in the records, under the call's id.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rlmq.common.calls import Desired, Phase
from rlmq.common.control import Order

Settings = dict[str, list[tuple[int, str]]]
"""Values that operators changed: recipe key to [(first step, value), …], by step."""


def _tag(name: str) -> str:
    return name.lower()


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=_tag):
    at: float


class Began(_Event, frozen=True):
    """A controller began this epoch, with what the records say: the open step, desired states, operators' wishes.

    `workers` are the recipe's workers by role, `quorum` how many of a role must be there, `fixed` the roles that
    are so beside `rlmq.common.control.FIXED`; a member that is silent for longer than `silence_s` is lost.
    """

    epoch: int
    step: int
    workers: dict[str, int]
    quorum: dict[str, int]
    silence_s: float
    fixed: tuple[str, ...] = ()
    desired: tuple[Desired, ...] = ()
    phase: Phase = "run"
    orders: int = 0
    settings: Settings = {}


class Heard(_Event, frozen=True):
    """A heartbeat that tells something new of a worker."""

    role: str
    rank: int
    incarnation: int
    activity: str = "idle"
    ready: bool = False
    serving: int = -1
    call: str = ""


class Silent(_Event, frozen=True):
    """Nothing was heard of a worker since `since`."""

    role: str
    rank: int
    incarnation: int
    since: float


class Left(_Event, frozen=True):
    """A worker said goodbye; `fatal` when a fresh process would meet the same error."""

    role: str
    rank: int
    incarnation: int
    exit_code: int
    error: str = ""
    fatal: bool = False


class Asked(_Event, frozen=True):
    """The loop wants a call. Without `ranks` it goes to everyone of the role.

    `args` are those arguments that are plain and short, for people to read.
    """

    call_id: str
    role: str
    method: str
    deadline_s: float
    ranks: tuple[int, ...] | None = None
    args: dict[str, Any] = {}


class Told(_Event, frozen=True):
    """A worker says that it stored its result."""

    call_id: str
    rank: int


class Looked(_Event, frozen=True):
    """What the records say of a call: its ranks, and which of them have a result. Not `known`: no such call."""

    call_id: str
    known: bool
    ranks: tuple[int, ...] = ()
    answered: tuple[int, ...] = ()


class Wanted(_Event, frozen=True):
    """The loop wants a role to follow this policy version."""

    role: str
    policy_version: int


class Served(_Event, frozen=True):
    """Rollout workers have taken the weights of a version."""

    role: str
    ranks: tuple[int, ...]
    version: int


class Opened(_Event, frozen=True):
    """The loop opened a step."""

    step: int


class Waits(_Event, frozen=True):
    """The loop waits since `since` for something else than a call, on stages or workers; without `what` no more.

    It ends at `until`, or after `deadline_s` without progress.
    """

    what: str = ""
    since: float = 0.0
    on: tuple[str, ...] = ()
    deadline_s: float | None = None
    until: float | None = None


class Ordered(_Event, frozen=True):
    """The records hold an operator's order of this number."""

    number: int
    order: Order


class Ended(_Event, frozen=True):
    """The run ends: every worker is told to stop."""

    exit_code: int


class Tick(_Event, frozen=True):
    """Time goes by; some worker made progress at `moved_at`."""

    moved_at: float


Event = (
    Began
    | Heard
    | Silent
    | Left
    | Asked
    | Told
    | Looked
    | Wanted
    | Served
    | Opened
    | Waits
    | Ordered
    | Ended
    | Tick
)


class _Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=_tag):
    pass


class Submit(_Command, frozen=True):
    """Queue the call for these ranks and ring; the answer is `Looked`. A known call keeps its ranks."""

    call_id: str
    role: str
    method: str
    ranks: tuple[int, ...]


class Look(_Command, frozen=True):
    """Read the call's record; the answer is `Looked`."""

    call_id: str


class Release(_Command, frozen=True):
    """Store the result "released" for a rank whose worker is not there."""

    call_id: str
    rank: int
    why: str


class Resolve(_Command, frozen=True):
    """Every rank has a result: the loop gets them."""

    call_id: str
    ranks: tuple[int, ...]


class Want(_Command, frozen=True):
    """Store a role's desired state and ring."""

    desired: Desired


class Keep(_Command, frozen=True):
    """Store what operators wanted up to order number `orders`, for a controller that comes after this one."""

    phase: Phase
    orders: int
    settings: Settings


class Lost(_Command, frozen=True):
    """Tell that a worker is lost."""

    role: str
    rank: int
    incarnation: int
    silent_s: float


class Refuse(_Command, frozen=True):
    """An order was not obeyed, and why."""

    number: int
    why: str


class Fail(_Command, frozen=True):
    """End the loop with this error."""

    error: str
    exit_code: int


Command = Submit | Look | Release | Resolve | Want | Keep | Lost | Refuse | Fail


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `control_log.jsonl`: an event that changed something, and what the plan ordered."""

    at: float
    epoch: int
    event: Event
    commands: tuple[Command, ...] = ()
