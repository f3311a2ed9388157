"""What happens when a supervised process ends: a table over exit codes, and a budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from rlmq.common.errors import ExitCode

Verdict = Literal["finished", "restart", "fatal"]

FATAL = frozenset(
    {int(ExitCode.USAGE), int(ExitCode.DEPENDENCY), int(ExitCode.SECOND_CONTROLLER), int(ExitCode.INTEGRITY)}
)
"""Codes of failures that a fresh process would meet again."""


def judge(returncode: int, *, controller: bool) -> Verdict:
    """What to do about a process that ended although nobody asked it to.

    Signals and exit 75 are cured by a fresh process. So may be an unexpected error (1) or a deadline (5) of a
    worker; the controller's exit, those apart, ends the run with its code.

    Args:
        returncode: as `subprocess` gives it, negative for a signal.
        controller: whether it was the controller.
    """
    if returncode == 0:
        return "finished"
    if returncode < 0 or returncode == ExitCode.RESTART:
        return "restart"
    if controller or returncode in FATAL:
        return "fatal"
    return "restart"


@dataclass(slots=True)
class RestartBudget:
    """At most `limit` restarts of one process within `window_s`, each later than the one before.

    Example:
        >>> budget = RestartBudget(limit=2)
        >>> [budget.spend(now_s=t) for t in (0.0, 1.0, 2.0)]
        [0.0, 0.5, None]
    """

    limit: int = 5
    window_s: float = 600.0
    spent: deque[float] = field(default_factory=deque)

    def spend(self, now_s: float) -> float | None:
        """Seconds to wait before the next start, or None when the budget is used up."""
        while self.spent and now_s - self.spent[0] > self.window_s:
            self.spent.popleft()
        used = len(self.spent)
        if used >= self.limit:
            return None
        self.spent.append(now_s)
        return 0.0 if used == 0 else min(0.25 * 2.0**used, 8.0)
