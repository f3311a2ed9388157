"""Steering: what the control loop of an algorithm calls, each a re-entrant step with a stored result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.buffer.store import ExperienceStore, Interest, TableCounts
from rlmq.buffer.tables import EVAL
from rlmq.common.calls import CallResult, Calls
from rlmq.common.critics import learners
from rlmq.common.errors import DeadlineExceeded, DependencyError, UsageError
from rlmq.common.metrics import POLICY_VERSION
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller import plan
from rlmq.controller.dispatch import Dispatch
from rlmq.controller.late_rows import late_rows
from rlmq.controller.mesh_nodes import MeshNodes
from rlmq.controller.step_line import StepLine, line_of
from rlmq.controller.trackers import Trackers
from rlmq.controller.weight_sync import WeightSync

_BEST = "best"
_FORM_ATTEMPTS = 5
_LOOK_S = 0.5


@dataclass
class _Admitted:
    """What was admitted to a step: the arguments of each call, and rows."""

    parts: list[dict[str, int]] = field(default_factory=list)
    samples: int = 0
    greedy: int = 0


class Pending:
    """A call that was submitted; see `rlmq.common.algorithms.algorithm.Future`."""

    def __init__(self, dispatch: Dispatch, call_id: str) -> None:
        self._dispatch = dispatch
        self._call_id = call_id
        self._values: list[dict[str, Any]] | None = None

    def wait(self) -> list[dict[str, Any]]:
        """What the call's ranks answered; a second time at once."""
        if self._values is None:
            self._values = _values(self._dispatch.wait(self._call_id)[0])
        return self._values


def _values(results: Sequence[CallResult]) -> list[dict[str, Any]]:
    return [result.value for result in results if not result.released]


