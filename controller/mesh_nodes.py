"""Nodes whose workers are the ranks of one mesh: while rows are ready for them, calls have them work on these."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from rlmq.buffer.store import Interest, TableCounts
from rlmq.common.errors import DependencyError
from rlmq.common.recipe.schema import Recipe
from rlmq.controller.dispatch import Dispatch

_ATTEMPTS = 5


class MeshNodes:
    """Makes their calls. Where a node reads tensors of another one, both are called: they exchange them.

    Args:
        step_s: `deadlines.step_s` as it is now.
    """

    def __init__(
        self, recipe: Recipe, dispatch: Dispatch, step_s: Callable[[], float], log: structlog.stdlib.BoundLogger
    ) -> None:
        nodes = [recipe.mesh_nodes[name] for name in recipe.mesh_nodes]
        makers = {name: one.name for one in nodes for name, kind in one.writes.items() if kind == "tensor"}
        self._makers = {
            one.name: tuple(dict.fromkeys(makers[name] for name in one.reads if name in makers)) for one in nodes
        }
        self._dispatch = dispatch
        self._step_s = step_s
        self._log = log
        self._calls = 0
        self._failed = 0

    def interests(self, table: str) -> list[Interest]:
        """What to wake up for."""
        return [Interest(table, name) for name in self._makers]

    def work(self, counts: TableCounts, step: int) -> None:
        """Have the nodes work on all rows that are ready for them; rows that become ready meanwhile wait.

        Raises:
            DependencyError: ranks could not exchange tensors, several times in a row.
        """
        ready = [name for name in self._makers if counts.ready.get(name, 0)]
        if not ready:
            return
        self._dispatch.hold()
        asked: list[tuple[str, str]] = []
        for name in ready:
            self._calls += 1
            number = [self._dispatch.epoch, self._calls]
            gives = {maker: self._submit(maker, "give", number, step, name, {}) for maker in self._makers[name]}
            asked += [*gives.items(), (name, self._submit(name, "take", number, step, name, gives))]
        failed = ""
        for (role, _), results in zip(asked, self._dispatch.wait(*(call for _, call in asked)), strict=True):
            values = [one.value for one in results]
            failed = failed or next((str(one["failed"]) for one in values if "failed" in one), "")
            total = {key: sum(one.get(key, 0) for one in values) for key in ("bytes", "lost")}
            rows = max((one.get("rows", 0) for one in values), default=0)
            self._log.info("mesh worked", role=role, rows=rows, **total)
        self._failed = self._failed + 1 if failed else 0
        if failed:
            self._log.warning("exchange failed", reason=failed)
        if self._failed == _ATTEMPTS:
            raise DependencyError("exchange of tensors", got=failed, remedy="Read the logs of both roles")

    def _submit(self, role: str, method: str, number: list[int], step: int, to: str, gives: dict[str, str]) -> str:
        call_id = f"{step}/mesh-{number[0]}-{number[1]}/{role}.{method}-{to}"
        args = {"call": call_id, "number": number, "step": step, "to": to, "gives": gives}
        return self._dispatch.submit(call_id, role, method, args, deadline_s=self._step_s())
