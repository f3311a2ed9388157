"""What a process of an echo run does otherwise than the product: its roles, its clock, the way of its messages."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from faults.echo import ROLES, Echo, Points

import rlmq.cli_up
import rlmq.compose
from rlmq.buffer.redis_calls import RedisCalls
from rlmq.common.run_folder import RunFolder
from rlmq.controller.commands import ProcessSpec, process_specs

_PROGRAM = (sys.executable, str(Path(__file__).with_name("echo.py")))


def apply(echo: Echo) -> None:
    """Change this process."""
    rlmq.compose.ROLES = {role: f"faults.echo:{name}" for role, name in ROLES.items()}
    rlmq.cli_up.process_specs = _specs
    rlmq.cli_up._check_in_child = _no_check
    me = _name(sys.argv[1:])
    if sys.argv[1] == "controller":
        _give_points(sys.argv)
    if me in echo.clock_s:
        _shift_clock(echo.clock_s[me])
    if echo.proxy and me is not None:
        RunFolder.doorbell_address = property(lambda run: f"ipc://{run.sockets}/{me}-doorbell")
        RunFolder.reports_address = property(lambda run: f"ipc://{run.sockets}/{me}-reports")


def _give_points(words: Sequence[str]) -> None:
    """The controller passes `before_submit` and `after_submit` around each call that it stores."""
    points = Points("controller-0", Path(words[words.index("--run") + 1]))
    submit = RedisCalls.submit

    def passing(calls: RedisCalls, call: Any) -> Any:
        points.reach("before_submit")
        stored = submit(calls, call)
        points.reach("after_submit")
        return stored

    RedisCalls.submit = passing


def _specs(*args: Any) -> list[ProcessSpec]:
    """The product's processes, each started as this program."""
    return [replace(spec, argv=(*_PROGRAM, *spec.argv[4:]), forked=False) for spec in process_specs(*args)]


def _no_check(*_: Any) -> int:
    """There is no model and no data to look at."""
    return 0


def _name(words: Sequence[str]) -> str | None:
    """`rollout-1` in a worker."""
    return f"{words[1]}-{words[words.index('--index') + 1]}" if words[:1] == ["worker"] else None


def _shift_clock(seconds: float) -> None:
    now = time.time
    time.time = lambda: now() + seconds
