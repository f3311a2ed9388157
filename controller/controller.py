"""The controller: one process that steers a run and computes nothing."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from rlmq.buffer.store import ExperienceStore
from rlmq.common.algorithms import algorithm_of
from rlmq.common.calls import Calls
from rlmq.common.closing import Closing
from rlmq.common.critics import learners
from rlmq.common.errors import DeadlineExceeded, ExitCode, Fenced, Interrupted, RlmqError, Terminated
from rlmq.common.metrics import BUFFER_LIVE_ROWS, BUFFER_PAYLOAD_BYTES, BUFFER_ROWS
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.service import Service
from rlmq.controller import plan
from rlmq.controller.dispatch import EPOCH_LEASE_S, Dispatch
from rlmq.controller.steering import RunSteering
from rlmq.controller.trackers import Trackers

_PROGRESS_PERIOD_S = 0.5
_SHOWN = 12
_GATHER_S = 3.0
"""How long those that are not needed for the start are waited for, so that weights go to all of them at once."""


class Controller:
    """Steers one run from its open step to its end."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        store: ExperienceStore,
        calls: Calls,
        fingerprint: str,
        log: structlog.stdlib.BoundLogger,
        folder: Path,
    ) -> None:
        self._recipe = recipe
        self._folder = folder
        self._run = run
        self._store = store
        self._calls = calls
        self._fingerprint = fingerprint
        self._log = log
        self._service = Service()
        self._began = time.monotonic()
        self._progress_at = 0.0
        self._steering: RunSteering | None = None
        self._saved: dict[str, Any] = {}
        self._dispatch: Dispatch | None = None

    def main(self) -> int:
        """Run to the end; returns the exit code, which `summary.json` holds too.

        Raises:
            SecondController: another controller steers this run.
        """
        epoch = self._calls.begin_epoch(fingerprint=self._fingerprint, lease_s=EPOCH_LEASE_S)
        self._log.info("epoch", epoch=epoch)
        with Closing(self._log) as closing:
            closing.add(lambda: self._calls.end_epoch(epoch))
            return self._steer(epoch, closing)

    def _steer(self, epoch: int, closing: Closing) -> int:
        dispatch = Dispatch(self._recipe, self._run, self._calls, epoch, self._log, self._pumped)
        closing.add(dispatch.close)
        self._dispatch = dispatch
        self._arm_signals(dispatch)
        self._service.ready("steers the run")
        trackers = Trackers(self._recipe, self._run, self._log)
        closing.add(trackers.close)
        steering = RunSteering(self._recipe, self._run, dispatch, self._store, self._calls, trackers, self._log)
        failure: RlmqError | None = None
        try:  # after an unexpected error the workers are left to who started them
            try:
                self._follow_loop(dispatch, steering)
            except Fenced:  # another controller steers: nothing here is this one's to end
                raise
            except RlmqError as error:
                failure = error
                self._log.error("ended", exit_code=int(error.exit_code), error=str(error))
            if self._end(dispatch, steering, failure):
                failure = None
        except Fenced:
            raise
        except RlmqError as error:
            if failure is None:
                raise
            self._log.error("not ended well", error=str(error))
        if failure is not None:
            raise failure
        return ExitCode.OK

    def _follow_loop(self, dispatch: Dispatch, steering: RunSteering) -> None:
        self._await_workers(dispatch)
        steering.prepare()
        self._steering = steering
        algorithm_of(self._recipe, self._folder).loop(steering)

        def last(role: str, method: str, **args: int) -> dict[str, Any]:
            call_id = f"end/{dispatch.epoch}/{role}.{method}"
            return dispatch.call(call_id, role, method, args, deadline_s=self._recipe.deadlines.step_s)[0].value

        for role in (*learners(self._recipe), "actor"):
            if role in self._recipe.workers():
                self._saved = last(role, "settle", step=steering.open_step - 1)
        last("recorder", "flush")
        last("recorder", "report")

    def _end(self, dispatch: Dispatch, steering: RunSteering, failure: RlmqError | None) -> bool:
        """Dismiss the workers and tell how the run ended; whether it was asked to stop and did all that in time.

        The summary has the reason then; such a run goes on with the same command, although its exit code is 0.
        """
        code = int(failure.exit_code) if failure else int(ExitCode.OK)
        self._service.stopping()
        ended_by = steering.steps_end
        in_time = dispatch.dismiss(code, self._recipe.deadlines.drain_s) and isinstance(failure, Terminated)
        self._write_summary(steering, code, ended_by)
        self._write_progress(dispatch, force=True)
        dispatch.show(ended=0 if in_time else code)
        return in_time

    def _await_workers(self, dispatch: Dispatch) -> None:
        """Wait for the quorum of every role, and a moment for the others."""
        start_s = self._recipe.deadlines.start_s
        until = dispatch.now() + start_s
        while lacking := plan.lacking(dispatch.state):
            dispatch.waits("workers", lacking[:_SHOWN], until=until + 2.0)
            dispatch.pump()
            if dispatch.now() > until:
                raise DeadlineExceeded(
                    "start of the run",
                    got=f"no word from {plan.few(lacking)}",
                    expected=f"every worker within {start_s:.0f} s",
                    remedy="Start them (rlmq worker ROLE --index I RECIPE), or read their logs",
                )
            dispatch.sleep(0.5)
        until = dispatch.now() + _GATHER_S
        while (missing := plan.missing(dispatch.state)) and dispatch.now() < until:
            dispatch.waits("workers", missing[:_SHOWN], until=until + 2.0)
            dispatch.pump()
            dispatch.sleep(0.1)
        dispatch.waits()
        self._log.info("workers ready", seconds=round(time.monotonic() - self._began, 2), missing=missing)

    def _arm_signals(self, dispatch: Dispatch) -> None:
        def on_signal(number: int, _frame: FrameType | None) -> None:
            kind = Interrupted if number == signal.SIGINT else Terminated
            dispatch.stop(kind("run", got=signal.Signals(number).name, remedy="The same command goes on"))

        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)

    # -- what others see -----------------------------------------------------------------------------------

    def _pumped(self) -> None:
        self._service.alive()
        if self._dispatch is not None:
            self._write_progress(self._dispatch)

    def _write_progress(self, dispatch: Dispatch, *, force: bool = False) -> None:
        """Rewrite `progress.json` at most twice a second, and the buffer's gauges with it."""
        now = time.monotonic()
        if not force and now - self._progress_at < _PROGRESS_PERIOD_S:
            return
        self._progress_at = now
        steering = self._steering
        rows = self._observe_buffer() if steering else 0
        last = steering.last_train if steering else {}
        done = steering.open_step - 1 if steering else 0
        total = dispatch.steps = steering.total_steps if steering else self._recipe.train.steps
        phase = dispatch.state.phase
        progress = {
            "phase": "starting" if steering is None and phase == "run" else phase,
            "step": done if phase == "stop" or steering is None else min(done + 1, total),
            "steps": total,
            "activity": {
                one.name: one.activity if one.ready else "starting" for one in plan.present(dispatch.state)
            },
            "policy_version": steering.policy_version if steering else 0,
            "buffer_rows": rows,
            "buffer_capacity": self._recipe.data.prompts_per_step * self._recipe.algorithm.group_size,
            "staleness": last.get("staleness_mean"),
            "reward_mean": last.get("reward_mean"),
            "tokens_per_s": steering.tokens_per_s if steering else None,
            "eta_s": steering.eta_s if steering else None,
        }
        _write_json(self._run.progress, progress)

    def _observe_buffer(self) -> int:
        live = 0
        for table in ("train", "eval"):
            counts = self._store.counts(table)
            live += counts.live
            BUFFER_LIVE_ROWS.labels(table=table).set(counts.live)
            BUFFER_PAYLOAD_BYTES.labels(table=table).set(counts.payload_bytes)
            for state, by_stage in (("ready", counts.ready), ("leased", counts.leased), ("acked", counts.acked)):
                for stage, number in by_stage.items():
                    BUFFER_ROWS.labels(table=table, stage=stage, state=state).set(number)
        return live

    def _write_summary(self, steering: RunSteering, code: int, ended_by: str) -> None:
        """`summary.json`: totals over all processes that ever worked on this run, from `metrics.jsonl`."""
        lines = _read_lines(self._run.metrics)
        train = {line["step"]: line for line in lines if line.get("kind") == "train"}
        evaluations = {line["step"]: line for line in lines if line.get("kind") == "eval"}
        steps = max(train, default=0)
        last_eval = max((s for s in evaluations if s > 0), default=None)
        summary = {
            "run_id": self._run.run_id,
            "eval_before": _rewards(evaluations.get(0)),
            "eval_after": _rewards(evaluations.get(last_eval) if last_eval else None),
            "eval_after_step": last_eval,
            "steps": steps,
            "steps_wanted": steering.total_steps,
            "steps_end": ended_by,
            "samples": sum(line.get("samples", 0) for line in train.values()),
            "generated_tokens": sum(line.get("generated_tokens", 0) for line in train.values()),
            "filtered": sum(line.get("filtered", 0) for line in train.values()),
            "prompts_skipped": steering.prompts.get("skipped", 0),
            "prompts_cut": steering.prompts.get("cut", 0),
            "wall_s": round(time.monotonic() - self._began, 2),
            "steps_wall_s": round(sum(line.get("step_s", 0.0) for line in train.values()), 3),
            "checkpoint_blocked_s": self._waited("checkpoint_blocked_s", train.values()),
            "checkpoint_s": self._waited("checkpoint_s", train.values()),
            "policy_version": steering.policy_version,
            "best": steering.best,
            "checkpoint": _newest_checkpoint(self._run.checkpoints),
            "exit": code,
        }
        _write_json(self._run.summary, summary)

    def _waited(self, figure: str, lines: Iterable[dict[str, Any]]) -> float:
        """Seconds over all steps, and after the last one."""
        return round(sum(float(line.get(figure, 0.0)) for line in (*lines, self._saved)), 3)


def _rewards(line: dict[str, Any] | None) -> dict[str, float] | None:
    """Mean reward by evaluation set."""
    return None if line is None else {name: s["reward_mean"] for name, s in line["sets"].items()}


def _newest_checkpoint(folder: Path) -> str | None:
    names = sorted(p.name for p in folder.glob("step-*")) if folder.is_dir() else []
    return str(folder / names[-1]) if names else None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace the file whole, so that a reader never sees half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1))
    temporary.replace(path)
