"""The supervisor's end of a fork server: processes that have their imports when they start."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from rlmq.common.forked import Order, command, serve
from rlmq.common.model_cache import torch_cache
from rlmq.common.processes import Child, die_with_parent, reap, signal_group, spawn
from rlmq.controller.commands import ProcessSpec

_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_ANSWER_S = 10.0
_LOOK_S = 0.25
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "OPENBLAS_NUM_THREADS": "1",  # NumPy's starts its threads at import, and threads do not survive a fork
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


class ForkedChild:
    """A child of this process that a fork server has made; used like a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end; returns the exit code, or minus the signal's number."""
        if self.returncode is None:
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                self.returncode = 0  # as Popen has it: somebody else has waited for it
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless its end is known."""
        if self.returncode is None:
            os.kill(self.pid, number)


class ForkServer:
    """One server that imports `modules`; what it says goes to `log`. See `rlmq.common.forked`."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_ready = False
        with log.open("ab") as output, theirs:
            if set(modules) <= set(sys.modules) and threading.active_count() == 1:
                self._server: Child = _copy(theirs, output)
            else:
                argv = command(theirs.fileno(), modules)
                self._server = spawn(argv, env=environment, output=output, pass_fds=(theirs.fileno(),))

    def ready(self, within_s: float = 0.0) -> bool:
        """Whether it has imported everything.

        Raises:
            OSError: it has ended.
        """
        if not self._is_ready and select.select([self._orders], [], [], within_s)[0]:
            self._answer()
            self._is_ready = True
        return self._is_ready

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], outputs: tuple[int, int], folder: str = "."
    ) -> ForkedChild:
        """Fork a process that runs this command line of `rlmq`; `outputs` are its stdout and stderr.

        Raises:
            OSError: the server has ended, or does not answer.
        """
        order = msgspec.json.encode(Order(tuple(argv), environment, os.getpid(), str(Path(folder).absolute())))
        with _collecting_orphans():
            socket.send_fds(self._orders, [order], outputs)
            if not select.select([self._orders], [], [], _ANSWER_S)[0]:
                raise TimeoutError(f"fork server: no answer within {_ANSWER_S:g} s")
            return ForkedChild(int(self._answer()))

    def close(self) -> None:
        """End the server; its processes go on."""
        self._orders.close()
        if reap(self._server) is None:
            signal_group(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def _answer(self) -> bytes:
        answer = self._orders.recv(64)
        if not answer:
            raise ConnectionError("it has ended")
        return answer


class Forks:
    """Starts the processes of a run: by fork where that spares imports, else from nothing.

    Args:
        modules: what forked processes have imported; none: nothing is forked.
        log: what the fork server says.
        event: told when it is lost; it is started again, and processes start from nothing until it is ready.
    """

    def __init__(self, modules: Sequence[str], log: Path, event: Callable[[str], None]) -> None:
        self._modules = modules if _LIBC is not None else ()
        self._log = log
        self._event = event
        self._server = self._serve()

    def wait_ready(self, deadline_s: float, *, stop: Callable[[], bool], tick: Callable[[], None]) -> None:
        """Wait until processes can be forked, it is too late, or `stop` says so."""
        deadline = time.monotonic() + deadline_s
        while self._server is not None and not stop():
            try:
                if self._server.ready(_LOOK_S):
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not ready after {deadline_s:g} s")
            except OSError as error:
                self._lose(error, again=False)
            tick()

    def start(self, spec: ProcessSpec, output: IO[bytes]) -> Child:
        """Start this process now."""
        environment = spec.full_environment()
        if spec.forked and self._server is not None:
            try:
                if self._server.ready():
                    return self._server.start(spec.argv, environment, (output.fileno(), output.fileno()))
            except (OSError, ValueError) as error:
                self._lose(error, again=True)
        return spawn(spec.argv, env=environment, output=output)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()

    def _serve(self) -> ForkServer | None:
        if not self._modules:
            return None
        return ForkServer(self._modules, {**os.environ, **_ENVIRONMENT, **torch_cache()}, self._log)

    def _lose(self, error: Exception, *, again: bool) -> None:
        self._event(f"fork server: {error}; processes start without it, see {self._log}")
        self.close()
        self._server = self._serve() if again else None


def _copy(orders: socket.socket, output: IO[bytes]) -> ForkedChild:
    """This process has the modules already: a copy of it, without its files and signals, is the server."""
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        return ForkedChild(pid)
    with contextlib.suppress(BaseException):  # of nothing that the copied frames would undo
        die_with_parent(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.dup2(orders.fileno(), 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        serve(socket.socket(fileno=3))
    os._exit(1)


@contextlib.contextmanager
def _collecting_orphans() -> Iterator[None]:
    """Meanwhile orphans below this process become its children."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
