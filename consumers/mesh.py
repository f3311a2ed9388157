"""The trainer mesh: the actor's ranks as one process group, which shares its fate.

Rank 0 opens a meeting place on a free port and leaves its address as a note; the others find it there. A
rank that dies makes the others' next collective fail; they end with exit code 75 and the mesh meets anew.
"""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlmq.common.calls import Calls
from rlmq.common.errors import RestartRequired

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NOTE = "actor_mesh"
_POLL_S = 0.1


class Mesh:
    """Collectives over plain bytes and tensors; with one rank, nothing happens."""

    def __init__(self, group: ProcessGroup | None, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size

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
            width = max(int(s) for s in sizes)  # gloo gathers equal sizes only
            own = torch.zeros(width, dtype=torch.uint8)
            own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            parts = [torch.empty(width, dtype=torch.uint8) for _ in range(self.size)]
            self.group.allgather([parts], [own]).wait()
        except RuntimeError as error:
            raise _lost(error) from error
        return [bytes(p[: int(n)].numpy().tobytes()) for p, n in zip(parts, sizes, strict=True)]


def meet(calls: Calls, *, rank: int, size: int, incarnation: int, timeout_s: float) -> Mesh:
    """Join the mesh of this generation (named by rank 0's incarnation).

    Raises:
        RestartRequired: the ranks did not find each other within `timeout_s`.
    """
    if size == 1:
        return Mesh(None, 0, 1)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
            calls.note(_NOTE, {"port": store.port, "generation": incarnation})
            generation = incarnation
        else:
            port, generation = _find(calls, timeout_s)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        prefixed = dist.PrefixStore(f"actor-{generation}", store)
        gloo: Any = dist.ProcessGroupGloo  # torch's stub does not call it a ProcessGroup
        group: dist.ProcessGroup = gloo(prefixed, rank, size, timeout)
    except RuntimeError as error:
        raise _lost(error) from error
    return Mesh(group, rank, size)


def _find(calls: Calls, timeout_s: float) -> tuple[int, int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        note = calls.noted(_NOTE)
        if note is not None:
            return int(note["port"]), int(note["generation"])
        time.sleep(_POLL_S)
    raise RestartRequired("trainer mesh", got=f"no address of actor-0 within {timeout_s:.0f} s")


def _lost(error: RuntimeError) -> RestartRequired:
    return RestartRequired(
        "trainer mesh", got=str(error).splitlines()[0], expected="every actor rank", remedy="The role restarts"
    )
