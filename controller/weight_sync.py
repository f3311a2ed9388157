"""Weight sync: who serves which policy version, and bringing up to date those that are behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from rlmq.common.calls import CallResult
from rlmq.common.errors import DeadlineExceeded
from rlmq.common.recipe.schema import Recipe
from rlmq.controller import plan
from rlmq.controller.dispatch import Dispatch

_SYNC_ATTEMPTS = 5


class WeightSync:
    """Moves the actor's weights to the rollout workers, by calls to both ends.

    Args:
        recipe: number of trainer ranks, time limits.
        dispatch: makes the calls.
        step_s: `deadlines.step_s` as it is now: the actor may have steps to redo before it offers its weights.
    """

    def __init__(
        self, recipe: Recipe, dispatch: Dispatch, step_s: Callable[[], float], log: structlog.stdlib.BoundLogger
    ) -> None:
        self._recipe = recipe
        self._dispatch = dispatch
        self._step_s = step_s
        self._log = log
        self._syncs = 0
        self._unreachable: set[tuple[str, int, int]] = set()
        self.version = 0
        """The policy version that is wanted, and after `bring_up_to_date` served."""

    def want(self, version: int) -> None:
        """Who generates shall do it with this version."""
        self.version = version
        self._dispatch.want("actor" if self._recipe.placement.actor.hybrid else "rollout", version)

    def bring_up_to_date(self) -> None:
        """Every ready rollout worker serves the policy version after this, newcomers included.

        Raises:
            DeadlineExceeded: none of them could receive it.
        """
        for _ in range(_SYNC_ATTEMPTS):
            behind = self._behind()
            if not behind:
                return
            self._sync(self.version, behind)
        behind = self._behind()
        self._unreachable.update(self._attempt(worker) for worker in behind)
        names = ", ".join(worker.name for worker in behind)
        if behind and not any(one.serving == self.version for one in plan.present(self._dispatch.state, "rollout")):
            raise DeadlineExceeded(
                f"weight sync of version {self.version}",
                got=f"{_SYNC_ATTEMPTS} failed transfers to {names}",
                remedy="Read the logs of the actor and of that worker",
            )
        if behind:
            self._log.warning("goes on without", workers=names, version=self.version)

    def _behind(self) -> list[plan.Worker]:
        return [
            one
            for one in plan.present(self._dispatch.state, "rollout")
            if one.ready and one.serving != self.version and self._attempt(one) not in self._unreachable
        ]

    def _attempt(self, worker: plan.Worker) -> tuple[str, int, int]:
        return worker.name, worker.incarnation, self.version

    def _sync(self, version: int, behind: list[plan.Worker]) -> None:
        self._syncs += 1
        generation = f"{self._dispatch.epoch}.{self._syncs}"
        members, ranks = [one.name for one in behind], [one.rank for one in behind]
        sync_s, step_s = self._recipe.deadlines.sync_s, self._step_s()
        self._dispatch.hold()  # not between its calls: both ends would wait for each other

        def call_id(role: str, method: str) -> str:
            return f"{version}/sync-{generation}/{role}.{method}"

        def submit(role: str, method: str, args: Mapping[str, Any], to: Sequence[int], deadline_s: float) -> str:
            return self._dispatch.submit(call_id(role, method), role, method, args, to, deadline_s=deadline_s)

        asked = {"generation": generation, "members": members, "version": version}
        mesh = list(range(self._recipe.placement.actor.workers))  # all of them: they may have steps to redo
        [[offer, *_]] = self._dispatch.wait(submit("actor", "offer", asked, mesh, step_s))
        if (offered := offer.value.get("version", version)) > version:  # the records are older than its checkpoint
            version = offered
            self.want(version)
        args = {**offer.value, "version": version, "receive": call_id("rollout", "receive_weights")}
        # Both ends give up after sync_s by themselves, and say why.
        send = submit("actor", "send_weights", args, mesh, 2 * sync_s)
        receive = submit("rollout", "receive_weights", args, ranks, 2 * sync_s)
        sent, received = self._dispatch.wait(send, receive)
        failed = {one.rank: one.released or one.value.get("failed") for one in received}
        self._dispatch.served("rollout", [rank for rank in ranks if not failed[rank]], version)
        for rank, reason in failed.items():
            if reason:
                self._log.warning("weights not received", worker=f"rollout-{rank}", reason=reason)
        self._log.info("weights", version=version, generation=generation, to=members, **_together(sent))


def _together(sent: Sequence[CallResult]) -> dict[str, Any]:
    """What all trainer ranks sent; the share of changed elements is each one's own, of parts of about one size."""
    told = [one.value for one in sent if one.value]
    failed = {f"trainer rank {one.rank}": one.value["failed"] for one in sent if "failed" in one.value}
    changed = [one["changed"] for one in told if one.get("changed") is not None]
    share = {"changed": round(sum(changed) / len(changed), 6)} if changed else {}
    return {name: sum(one.get(name, 0) for one in told) for name in ("bytes", "full_bytes")} | share | failed
