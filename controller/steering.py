"""Steering: what the control loop of an algorithm calls, each a re-entrant step with a stored result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import structlog

from rlmq.buffer.store import ExperienceStore, Interest, TableCounts
from rlmq.buffer.tables import EVAL, TRAIN
from rlmq.common.calls import Calls
from rlmq.common.errors import DeadlineExceeded, UsageError
from rlmq.common.metrics import POLICY_VERSION, STEP, set_step_figures
from rlmq.common.recipe.schema import Recipe
from rlmq.controller.dispatch import Dispatch
from rlmq.controller.roster import Member
from rlmq.controller.trackers import Trackers

_OPEN_STEP = "open_step"
_BEST = "best"
_SYNC_ATTEMPTS = 5


class RunSteering:
    """Implements `rlmq.common.algorithms.algorithm.Steering` over calls and the store."""

    def __init__(
        self,
        recipe: Recipe,
        dispatch: Dispatch,
        store: ExperienceStore,
        calls: Calls,
        trackers: Trackers,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._recipe = recipe
        self._dispatch = dispatch
        self._store = store
        self._calls = calls
        self._trackers = trackers
        self._log = log
        self._step_s = recipe.deadlines.step_s
        self._syncs = 0
        self._admitted = 0
        self._line: dict[str, Any] = {}
        self._newest: dict[str, Any] = {}
        self._began = time.monotonic()
        self._activity_before: dict[str, dict[str, float]] = {}
        self.total_steps = 0
        self.open_step = 1
        self.policy_version = 0
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.last_train: dict[str, Any] = {}
        self.prompts: dict[str, Any] = {}

    # -- the loop -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Learn how many steps there are and where to go on; every worker is ready now."""
        call_id = f"0/describe-{self._dispatch.epoch}/prompts.describe"
        self.prompts = self._dispatch.call(call_id, "prompts", "describe", {}, deadline_s=self._step_s)
        possible = self.prompts["steps"]
        self.total_steps = min(self._recipe.train.steps, possible) if possible else self._recipe.train.steps
        self.open_step = int((self._calls.noted(_OPEN_STEP) or {"step": 1})["step"])
        self._log.info("prompts", **{k: v for k, v in self.prompts.items() if v is not None})

    def steps(self) -> Iterator[int]:
        """See `Steering.steps`."""
        while self.open_step <= self.total_steps:
            step = self.open_step
            if (self._calls.noted(_OPEN_STEP) or {}).get("step") != step:
                self._calls.note(_OPEN_STEP, {"step": step})
            self._begin_line(step)
            yield step
            self.open_step = step + 1
            self._calls.note(_OPEN_STEP, {"step": self.open_step})

    def admit(self, step: int) -> int:
        """See `Steering.admit`."""
        value = self._call(step, 1, "prompts", "admit", {"step": step})
        self._admitted = int(value["samples"])
        return self._admitted

    def wait_batch(self, step: int) -> int:
        """See `Steering.wait_batch`."""
        note = self._calls.noted(_OPEN_STEP) or {}
        if note.get("step") == step and note.get("formed"):
            return 0  # before a crash: the batch is the actor's, in the log or under its lease
        interest = Interest(TRAIN, "actor", rows=self._admitted, or_settled=True)
        counts = self._wait_rows(interest, self.policy_version)
        ready = counts.ready.get("actor", 0) + counts.leased.get("actor", 0)
        if ready == 0 and counts.live == 0:
            self._nothing_to_train(step)
        return ready

    def train(self, step: int) -> None:
        """See `Steering.train`."""
        self._calls.note(_OPEN_STEP, {"step": step, "formed": True})
        self.last_train = self._call(step, 3, "actor", "train", {"step": step})
        self._line.update(self.last_train, filtered=self._admitted - self.last_train["samples"])

    def publish(self, version: int) -> None:
        """See `Steering.publish`; `version` 0 after a restart means the newest one."""
        version = max(version, self.open_step - 1)
        began = time.monotonic()
        self._dispatch.want("rollout", "run", policy_version=version)
        self.policy_version = version
        self._bring_up_to_date(version)
        POLICY_VERSION.set(version)
        if self._line:
            self._line["sync_s"] = round(time.monotonic() - began, 4)
            self._end_line(version)

    def evaluate(self, step: int) -> None:
        """See `Steering.evaluate`."""
        every = self._recipe.evaluate.every_steps
        due = step in (0, self.total_steps) or (every > 0 and step % every == 0)
        if self._recipe.data.eval is None or not due:
            return
        if step == 0 and self.open_step > 1 and not self._dispatch.finished(self._id(0, 5, "recorder", "evaluate")):
            return  # the untrained weights are gone
        began = time.monotonic()
        admitted = self._call(step, 4, "prompts", "admit_eval", {"step": step})
        samples = int(admitted["samples"])
        if not self._dispatch.finished(self._id(step, 5, "recorder", "evaluate")):
            self._wait_rows(Interest(EVAL, "evaluation", rows=samples, or_settled=True), self.policy_version)
        result = self._call(step, 5, "recorder", "evaluate", {"step": step, "samples": samples})
        self.evaluations[step] = result
        self._trackers.log({"kind": "eval", "step": step, "seconds": time.monotonic() - began, **result})
        self._log.info("evaluation", step=step, **{n: s["reward_mean"] for n, s in result["sets"].items()})
        self._keep_best(step, result)

    def checkpoint(self, step: int) -> None:
        """See `Steering.checkpoint`."""
        every = self._recipe.checkpoint.every_steps
        if step == self.total_steps or (every > 0 and step % every == 0):
            self._save(step)

    # -- parts ---------------------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        best = self._calls.noted(_BEST)
        protect = [int(best["step"])] if best else []
        self._call(step, 6, "actor", "checkpoint", {"step": step, "protect": protect})

    def _keep_best(self, step: int, result: dict[str, Any]) -> None:
        """The best checkpoint is kept: a better evaluation than ever before saves one."""
        best = self._calls.noted(_BEST)
        reward = result["reward_mean"]
        if reward is None or (best is not None and best["reward_mean"] >= reward):
            return
        self._calls.note(_BEST, {"step": step, "reward_mean": reward})
        if step > 0:
            self._save(step)

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second of the newest finished step."""
        return self._newest.get("tokens_per_s")

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the newest step's pace."""
        pace = self._newest.get("step_s")
        return None if pace is None else round(pace * (self.total_steps - self.open_step + 1), 1)

    @property
    def best(self) -> dict[str, Any] | None:
        """Step and mean reward of the best evaluation."""
        return self._calls.noted(_BEST)

    def _id(self, step: int, ordinal: int, role: str, method: str) -> str:
        return f"{step}/{ordinal}/{role}.{method}"

    def _call(self, step: int, ordinal: int, role: str, method: str, args: dict[str, Any]) -> dict[str, Any]:
        return self._dispatch.call(
            self._id(step, ordinal, role, method), role, method, args, deadline_s=self._step_s
        )

    def _wait_rows(self, interest: Interest, version: int) -> TableCounts:
        """Wait for rows, without polling; meanwhile workers that came back receive the weights."""
        seen: TableCounts | None = None
        self._dispatch.roster.moved()
        while True:
            self._dispatch.pump()
            self._bring_up_to_date(version)
            if self._store.wait([interest], timeout_s=1.0, wake_fd=self._dispatch.bus.wake.fd):
                counts = self._store.counts(interest.table)
                ready = counts.ready.get(interest.stage, 0)
                if ready >= interest.rows or (interest.or_settled and self._settled(counts, interest.stage)):
                    return counts
            counts = self._store.counts(interest.table)
            if counts != seen:
                self._dispatch.roster.moved()
                seen = counts
            if self._dispatch.roster.still_s > self._step_s:
                raise self._starved(interest, counts)

    @staticmethod
    def _settled(counts: TableCounts, stage: str) -> bool:
        """No live row can still become ready: all of them are."""
        return counts.ready.get(stage, 0) + counts.leased.get(stage, 0) >= counts.live

    def _starved(self, interest: Interest, counts: TableCounts) -> DeadlineExceeded:
        stages = ", ".join(f"{s}: {counts.ready[s]} ready, {counts.leased.get(s, 0)} leased" for s in counts.ready)
        missing = ", ".join(self._dispatch.roster.missing()) or "none"
        return DeadlineExceeded(
            f"stage {interest.stage} of table {interest.table}",
            got=f"{counts.ready.get(interest.stage, 0)} of {interest.rows} rows; {stages}; "
            f"workers missing: {missing}",
            expected=f"progress within {self._step_s:.0f} s",
            remedy="Read the log of the worker that holds the rows, or raise deadlines.step_s",
        )

    def _nothing_to_train(self, step: int) -> None:
        call_id = f"{step}/failures-{self._dispatch.epoch}/reward.failures"
        calls = self._dispatch.submit(call_id, "reward", "failures", {})
        [results] = self._dispatch.wait(calls, deadline_s=self._step_s)
        reasons = [str(r.value["last"]) for r in results if r.value.get("last")]
        raise UsageError(
            f"rewards of step {step}",
            got="no verdict for any sample" + (f"; last failure: {reasons[-1]}" if reasons else ""),
            expected="a number for some samples",
            remedy="Correct the reward function; the same command goes on with this step",
        )

    # -- weights ---------------------------------------------------------------------------------------------

    def _bring_up_to_date(self, version: int) -> None:
        """Every ready rollout worker serves `version` after this."""
        for _ in range(_SYNC_ATTEMPTS):
            behind = [m for m in self._dispatch.roster.of("rollout") if m.ready and m.serving != version]
            if not behind:
                return
            self._sync(version, behind)
        names = ", ".join(m.name for m in behind)
        raise DeadlineExceeded(
            f"weight sync of version {version}",
            got=f"{_SYNC_ATTEMPTS} failed transfers to {names}",
            remedy="Read the logs of the actor and of that worker",
        )

    def _sync(self, version: int, behind: list[Member]) -> None:
        self._syncs += 1
        generation = f"{self._dispatch.epoch}.{self._syncs}"
        members = [m.name for m in behind]
        deadline_s = self._recipe.deadlines.sync_s

        def call_id(role: str, method: str) -> str:
            return f"{version}/sync-{generation}/{role}.{method}"

        offer = self._dispatch.call(
            call_id("actor", "offer"),
            "actor",
            "offer",
            {"generation": generation, "members": members, "version": version},
            ranks=[0],
            deadline_s=self._step_s,
        )
        args = {**offer, "version": version}
        send = self._dispatch.submit(call_id("actor", "send_weights"), "actor", "send_weights", args, [0])
        receive = self._dispatch.submit(
            call_id("rollout", "receive_weights"), "rollout", "receive_weights", args, [m.rank for m in behind]
        )
        [sent], received = self._dispatch.wait(send, receive, deadline_s=deadline_s)
        for member, result in zip(sorted(behind, key=lambda m: m.rank), received, strict=True):
            if result.value.get("failed"):
                self._log.warning("weights not received", worker=member.name, reason=result.value["failed"])
            else:
                member.serving = version
        self._log.info("weights", version=version, generation=generation, to=members, **sent.value)

    # -- metrics ----------------------------------------------------------------------------------------------

    def _begin_line(self, step: int) -> None:
        self._began = time.monotonic()
        self._line = {"kind": "train", "step": step}
        self._activity_before = self._activities()

    def _activities(self) -> dict[str, dict[str, float]]:
        return {role: self._dispatch.roster.activity_s(role) for role in ("rollout", "reward", "actor")}

    def _end_line(self, version: int) -> None:
        """Write the step's metrics: from its first call until its weights are served everywhere."""
        seconds = time.monotonic() - self._began
        line = self._line
        line["policy_version"] = version
        line["step_s"] = round(seconds, 4)
        line["ended_unix_s"] = round(time.time(), 4)
        line["tokens_per_s"] = round(line.get("generated_tokens", 0) / seconds, 1)
        line["time_shares"] = self._time_shares(seconds)
        self._trackers.log(line)
        set_step_figures({**line, "seconds": seconds})
        STEP.set(line["step"])
        self._newest, self._line = line, {}

    def _time_shares(self, seconds: float) -> dict[str, float]:
        """Share of the step's time in each activity (mean over the role's workers, 0 to 1)."""
        shares: dict[str, float] = {}
        now = self._activities()
        for role, activity in (("rollout", "generating"), ("reward", "scoring"), ("actor", "training")):
            workers = max(1, len(self._dispatch.roster.of(role)))
            before = self._activity_before.get(role, {}).get(activity, 0.0)
            spent = now[role].get(activity, 0.0) - before
            shares[activity] = round(min(1.0, max(0.0, spent / workers / seconds)), 4)
        shares["syncing"] = round(min(1.0, self._line["sync_s"] / seconds), 4)
        return shares
