"""Disposable process groups: raw ones, so that no default group and no environment variable is involved."""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

HOST = "127.0.0.1"


def open_store(timeout_s: float) -> tuple[dist.TCPStore, int]:
    """A meeting place on a free port of the loopback interface, and the port."""
    # torch's own listener would be open on all interfaces.
    listener = socket.create_server((HOST, 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def join(
    store: dist.Store, name: str, rank: int, size: int, timeout_s: float, *, backend: str = "gloo"
) -> dist.ProcessGroup:
    """Become a member of the group of this name; returns when all are there.

    Raises:
        RuntimeError: they are not within the time.
    """
    timeout = timedelta(seconds=timeout_s)
    inside = dist.PrefixStore(name, store)
    if backend == "nccl":
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        made: dist.ProcessGroup = nccl(inside, rank, size, options)
        return made
    gloo: Any = dist.ProcessGroupGloo  # torch's stub lacks most of its members
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST)]
    options._timeout = timeout
    group: dist.ProcessGroup = gloo(inside, rank, size, options)
    return group


def reason(error: RuntimeError) -> str:
    """What the backend says, without its source line and its advice."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ", "", first).split(". This is typically")[0]
