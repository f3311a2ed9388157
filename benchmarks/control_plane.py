"""The controller's side of `rlmq bench control`: the product's own bus, plan and files, and a stopwatch.

    python -m benchmarks.control_plane SETTINGS

It reads words from stdin and answers each with one line of JSON: `storm` (how long until every worker was ready),
`idle SECONDS` (CPU seconds meanwhile), `cpu` (so far), `change VERSION` (when each worker's answer to it came).
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable

from benchmarks.control_settings import ROLE, Settings
from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.logs import configure
from rlmq.common.messages import Heartbeat, Report
from rlmq.common.run_folder import RunFolder
from rlmq.controller.dispatch import EPOCH_LEASE_S, Dispatch

_DEADLINE_S = 120.0


class Stopwatch:
    """Notes, on the bus's thread, when each worker first followed a version."""

    def __init__(self, inner: Callable[[Report], bool]) -> None:
        self._inner = inner
        self._desired: dict[int, int] = {}
        self.arrived: dict[int, list[float]] = {}
        self.ready: set[int] = set()

    def all_follow(self, version: int, workers: int) -> Callable[[], bool]:
        """Whether so many workers follow a version."""
        return lambda: len(self.arrived.get(version, ())) == workers

    def __call__(self, report: Report) -> bool:
        """As `ControllerBus.quiet`."""
        if isinstance(report, Heartbeat):
            if report.ready:
                self.ready.add(report.rank)
            if report.desired > self._desired.get(report.rank, 0):
                self._desired[report.rank] = report.desired
                self.arrived.setdefault(report.desired, []).append(time.monotonic())
        return self._inner(report)


def serve(settings: Settings) -> None:
    """Steer until stdin is closed."""
    run = RunFolder(settings.run)
    calls = RedisCalls(settings.redis_url, run_id=run.run_id)
    epoch = calls.begin_epoch(fingerprint="bench", lease_s=EPOCH_LEASE_S)
    dispatch = Dispatch(settings.recipe, run, calls, epoch, configure("controller", 0, level="error"))
    watch = Stopwatch(dispatch.bus.quiet)
    dispatch.bus.quiet = watch

    def steer(until: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(what)
            dispatch.pump()
            dispatch.sleep(0.5)

    def answer(**values: object) -> None:
        print(json.dumps(values), flush=True)

    used = time.process_time()
    answer(version=dispatch.state.desired[ROLE].version)
    while True:
        steer(lambda: bool(select.select([sys.stdin], [], [], 0)[0]), "a word")
        word, _, number = sys.stdin.readline().strip().partition(" ")
        if word == "storm":
            steer(lambda: len(watch.ready) == settings.workers, "every worker")
            answer(at=time.monotonic(), cpu_s=time.process_time() - used)
        elif word == "cpu":
            answer(cpu_s=time.process_time())
        elif word == "idle":
            began, used = time.monotonic(), time.process_time()
            steer(_at(began + float(number)), "the end")
            answer(cpu_s=time.process_time() - used, wall_s=time.monotonic() - began)
        elif word == "change":
            steer(watch.all_follow(int(number), settings.workers), f"version {number}")
            answer(arrived=watch.arrived[int(number)])
        else:
            break
    dispatch.bus.close()


def _at(end_s: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= end_s


if __name__ == "__main__":
    serve(Settings.from_json(sys.argv[1]))
