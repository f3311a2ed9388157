"""Bulk columns: tensors that the ranks hold which made them, and that move to the ranks which read them.

::

    makers    keep the tensors; a row's column says where they are (`TensorNote`)
    readers   rank 0 opens a meeting place, and says there which tensors which rank wants
    makers    say which of these they no longer have              any: nothing moves, the rows are made again
    all       compute one plan, form a group, carry it out        rank to rank, checksummed

Neither the controller nor Redis sees a tensor. Makers hold what they made until the step after it begins.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from rlmq.common.dtypes import spec_of
from rlmq.common.errors import DeadlineExceeded, IntegrityError, RlmqError, UsageError
from rlmq.common.layouts.exchange import Exchange
from rlmq.common.layouts.groups import HOST, join, open_store
from rlmq.common.layouts.layout import Box, Layout
from rlmq.common.layouts.meeting import Clock, connect, read
from rlmq.common.layouts.plan import Plan, plan
from rlmq.common.layouts.views import Shards, ShardViews, empty_shards
from rlmq.common.weights import Rendezvous, TensorSpec
from rlmq.common.worker import WorkerContext
from rlmq.common.worker_loop import raise_if_stopping

if TYPE_CHECKING:
    from rlmq.consumers.mesh import Mesh

_LOOK_S = 0.05
_ASK_S = 1.0
Interval = tuple[int, int]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds of a tensor: `start` to `stop` along the note's `dim`; `process` names its process."""

    rank: int
    process: str
    start: int
    stop: int


class TensorNote(msgspec.Struct, frozen=True):
    """What a bulk column says of a row: type, shape, place of its tensor. `dim` is -1 where one rank has all."""

    role: str
    dtype: str
    shape: tuple[int, ...]
    dim: int
    parts: tuple[Part, ...]

    def box(self, start: int, stop: int, dim: int) -> Box:
        """All of it, or a part along a dimension."""
        whole = Box.whole(self.shape)
        if dim < 0:
            return whole
        return Box(
            (*whole.start[:dim], start, *whole.start[dim + 1 :]), (*self.shape[:dim], stop, *self.shape[dim + 1 :])
        )


class Wanted(msgspec.Struct, frozen=True):
    """Tensors by name, and for each of the `ranks` readers that want it dimension, start and stop."""

    ranks: int
    tensors: Mapping[str, TensorNote]
    targets: Mapping[str, Mapping[int, tuple[int, int, int]]]

    @property
    def makers(self) -> list[tuple[str, int]]:
        """Role and rank of all that hold some of it, in the order in which they follow the readers in the group."""
        return sorted({(note.role, part.rank) for note in self.tensors.values() for part in note.parts})

    def plan(self) -> Plan:
        """Who sends what to whom, by rank of the group."""
        at = {maker: self.ranks + number for number, maker in enumerate(self.makers)}
        specs = {name: TensorSpec(name, note.shape, note.dtype) for name, note in self.tensors.items()}
        held = {
            name: {at[note.role, p.rank]: (note.box(p.start, p.stop, note.dim),) for p in note.parts}
            for name, note in self.tensors.items()
        }
        wants = {
            name: {rank: (self.tensors[name].box(start, stop, dim),) for rank, (dim, start, stop) in by.items()}
            for name, by in self.targets.items()
        }
        return plan(Layout(specs, held), Layout(specs, wants))


