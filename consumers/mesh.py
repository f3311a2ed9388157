"""A trainer mesh: the ranks of actor or critic as one process group, which shares its fate.

Rank 0 opens a meeting place on a free port and leaves its address as a note; the others find it there. A
rank that dies makes the others' next collective fail; they end with exit code 75 and the mesh meets anew.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlmq.common.calls import Calls
from rlmq.common.engines.mesh_groups import MakeGroup
from rlmq.common.errors import RestartRequired
from rlmq.common.layouts.groups import join
from rlmq.common.layouts.layout import MeshShape

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_HOST = "127.0.0.1"
_POLL_S = 0.1
_ANSWER_S = 1.0
_CONNECT = datetime.timedelta(seconds=5)  # torch tries as long as this at an address that nobody listens at


class Mesh:
    """Collectives over plain bytes and tensors; with one rank, nothing happens.

    Attributes:
        shape: what the ranks are in `pp x tp x dp`; all of them replicas where nothing else is said.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        rank: int,
        size: int,
        shape: MeshShape | None = None,
        join: MakeGroup = lambda _name, _ranks: None,
        whole: Callable[[], bool] = lambda: True,
    ) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.shape = shape or MeshShape(dp=size)
        self._join = join
        self._whole = whole
        self._renewed = 0

    def check(self) -> None:
        """Look whether another rank was started anew: one that waits for a call would not notice.

        Raises:
            RestartRequired: it was.
        """
        if not self._whole():
            raise RestartRequired("trainer mesh", got="a rank that started anew", remedy="The role restarts")

    def renew(self) -> None:
        """Parts are new groups from here on, on every rank: those before may be broken."""
        self._renewed += 1

    @property
    def replica(self) -> int:
        """Which data-parallel replica this rank is a part of."""
        return self.shape.place(self.rank)[2]

    def part(self, name: str, ranks: Sequence[int]) -> ProcessGroup | None:
        """A group of some ranks, in their order, this one among them; None for one alone.

        Raises:
            RestartRequired: a rank died or did not come in time.
        """
        try:
            return self._join(f"{name} {list(ranks)} {self._renewed}", ranks) if len(ranks) > 1 else None
        except RuntimeError as error:
            raise _lost(error) from error

    def broadcast(self, payload: bytes) -> bytes:
        """Rank 0's bytes, on every rank.

        Raises:
            RestartRequired: a rank died or did not come in time.
        """
        if self.group is None:
            return payload
        try:
            size = torch.tensor([len(payload)], dtype=torch.int64)
            self.group.broadcast([size], dist.BroadcastOptions()).wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == 0:
                data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            self.group.broadcast([data], dist.BroadcastOptions()).wait()
        except RuntimeError as error:
            raise _lost(error) from error
        return bytes(data.numpy().tobytes())

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, on every rank.

        Raises:
            RestartRequired: a rank died or did not come in time.
        """
        if self.group is None:
            return [payload]
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self.group.allgather([sizes], [torch.tensor([len(payload)], dtype=torch.int64)]).wait()
            width = max(1, *(int(s) for s in sizes))  # gloo gathers equal sizes only
            own = torch.zeros(width, dtype=torch.uint8)
            if payload:
                own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            parts = [torch.empty(width, dtype=torch.uint8) for _ in range(self.size)]
            self.group.allgather([parts], [own]).wait()
        except RuntimeError as error:
            raise _lost(error) from error
        return [bytes(p[: int(n)].numpy().tobytes()) for p, n in zip(parts, sizes, strict=True)]


def meet(
    calls: Calls,
    *,
    role: str,
    rank: int,
    size: int,
    incarnation: int,
    timeout_s: float,
    shape: MeshShape | None = None,
    named: bool = False,
) -> Mesh:
    """Join the mesh of this generation, which rank 0 opens; no generation takes a rank twice.

    Args:
        named: the group is torch's default one too, which FSDP2 looks up by its name.

    Raises:
        RestartRequired: the ranks did not find each other within `timeout_s`.
    """
    if size == 1:
        return Mesh(None, 0, 1, shape)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        note = f"{role}_mesh"
        first = rank == 0
        store = _open(calls, note, size, timeout) if first else _find(calls, note, rank, incarnation, timeout_s)
        group = _group(dist.PrefixStore("ranks", store), rank, size, timeout, named=named)
    except RuntimeError as error:
        raise _lost(error) from error

    def join_part(name: str, ranks: Sequence[int]) -> ProcessGroup:
        return join(store, name, list(ranks).index(rank), len(ranks), timeout_s)

    opened = calls.noted(note)

    def whole() -> bool:
        if not first:
            return calls.noted(note) == opened
        return all(store.get(f"here/{one}") == store.get(f"taken/{one}") for one in range(1, size))

    return Mesh(group, rank, size, shape, join_part, whole)


def _group(
    store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, *, named: bool
) -> dist.ProcessGroup:
    if named:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    gloo: Any = dist.ProcessGroupGloo  # torch's stub does not call it a ProcessGroup
    group: dist.ProcessGroup = gloo(store, rank, size, timeout)
    return group


def _open(calls: Calls, note: str, size: int, timeout: datetime.timedelta) -> dist.Store:
    """Rank 0's meeting place, with every other rank there; each is told which process of it is meant."""
    listener = socket.create_server((_HOST, 0))  # torch's own would be open on all interfaces
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        _HOST, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
    calls.note(note, {"port": port})
    store.wait([f"here/{rank}" for rank in range(1, size)], timeout)
    for rank in range(1, size):
        store.set(f"taken/{rank}", store.get(f"here/{rank}").decode())
    return store


def _find(calls: Calls, name: str, rank: int, incarnation: int, timeout_s: float) -> dist.Store:
    """Rank 0's meeting place; one that is left, or has taken an earlier process of this rank, is passed over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        note = calls.noted(name)
        if note is not None and _answers(int(note["port"])):
            with contextlib.suppress(RuntimeError):  # rank 0 left meanwhile
                store = dist.TCPStore(_HOST, int(note["port"]), is_master=False, timeout=_CONNECT)
                store.set(f"here/{rank}", str(incarnation))
                while not store.check([f"taken/{rank}"]) and calls.noted(name) == note:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(_POLL_S)
                if store.check([f"taken/{rank}"]) and store.get(f"taken/{rank}") == str(incarnation).encode():
                    store.set_timeout(datetime.timedelta(seconds=timeout_s))
                    return store
        time.sleep(_POLL_S)
    raise RestartRequired("trainer mesh", got=f"rank 0 not met within {timeout_s:.0f} s")


def _answers(port: int) -> bool:
    try:
        socket.create_connection((_HOST, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


def _lost(error: RuntimeError) -> RestartRequired:
    return RestartRequired(
        "trainer mesh", got=str(error).splitlines()[0], expected="every rank of it", remedy="The role restarts"
    )
