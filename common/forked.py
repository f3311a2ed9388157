"""A process that imports once what many of a run's processes need, and forks them from there.

torch and transformers take seconds of a core to import; a fork takes an instant. Run as a program, with a socket
and the modules to import; then each `Order` that comes through the socket, with the descriptors of its stdout and
stderr, becomes one process. It is forked twice, so that the caller, which collects orphans meanwhile
(`PR_SET_CHILD_SUBREAPER`), becomes its parent: it waits for it, signals it and takes it along when it dies, as with
any child.

This process itself computes nothing, has one thread, and opens nothing that a copy of it must not share.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import random
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from rlmq.common.processes import die_with_parent

_LARGEST = 1 << 20
_ADOPTED_S = 5.0
_ROOM = 4096
_ARGUMENTS = (45, 46)  # of /proc/self/stat after the name: where the command line begins and ends


class Order(msgspec.Struct, frozen=True):
    """A process that is wanted: its command line (of `rlmq`), whole environment, and who is to be its parent."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    parent: int
    folder: str
    """Working folder."""


def command(fd: int, modules: Sequence[str]) -> list[str]:
    """The command line of a fork server, with room for those of its copies."""
    return [sys.executable, "-P", "-m", "rlmq.common.forked", str(fd), *modules, " " * _ROOM]


def serve(orders: socket.socket) -> NoReturn:
    """Fork a process for each order that comes, until nobody can order any more."""
    gc.collect()
    gc.freeze()  # or each copy's first collection would copy every page
    _follow(orders)
    try:
        importlib.import_module("rlmq.cli").main()
        code: object = 0
    except SystemExit as ended:
        code = ended.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _follow(orders: socket.socket) -> None:
    """Returns in the processes that were ordered."""
    orders.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(orders, _LARGEST, 2)
        if not data:
            os._exit(0)
        first = os.fork()
        if first == 0:
            if os.fork() != 0:
                os._exit(0)
            order = msgspec.json.decode(data, type=Order)
            _become(order, orders, fds)
            return
        for fd in fds:
            os.close(fd)
        os.waitpid(first, 0)


def _become(order: Order, orders: socket.socket, outputs: Sequence[int]) -> None:
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != order.parent:
        if time.monotonic() > deadline:  # whoever ordered it is gone
            os._exit(1)
        time.sleep(0.0005)
    die_with_parent(order.parent)
    os.setsid()
    for fd, output in enumerate(outputs, 1):
        os.dup2(output, fd)
        os.close(output)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    _show(order.argv)
    orders.send(str(os.getpid()).encode())
    orders.close()
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = [order.argv[0], *order.argv[order.argv.index("rlmq.cli") + 1 :]]
    sys.audit("rlmq.forked", *order.argv)


def _show(argv: Sequence[str]) -> None:
    """Have `ps` show this command line: it is written over the one that the server was started with."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = (int(fields[place]) for place in _ARGUMENTS)
        line = "\0".join(argv).encode()[: end - begin - 1]
        ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def main() -> None:
    """Import, then serve."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:-1]:
        importlib.import_module(module)
    serve(orders)


if __name__ == "__main__":
    main()
