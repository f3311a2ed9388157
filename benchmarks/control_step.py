"""A step's calls without any work in them: what the control plane itself takes of a step of `tiny`.

python -m benchmarks.control_step ROLE SETTINGS  # one worker: the loop of the product, nothing in it
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.control_settings import Settings
from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.logs import configure
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.common.worker_loop import Worker
from rlmq.controller.dispatch import EPOCH_LEASE_S, Dispatch

ROLES = ("prompts", "rollout", "actor")
_DEADLINE_S = 60.0


class Nothing:
    """A role whose calls return at once."""

    def handlers(self) -> Mapping[str, CallHandler]:
        """Every method that a step calls."""
        return dict.fromkeys(("admit", "train", "offer", "send_weights", "receive_weights"), lambda _: {})

    def work(self) -> bool:
        """No rows."""
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Until a doorbell rings."""
        select.select([wake_fd], [], [], timeout_s)

    def close(self) -> None:
        """Holds nothing."""


def steps_s(settings: Settings, steps: int, start: Callable[..., Any]) -> float:
    """Median seconds of a step's calls: admit, train, and the weights offered, sent and received.

    Args:
        settings: of a run with one worker per role.
        steps: how many; the first is left out.
        start: starts this module with arguments, as a context.
    """
    run = RunFolder(settings.run)
    calls = RedisCalls(settings.redis_url, run_id=run.run_id)
    epoch = calls.begin_epoch(fingerprint="bench", lease_s=EPOCH_LEASE_S)
    dispatch = Dispatch(settings.recipe, run, calls, epoch, configure("controller", 0, level="error"))
    workers = [start(role, settings.to_json()) for role in ROLES]
    times: list[float] = []
    try:
        _await_workers(dispatch)
        for step in range(1, steps + 1):
            began = time.perf_counter()
            _step(dispatch, step)
            times.append(time.perf_counter() - began)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        dispatch.bus.close()
        calls.close()
    return median(times[1:])


def _await_workers(dispatch: Dispatch) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while {role for (role, _), member in dispatch.state.members.items() if member.ready} < set(ROLES):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no workers: {dispatch.state.members}")
        dispatch.pump()
        dispatch.sleep(0.1)


def _step(dispatch: Dispatch, step: int) -> None:
    def submit(role: str, method: str) -> str:
        return dispatch.submit(f"{step}/{role}.{method}", role, method, {"step": step}, [0], deadline_s=_DEADLINE_S)

    dispatch.open_step(step, begun=True)
    dispatch.wait(submit("prompts", "admit"))
    dispatch.wait(submit("actor", "train"))
    dispatch.want("rollout", step)
    dispatch.wait(submit("actor", "offer"))
    dispatch.wait(submit("actor", "send_weights"), submit("rollout", "receive_weights"))
    dispatch.open_step(step + 1, begun=False)


def work(role: str, settings: Settings) -> None:
    """One worker."""
    run = RunFolder(settings.run)
    calls = RedisCalls(settings.redis_url, run_id=run.run_id)

    def make_role(_: WorkerContext) -> Nothing:
        return Nothing()

    log = configure(role, 0, level="error")
    Worker(settings.recipe, Path.cwd(), run, role, 0, calls, "bench", log).run(make_role)


if __name__ == "__main__":
    work(sys.argv[1], Settings.from_json(sys.argv[2]))