class HeldTensors:
    """What this rank made, and its end of the exchanges in which others get it."""

    def __init__(self, context: WorkerContext, mesh: Mesh) -> None:
        self._context = context
        self._mesh = mesh
        self._tensors: dict[str, torch.Tensor] = {}
        self._steps: dict[str, int] = {}
        self.process = secrets.token_hex(4)

    def keep(self, name: str, step: int, tensor: Any) -> TensorSpec:
        """Hold a tensor under this name.

        Raises:
            UsageError: it is none, or not of floating-point numbers.
        """
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise UsageError(
                f"tensor {name}", got=type(tensor).__name__, expected="a torch tensor of floating-point numbers"
            )
        self._tensors[name], self._steps[name] = tensor.detach().contiguous(), step
        return spec_of(name, tensor)

    def drop(self, before: int) -> None:
        """Let go of what belongs to steps before this one: their rows have ended."""
        for name in [name for name, step in self._steps.items() if step < before]:
            del self._tensors[name], self._steps[name]

    def give(self, number: Sequence[int], to: str) -> dict[str, Any]:
        """Take part in the exchange of this number that the readers of role `to` open.

        Returns:
            Bytes that this rank sent; `failed` where the exchange did.

        Raises:
            RestartRequired: another rank of this mesh started anew, and waits for the mesh.
        """
        limits, tried, failed = self._context.recipe.deadlines, set[int](), ""
        deadline = time.monotonic() + limits.step_s
        while time.monotonic() < deadline:
            self._look()
            note = self._context.calls.noted(meeting_note(to)) or {"number": [0, 0], "port": 0}
            if list(note["number"]) > list(number) or (list(note["number"]) == list(number) and not note["port"]):
                break
            if list(note["number"]) == list(number) and note["port"] not in tried:
                tried.add(note["port"])
                try:
                    return {"bytes": self._meet(int(note["port"]), to)}
                except (DeadlineExceeded, IntegrityError) as error:  # the readers may open another one
                    failed = str(error)
            time.sleep(_LOOK_S)
        return {"failed": failed} if failed else {"bytes": 0}

    def _look(self) -> None:
        raise_if_stopping(self._context)
        self._mesh.check()

    def _meet(self, port: int, to: str) -> int:
        limits, own = self._context.recipe.deadlines, (self._context.role, self._context.rank)
        clock = Clock(limits.step_s, f"tensors from {own[0]}-{own[1]} to {to}")
        store = connect(Rendezvous(HOST, port, to, (), limits.sync_s), clock)
        wanted = msgspec.json.decode(read(store, "wanted", clock, f"{to}, rank 0"), type=Wanted)
        missing = [
            name
            for name, note in wanted.tensors.items()
            if note.role == own[0]
            for part in note.parts
            if part.rank == own[1] and (part.process != self.process or name not in self._tensors)
        ]
        store.set(f"missing/{own[0]}/{own[1]}", msgspec.json.encode(missing).decode())
        while not store.check(["lost"]) and not clock.over:  # a rank that died may be what the readers wait for
            self._look()
            time.sleep(_LOOK_S)
        if own not in wanted.makers or _lost(store, clock, to) or missing:  # missing alone: it is over already
            return 0
        made = wanted.plan()
        rank = wanted.ranks + wanted.makers.index(own)
        mine = {n: [self._tensors[n]] for n, by in made.source.held.items() if rank in by}
        views = ShardViews(Shards(made.source, rank, mine), None)
        return _exchange(store, wanted, made, rank, views, limits.sync_s, self._context)


def meeting_note(role: str) -> str:
    """Name of the note in which readers of this role leave the address of their meeting place."""
    return f"{role}_tensors"