class RunSteering:
    """Implements `rlmq.common.algorithms.algorithm.Steering` over calls and the store.

    A call's id is its step, its ordinal among the step's calls, and what is called: a loop that does the same finds
    its results again. Calls that depend on who is there have the epoch in their ids instead.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        dispatch: Dispatch,
        store: ExperienceStore,
        calls: Calls,
        trackers: Trackers,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._recipe = recipe
        self._run = run
        self._dispatch = dispatch
        self._store = store
        self._calls = calls
        self._trackers = trackers
        self._log = log
        self._place: int | str = 0
        self._ordinal = 0
        self._weights = WeightSync(recipe, dispatch, lambda: self._step_s, log)
        self._meshes = MeshNodes(recipe, dispatch, lambda: self._step_s, log)
        self._line = StepLine(dispatch, trackers)
        self._repeats = 0
        self._server = store.server_id()
        self._steps: dict[int, _Admitted] = {}
        self._logged_step = -1
        self._saved_step = 0
        self._used_prompts = 0
        self._used_through = 0
        self._begun = False
        self.open_step = 1
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.last_train: dict[str, Any] = {}
        self.prompts: dict[str, Any] = {}
        self.best: dict[str, Any] | None = None
        """Step and mean reward of the best evaluation before the open step, or in it."""

    # -- the loop -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Learn how many steps there are and where to go on; a quorum of workers is ready now."""
        call_id = f"0/describe-{self._dispatch.epoch}/prompts.describe"
        [described] = self._dispatch.call(call_id, "prompts", "describe", {}, deadline_s=self._step_s)
        self.prompts = described.value
        self.open_step, self._begun = self._dispatch.noted_step()
        self._logged_step = FileBatchLog(self._run.batch_log).last_step()
        self._find_place()
        best = self._calls.noted(_BEST)
        self.best = best["before"] if best and best["step"] >= self.open_step else best
        self._log.info("prompts", **{k: v for k, v in self.prompts.items() if v is not None})

    @property
    def total_steps(self) -> int:
        """The last step, as the recipe, an operator and the data have it."""
        wanted, prompts = int(self._setting("train.steps")), self.prompts.get("prompts")
        if prompts is None:
            return wanted
        left = max(0, int(prompts) - self._used_prompts)
        return min(wanted, self._used_through + -(-left // self._recipe.data.prompts_per_step))

    @property
    def steps_end(self) -> str:
        """What ends the run: `drain`, with steps left, `data` or `train.steps`."""
        if self._state.phase == "drain" and self.open_step <= self.total_steps:
            return "drain"
        return "data" if self.total_steps < self._setting("train.steps") else "train.steps"

    def steps(self) -> Iterator[int]:
        """See `Steering.steps`."""
        self.open_step = max(self.open_step, self.policy_version)
        while self.open_step <= self.total_steps:
            self._dispatch.hold()
            if self._dispatch.state.phase == "drain" and not self._begun:
                break
            step = self.open_step
            self._dispatch.open_step(step, begun=True)
            self._place, self._ordinal, self._begun = step, 0, True
            self._line.begin(step)
            yield step
            if self._line.open:  # the loop has not published this step
                self._line.end(self.policy_version, 0.0)
            self.open_step, self._begun = step + 1, False
        self._dispatch.open_step(self.open_step, begun=False)
        done = self.open_step - 1
        self._place, self._ordinal = f"end-{done}", 0
        if done > self._saved_step and (self._saved_step or self._dispatch.state.phase == "drain"):
            self._save(done)

    def call(
        self, role: str, method: str, args: Mapping[str, Any] | None = None, *, ranks: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """See `Steering.call`."""
        return self.submit(role, method, args, ranks=ranks).wait()

    def submit(
        self, role: str, method: str, args: Mapping[str, Any] | None = None, *, ranks: Sequence[int] | None = None
    ) -> Pending:
        """See `Steering.submit`."""
        self._ordinal += 1
        self._dispatch.hold()
        call_id = self._id(role, method)
        named = {"call": call_id} if role in self._recipe.mesh_nodes else {}
        self._dispatch.submit(call_id, role, method, {**(args or {}), **named}, ranks, deadline_s=self._step_s)
        return Pending(self._dispatch, call_id)

    def admit(self, step: int) -> int:
        """See `Steering.admit`. Steps that may be generated ahead are admitted too."""
        self._ordinal += 1
        ahead = self._recipe.schedule.staleness
        self._steps = {known: what for known, what in self._steps.items() if known >= step and ahead}
        for one in range(step, max(step, min(step + ahead, self.total_steps)) + 1):
            if one in self._steps:
                continue
            self._steps[one] = _Admitted()
            call_id = f"{one}/ahead/prompts.admit" if ahead else self._id("prompts", "admit")
            self._admit_part(one, self._recipe.data.prompts_per_step, call_id)
            self._used_through = one
        return self._steps[step].samples

    def wait_batch(self, step: int) -> int:
        """See `Steering.wait_batch`. With dynamic sampling, other prompts come for groups that were dropped."""
        if step <= self._logged_step:  # before a crash: the batch is in the log, the rows are the actor's
            for number, count in enumerate(self._logged_prompts(step)[1:], 1):
                self._refill(step, number, count)
            return 0
        counts = self._wait_step(step)
        for number in range(1, self._recipe.algorithm.most_refills + 1 if self._dynamic else 1):
            call_id, of = f"{step}/refill-{number}/prompts.missing", {"step": step}
            missing = self._dispatch.call(call_id, "prompts", "missing", of, deadline_s=self._step_s)
            count = int(missing[0].value["groups"])
            if count == 0 or self._refill(step, number, count) == 0:
                break
            counts = self._wait_step(step)
        ready = counts.ready.get("actor", 0) + counts.leased.get("actor", 0)
        if ready == 0 and counts.live == 0:
            self._nothing_to_train(step)
        return ready

    def form(self, step: int, *, update: bool = True) -> None:
        """See `Steering.form`."""
        self._until_formed("form", {"step": step, "update": update, **self._taken})

    def train(self, step: int) -> None:
        """See `Steering.train`; where others learn from the step too, it is formed first."""
        if self._beside:
            self.form(step)
            self.train_both(step)
        else:
            self._train_actor(step)

    @property
    def _beside(self) -> list[str]:
        """Roles that learn from what the actor logs."""
        return [role for role in learners(self._recipe) if role in self._state.workers]

    @property
    def _taken(self) -> dict[str, list[int]]:
        """How many prompts the step took, at first and by each refill; the batch log keeps it."""
        return {"prompts": [part["count"] for part in self._parts]} if self._dynamic else {}

    @property
    def _parts(self) -> list[dict[str, int]]:
        """Of the open step."""
        return self._steps.get(self.open_step, _Admitted()).parts

    def _train_actor(self, step: int) -> None:
        self.last_train = self._until_formed("train", {"step": step, **self._taken})
        prompts = self._taken.get("prompts", [])
        admitted = self._steps.get(step, _Admitted())
        filtered = admitted.samples - admitted.greedy - self.last_train["samples"]
        self._line.add({**self.last_train, "filtered": filtered})
        if prompts:
            dropped = sum(prompts) - self.last_train["groups"]
            self._line.add({"refills": len(prompts) - 1, "groups_dropped": dropped})

    def train_both(self, step: int) -> None:
        """See `Steering.train_both`."""
        pending = [(role, self.submit(role, "train", {"step": step})) for role in self._beside]
        self._train_actor(step)
        for role, future in pending:
            figures = future.wait()[0]
            for _ in range(_FORM_ATTEMPTS):  # the log has the step again since the actor has trained it
                if not figures.get("again"):
                    break
                figures = self._again(role, "train", {"step": step})[0].value
            self.last_train = {**self.last_train, **figures}
            self._line.add(figures)

    def _until_formed(self, method: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """The actor's answer; while the server has lost rows of the step, they are put again."""
        answer = self.call("actor", method, args)[0]
        while answer.get("again"):
            self._admit_again("admit", args["step"])
            self.wait_batch(args["step"])
            answer = self._again("actor", method, args)[0].value
        return answer

    def publish(self, version: int) -> None:
        """See `Steering.publish`; after a restart, an older version than the log has means the newest one."""
        exact = self._recipe.deterministic and self._recipe.schedule.staleness > 0
        version = max(version, self.open_step - 1, 0 if exact else self._logged_step)
        began = time.monotonic()
        if exact:  # which weights generate a row must not be a matter of time
            self._pass(version + self._recipe.schedule.staleness, "rollout", None)
        self._dispatch.hold()
        self._weights.want(version)
        self._weights.bring_up_to_date()
        POLICY_VERSION.set(self.policy_version)
        if self._line.open:
            self._line.end(version, time.monotonic() - began)

    def evaluate(self, step: int) -> None:
        """See `Steering.evaluate`."""
        every = int(self._setting("evaluate.every_steps"))
        due = step in (0, self.total_steps) or (every > 0 and step % every == 0)
        if self._recipe.data.eval is None or not due:
            return
        finished = self._dispatch.finished(self._id("recorder", "evaluate", after=2))
        if step == 0 and self.open_step > 1 and not finished:
            return  # the untrained weights are gone
        began = time.monotonic()
        [admitted] = self.call("prompts", "admit_eval", {"step": step})
        samples = int(admitted["samples"])
        if not finished:
            self._wait_rows(Interest(EVAL, "evaluation", rows=samples, or_settled=True), "admit_eval", step)
        [result] = self.call("recorder", "evaluate", {"step": step, "samples": samples})
        self.evaluations[step] = result
        self._trackers.log({"kind": "eval", "step": step, "seconds": time.monotonic() - began, **result})
        self._log.info("evaluation", step=step, **{n: s["reward_mean"] for n, s in result["sets"].items()})
        self._keep_best(step, result)

    def checkpoint(self, step: int) -> None:
        """See `Steering.checkpoint`."""
        every = int(self._setting("checkpoint.every_steps"))
        if step == self.total_steps or (every > 0 and step % every == 0):
            self._save(step)

    # -- for loops that are scripts ------------------------------------------------------------------------

    def passed(self, stage: str, timeout_s: float | None = None) -> None:
        """Wait until no live row of the train table is before this stage, or in it.

        Raises:
            DeadlineExceeded: after `timeout_s`, or `deadlines.step_s` without progress; who has the rows is named.
        """
        if self.open_step > self._logged_step:
            self._pass(self.open_step, stage, timeout_s)

    def _pass(self, step: int, stage: str, timeout_s: float | None) -> None:
        began, seen, table = time.monotonic(), None, self._recipe.table_of(step)
        self._dispatch.moved()
        while left := self._before(counts := self._store.counts(table), stage):
            if timeout_s is not None and time.monotonic() - began >= timeout_s:
                raise self._too_late(table, stage, left, timeout_s)
            if counts != seen:
                self._dispatch.moved()
                seen = counts
            self._generate_on_actor(counts)
            self._meshes.work(counts, self.open_step)
            self._dispatch.waits(f"stage {stage} in table {table}", [stage], deadline_s=self._step_s)
            self._pump(table, stage, itself=True)
            self._dispatch.sleep(_LOOK_S / 5)
            self._weights.bring_up_to_date()
        self._dispatch.waits()

    @staticmethod
    def _before(counts: TableCounts, stage: str) -> int:
        return sum(rows.get(stage, 0) for rows in (counts.waiting, counts.ready, counts.leased))

    def _too_late(self, table: str, stage: str, left: int, timeout_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"rows of step {self.open_step} at stage {stage}",
            got=f"{left} not done after {timeout_s:g} s: {self._late(table, stage, itself=True)}",
            expected="all of them",
            remedy="Read the log of who is named, or give it more workers or time",
        )

    def _pump(self, table: str, stage: str, *, itself: bool = False) -> None:
        """Take in what arrived; a deadline that is over names who has the rows."""
        try:
            self._dispatch.pump()
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}. {self._late(table, stage, itself=itself)}") from error

    def _late(self, table: str, stage: str, *, itself: bool) -> str:
        return late_rows(self._recipe, self._store, plan.present(self._state), table, stage, itself=itself)

    def note(self, figures: Mapping[str, Any]) -> None:
        """Add figures to the open step's line of metrics; what the line has already stays."""
        self._line.note(figures)

    def figures(self, step: int) -> dict[str, Any]:
        """The metrics of a step that has ended; {} where there are none."""
        return line_of(self._run.metrics, step)

    # -- parts ---------------------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        protect = [int(self.best["step"])] if self.best else []
        trainers = [role for role in (*self._beside, "actor") if role in self._state.workers]
        for pending in [self.submit(role, "checkpoint", {"step": step, "protect": protect}) for role in trainers]:
            pending.wait()
        self._saved_step = step

    def _keep_best(self, step: int, result: dict[str, Any]) -> None:
        """The best checkpoint is kept: a better evaluation than ever before saves one.

        The record tells what was best before the step, so that a redo of it decides the same.
        """
        before, reward = self.best, result["reward_mean"]
        if reward is None or (before is not None and before["reward_mean"] >= reward):
            return
        self.best = {"step": step, "reward_mean": reward}
        earlier = None if before is None else {**before, "before": None}
        self._calls.note(_BEST, {**self.best, "before": earlier}, epoch=self._dispatch.epoch)
        if step > 0:
            self._save(step)

    def _setting(self, key: str) -> float:
        """What an operator set for the open step, else the recipe's value."""
        found = plan.setting(self._dispatch.state, key, self.open_step)
        block, name = key.split(".")
        return found if found is not None else float(getattr(getattr(self._recipe, block), name))

    @property
    def _step_s(self) -> float:
        return self._setting("deadlines.step_s")

    @property
    def _state(self) -> plan.State:
        return self._dispatch.state

    @property
    def policy_version(self) -> int:
        """The version that rollout workers serve."""
        return self._weights.version

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second of the newest finished step."""
        return self._line.newest.get("tokens_per_s")

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the newest step's pace."""
        pace = self._line.newest.get("step_s")
        return None if pace is None else round(pace * (self.total_steps - self.open_step + 1), 1)

    def _id(self, role: str, method: str, *, after: int = 0) -> str:
        """Id of the newest call of this place, or of the one that comes `after` it."""
        return f"{self._place}/{self._ordinal + after}/{role}.{method}"

    def _again(self, role: str, method: str, args: Mapping[str, Any]) -> list[CallResult]:
        """A call that the loop does not make each time: its id does not count among the step's."""
        self._repeats += 1
        call_id = f"{args['step']}/again-{self._dispatch.epoch}-{self._repeats}/{role}.{method}"
        return self._dispatch.call(call_id, role, method, args, deadline_s=self._step_s)

    def _admit_again(self, method: str, step: int) -> None:
        """A server that was started again may have come back older: rows that it lost are put again."""
        self._server = self._store.server_id()
        self._log.warning("the server was started again", step=step)
        admitted = [part for one in self._steps.values() for part in one.parts]
        for args in admitted if method == "admit" else [{"step": step}]:
            self._again("prompts", method, args)

    @property
    def _dynamic(self) -> bool:
        return self._recipe.algorithm.dynamic_sampling

    def _find_place(self) -> None:
        """Where the open step's prompts begin: the batch log knows how many each step took."""
        before, per_step = range(1, self.open_step), self._recipe.data.prompts_per_step
        taken = dict.fromkeys(before, per_step)
        if self._dynamic:
            log = FileBatchLog(self._run.batch_log)
            taken |= {one.step: sum(one.prompts) for one in log.entries() if one.step in before and one.prompts}
        self._used_prompts, self._used_through = sum(taken.values()), self.open_step - 1

    def _logged_prompts(self, step: int) -> tuple[int, ...]:
        log = FileBatchLog(self._run.batch_log)
        return next((one.prompts for one in log.entries(step - 1) if one.step == step), ())

    def _refill(self, step: int, number: int, count: int) -> int:
        """Admit more prompts to the step, if this one has not been already; how many there were."""
        if number < len(self._parts):
            return self._parts[number]["count"]
        return self._admit_part(step, count, f"{step}/refill-{number}/prompts.admit")

    def _admit_part(self, step: int, count: int, call_id: str) -> int:
        """Admit the next prompts of the order."""
        args, admitted = {"step": step}, self._steps[step]
        if self._dynamic:
            after = sum(part["count"] for part in admitted.parts)
            args |= {"first": self._used_prompts, "count": count, "after": after}
        [result] = self._dispatch.call(call_id, "prompts", "admit", args, deadline_s=self._step_s)
        value = result.value
        found = int(value.get("prompts", count))
        admitted.parts.append({**args, "count": found} if self._dynamic else args)
        self._used_prompts += found
        admitted.samples += int(value["samples"])
        admitted.greedy += int(value.get("greedy", 0))
        return found

    def _wait_step(self, step: int) -> TableCounts:
        rows = self._steps.get(step, _Admitted()).samples
        interest = Interest(self._recipe.table_of(step), "actor", rows=rows, or_settled=True)
        return self._wait_rows(interest, "admit", step)

    def _wait_rows(self, interest: Interest, admit: str, step: int) -> TableCounts:
        """Wait for rows, without polling; meanwhile workers that came back receive the weights."""
        what = f"{interest.rows} rows of stage {interest.stage} in table {interest.table}"
        seen: TableCounts | None = None
        self._dispatch.moved()
        while True:
            counts = self._store.counts(interest.table)
            if self._store.server_id() != self._server:
                self._admit_again(admit, step)
                continue
            if counts.ready.get(interest.stage, 0) >= interest.rows or self._settled(counts, interest.stage):
                self._dispatch.waits()
                return counts
            if counts != seen:
                self._dispatch.moved()
                seen = counts
            self._generate_on_actor(counts)
            self._meshes.work(counts, self.open_step)
            busy = [name for name in counts.ready if counts.ready[name] or counts.leased.get(name)]
            on = [name for name in busy if name not in (interest.stage, "recorder")]
            self._dispatch.waits(what, on, deadline_s=self._step_s)
            interests = [interest, *self._meshes.interests(interest.table)]
            self._store.wait(interests, timeout_s=_LOOK_S, wake_fd=self._dispatch.bus.wake.fd)
            self._pump(interest.table, interest.stage)
            self._dispatch.hold()
            self._weights.bring_up_to_date()

    def _generate_on_actor(self, counts: TableCounts) -> None:
        """The ranks of a hybrid actor generate what is ready; rows that come back are seen at the next look.

        Raises:
            DependencyError: they cannot switch.
        """
        if not self._recipe.placement.actor.hybrid or not counts.ready.get("rollout", 0):
            return
        self._repeats += 1
        call_id = f"{self._place}/generate-{self._dispatch.epoch}-{self._repeats}/actor.generate"
        args = {"version": self._weights.version, "number": [self._dispatch.epoch, self._repeats]}
        [answer, *_] = _values(self._dispatch.call(call_id, "actor", "generate", args, deadline_s=self._step_s))
        if "failed" in answer:
            raise DependencyError("generation on the actor's ranks", got=answer["failed"])
        if answer.get("version", 0) > self._weights.version:  # the records are older than its checkpoint
            self._weights.want(answer["version"])
        self._log.info("generated", **answer)

    @staticmethod
    def _settled(counts: TableCounts, stage: str) -> bool:
        """No live row can still become ready: all of them are."""
        return counts.ready.get(stage, 0) + counts.leased.get(stage, 0) >= counts.live

    def _nothing_to_train(self, step: int) -> None:
        results: list[CallResult] = []
        for role in ("reward", *(node.name for node in self._recipe.nodes)):
            call_id = f"{step}/failures-{self._dispatch.epoch}/{role}.failures"
            results += self._dispatch.call(call_id, role, "failures", {}, deadline_s=self._step_s)
        reasons = [str(r.value["last"]) for r in results if r.value.get("last")]
        if self._dynamic and (len(self._parts) > 1 or not reasons):
            groups = sum(part["count"] for part in self._parts)
            what = "equal ones or no verdict" if reasons else "equal ones"
            last = f"; last failure: {reasons[-1]}" if reasons else ""
            raise UsageError(
                f"rewards of step {step}",
                got=f"{what} in all {groups} groups, after {len(self._parts) - 1} refills{last}",
                expected="a group whose rewards differ",
                remedy="Raise algorithm.most_refills or group_size, or take easier or harder data",
            )
        raise UsageError(
            f"rewards of step {step}",
            got="no verdict for any sample" + (f"; last failure: {reasons[-1]}" if reasons else ""),
            expected="a number for some samples",
            remedy="Correct the function; the same command goes on with this step",
        )