class TensorReader:
    """The end of one rank of a mesh that reads; all its ranks make the same calls."""

    def __init__(self, context: WorkerContext, mesh: Mesh) -> None:
        self._context = context
        self._mesh = mesh
        self._opened: tuple[dist.TCPStore, int] | None = None

    def fetch(
        self, number: Sequence[int], wanted: Wanted, gives: Mapping[str, str]
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """This rank's tensors by name, and the names of those that are gone; then none has moved.

        Args:
            gives: ids of the makers' calls, by role.

        Raises:
            DeadlineExceeded: a maker did not come, or stopped; names it.
            IntegrityError: bytes were damaged on the way.
        """
        mesh, role, limits = self._mesh, self._context.role, self._context.recipe.deadlines
        clock = Clock(limits.step_s, f"tensors to {role}-{mesh.rank}")
        if mesh.rank == 0:
            self._opened = open_store(limits.sync_s)  # the one before stayed for makers that came late to it
        port = int(mesh.broadcast(str(self._opened[1] if self._opened else 0).encode()))
        if self._opened is not None:
            store = self._opened[0]
            self._ask(store, wanted, number, port, clock, gives)
        else:
            store = connect(Rendezvous(HOST, port, role, (), limits.sync_s), clock)
        lost = _lost(store, clock, role)
        if lost:
            return {}, lost
        made = wanted.plan()
        room = empty_shards(made.target, mesh.rank)
        _exchange(store, wanted, made, mesh.rank, ShardViews(None, room), limits.sync_s, self._context)
        own = ((name, by[mesh.rank]) for name, by in made.target.held.items() if mesh.rank in by)
        return {name: room[name, boxes[0]] for name, boxes in own}, []

    def _ask(
        self,
        store: dist.Store,
        wanted: Wanted,
        number: Sequence[int],
        port: int,
        clock: Clock,
        gives: Mapping[str, str],
    ) -> None:
        """Say what is wanted, and then what of it is gone."""
        store.set("wanted", msgspec.json.encode(wanted).decode())
        self._context.calls.note(meeting_note(self._context.role), {"number": list(number), "port": port})
        gone: set[str] = set()
        for maker, rank in wanted.makers:
            key = f"missing/{maker}/{rank}"
            self._await(store, key, clock, f"{maker}-{rank}", gives[maker], rank)
            gone.update(msgspec.json.decode(store.get(key), type=list[str]))
        store.set("lost", msgspec.json.encode(sorted(gone)).decode())

    def _await(self, store: dist.Store, key: str, clock: Clock, who: str, call: str, rank: int) -> None:
        """Until a maker has told, who may have rows to make first."""
        while True:
            answered = any(one.rank == rank for one in self._context.calls.results(call))
            until = time.monotonic() + _ASK_S
            while not store.check([key]):
                raise_if_stopping(self._context)
                if clock.over or (answered and time.monotonic() > until):
                    got = "its answer to an earlier try" if answered else "nothing"
                    raise DeadlineExceeded(clock.subject, got=got, expected=f"{who} in the exchange")
                if not answered and time.monotonic() > until:
                    break
                time.sleep(_LOOK_S)
            else:
                return

    def end(self, number: Sequence[int]) -> None:
        """Nobody need come to this exchange any more."""
        if self._mesh.rank == 0:
            self._context.calls.note(meeting_note(self._context.role), {"number": list(number), "port": 0})


def _lost(store: dist.Store, clock: Clock, to: str) -> list[str]:
    return msgspec.json.decode(read(store, "lost", clock, f"{to}, rank 0"), type=list[str])


def _exchange(
    store: dist.Store,
    wanted: Wanted,
    made: Plan,
    rank: int,
    views: ShardViews,
    limit_s: float,
    context: WorkerContext,
) -> int:
    names = [f"reader {one}" for one in range(wanted.ranks)] + [f"{role}-{one}" for role, one in wanted.makers]
    try:
        group = join(store, "group", rank, len(names), limit_s)
    except RuntimeError as error:
        if isinstance(error, RlmqError):
            raise
        raise DeadlineExceeded(
            "group of an exchange", got=str(error).splitlines()[0], expected="all its ranks"
        ) from error
    told = dist.PrefixStore("told", store)
    exchange = Exchange(group, rank, range(len(names)), store=told, names=names)
    stats = exchange.run(
        made,
        views,
        generation=f"of tensors to {wanted.ranks} ranks",
        deadline=time.monotonic() + limit_s,
        extend_s=limit_s,
        progress=context.progress,
    )
    return stats.bytes


def wanted_by(
    ranks: int,
    notes: Mapping[str, TensorNote],
    readers: Mapping[str, Collection[int]],
    cuts: Mapping[str, int],
    at: Any,
) -> Wanted:
    """What the ranks of a mesh want.

    Args:
        notes: by name, `SAMPLE/COLUMN`.
        readers: for each name the ranks that have its row.
        cuts: dimension that tensor ranks want a part of, by column.
        at: `(index, parts)` of a rank along that dimension.

    Raises:
        UsageError: a dimension that the tensor does not have.
    """
    targets: dict[str, dict[int, tuple[int, int, int]]] = {}
    for name, note in notes.items():
        dim = cuts.get(name.rpartition("/")[2], -1)
        if dim >= len(note.shape):
            raise UsageError(f"cuts: tensor {name}", got=f"dimension {dim}", expected=f"one of {list(note.shape)}")
        for rank in readers[name]:
            index, parts = at(rank)
            size = note.shape[dim] if dim >= 0 else 0
            targets.setdefault(name, {})[rank] = (dim, index * size // parts, (index + 1) * size // parts)
    return Wanted(ranks, notes, targets)
