"""Whole runs without torch: `rlmq up`, controller, server, worker loop and recorder of the product, echo roles.

`python tests/faults/echo.py ARGUMENTS OF RLMQ`: the commands `up`, `controller` and `worker`, with roles that
answer at once and deterministically. A response is a function of the sample's id and of the weights; the "weights"
are a hash that takes in every row that was trained on. So the weights after a step say which rows made them, in
which order, once or twice, and whether a row was generated with the weights of another version; `weights_after`
computes them apart.

`ECHO` (JSON, an `Echo`) in the environment says where processes fail and how long work takes. They pass named
points, `who/phase`; the files `FOLDER/fired-N` say which failures have happened: each happens once.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa

from rlmq.buffer.batch_log import BatchEntry, LoggedRange, Update
from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.buffer.store import Claim, ExperienceStore, Facts, Interest, RowRange
from rlmq.buffer.tables import EVAL, TRAIN
from rlmq.common.columns import PROMPT_COLUMNS, ROLLOUT_COLUMNS, actor_columns, arrow_schema
from rlmq.common.errors import Fenced, UsageError
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.consumers.recorder import RecorderRole

RECIPE = Path(__file__).with_name("echo.yaml")
EVAL_PROMPTS = 4
FIRST_WEIGHTS = hashlib.sha256(b"echo").hexdigest()
_READ = ("sample_id", "group_id", "response_ids", "reward")


class FailAt(msgspec.Struct, forbid_unknown_fields=True):
    """Kill or stop the process `who`, or raise in it, when it passes `phase` for the `seq`-th time."""

    who: str
    phase: str
    seq: int = 1
    signal: Literal["KILL", "STOP", "RAISE", "USAGE"] = "KILL"


class Echo(msgspec.Struct, forbid_unknown_fields=True):
    """What the processes of a run are told.

    `work_s` is how long a unit of work takes, by role; `clock_s` shifts `time.time` of a process; `proxy` sends the
    named workers' links over `echo_bus.py`.
    """

    fail_at: list[FailAt] = []
    work_s: dict[str, float] = {}
    clock_s: dict[str, float] = {}
    proxy: bool = False


def settings() -> Echo:
    """Of this process."""
    return msgspec.json.decode(os.environ.get("ECHO", "{}"), type=Echo)


def responses(sample_ids: Sequence[str], weights: str) -> list[list[int]]:
    """What is generated with these weights."""
    digests = [hashlib.sha256(f"{weights}/{i}".encode()).digest() for i in sample_ids]
    return [[*digest[: 1 + digest[0] % 5]] for digest in digests]


def rewards(found: Sequence[Sequence[int]]) -> list[float]:
    """The score of each response."""
    return [sum(one) % 11 / 10 for one in found]


def trained(weights: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The weights that a batch makes of these."""
    facts = [[row["sample_id"], list(row["response_ids"]), row["reward"]] for row in rows]
    facts.sort()
    return hashlib.sha256(weights.encode() + msgspec.json.encode(facts)).hexdigest()


def weights_after(steps: int, prompts: int = 4, members: int = 4) -> str:
    """The weights at the end of an undisturbed run."""
    weights = FIRST_WEIGHTS
    for step in range(1, steps + 1):
        ids = [
            f"train-{step:06d}-{group:04d}-{member:02d}" for group in range(prompts) for member in range(members)
        ]
        found = responses(ids, weights)
        rows = zip(ids, found, rewards(found), strict=True)
        weights = trained(weights, [{"sample_id": i, "response_ids": r, "reward": s} for i, r, s in rows])
    return weights


class Points:
    """The named points of a process, and what happens at them."""

    def __init__(self, who: str, folder: Path) -> None:
        self._who = who
        self._folder = folder
        self._passed: Counter[str] = Counter()
        self._echo = settings()

    def reach(self, phase: str) -> None:
        """Pass a point; this may be the end of it."""
        self._passed[phase] += 1
        for number, fail in enumerate(self._echo.fail_at):
            if (fail.who, fail.phase, fail.seq) == (self._who, phase, self._passed[phase]) and self._first(number):
                if fail.signal in ("RAISE", "USAGE"):
                    kind = RuntimeError if fail.signal == "RAISE" else UsageError
                    raise kind(f"{self._who} was told to fail at {phase}")
                os.kill(os.getpid(), getattr(signal, f"SIG{fail.signal}"))

    def _first(self, number: int) -> bool:
        try:
            os.close(os.open(self._folder / f"fired-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class EchoRole:
    """What the echo roles share."""

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        self.context = context
        self.store = store
        self.points = Points(f"{context.role}-{context.rank}", context.run.path)
        self.points.reach("start")

    def handlers(self) -> Mapping[str, CallHandler]:
        """Methods by name, each with the points `before_NAME` and `after_NAME`."""
        return {name: self._passing(name) for name in self.methods}

    methods: tuple[str, ...] = ()

    def take_time(self) -> None:
        """As long as a unit of work takes, with progress."""
        end = time.monotonic() + settings().work_s.get(self.context.role, 0.0)
        while (left_s := end - time.monotonic()) > 0 and not self.context.stopping():
            time.sleep(min(0.05, left_s))
            self.context.progress()

    def _passing(self, name: str) -> CallHandler:
        def handle(args: Mapping[str, Any]) -> dict[str, Any]:
            self.points.reach(f"before_{name}")
            value: dict[str, Any] = getattr(self, name)(args)
            self.points.reach(f"after_{name}")
            return value

        return handle

    def work(self) -> bool:
        """No row work."""
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Until a call comes."""
        select.select([wake_fd], [], [], timeout_s)

    def close(self) -> None:
        """Nothing is held."""
        self.points.reach("close")


class Prompts(EchoRole):
    """Admits the grid."""

    methods = ("describe", "admit", "admit_eval")

    def describe(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"train_prompts": 4, "steps": None, "skipped": 0, "cut": 0, "eval": {"eval": EVAL_PROMPTS}}

    def admit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        recipe = self.context.recipe
        return self._put(TRAIN, args["step"], recipe.data.prompts_per_step, recipe.algorithm.group_size)

    def admit_eval(self, args: Mapping[str, Any]) -> dict[str, Any]:
        return self._put(EVAL, args["step"], EVAL_PROMPTS, 1)

    def _put(self, table: str, step: int, prompts: int, members: int) -> dict[str, Any]:
        rows = [
            {
                "sample_id": f"{table}-{step:06d}-{group:04d}-{member:02d}",
                "group_id": f"{table}-{step:06d}-{group:04d}",
                "step": step,
                "source": table,
                "prompt_ids": [group],
                "prompt_text": f"prompt {group}",
                "record": "{}",
            }
            for group in range(prompts)
            for member in range(members)
        ]
        most = self.context.recipe.rollout.batch_size_per_device
        chunks = [rows[first : first + most] for first in range(0, len(rows), most)]
        for number, chunk in enumerate(chunks):
            self.store.put(
                table,
                pa.RecordBatch.from_pylist(chunk, schema=arrow_schema(PROMPT_COLUMNS)),
                producer=f"prompts-{table}",
                sequence=step * 1000 + number,
                group_size=members,
                closes=number == len(chunks) - 1,
            )
            self.points.reach("after_put")
            self.context.progress()
        return {"samples": len(rows)}


class RowRole(EchoRole):
    """Claims rows of both tables; rows that somebody else got meanwhile are theirs."""

    stage = ""
    reads: tuple[str, ...] = ()

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        interests = [Interest(table, self.stage) for table in (EVAL, TRAIN)] if self.takes() else []
        self.store.wait(interests, timeout_s=timeout_s, wake_fd=wake_fd)

    def takes(self) -> bool:
        """Whether rows may be claimed now."""
        return True

    def work(self) -> bool:
        if not self.takes():
            return False
        for table in (EVAL, TRAIN):
            claim = self.store.claim(table, self.stage, max_rows=8, columns=self.reads)
            if claim is not None:
                self._work_on(claim)
                return True
        return False

    def _work_on(self, claim: Claim) -> None:
        self.context.activity("generating" if self.stage == "rollout" else "scoring")
        self.points.reach("after_claim")
        self.take_time()
        try:
            self.write(claim)
        except Fenced as error:
            self.context.log.warning("lease lost", error=str(error))
        self.context.progress()
        self.points.reach("after_write")

    def write(self, claim: Claim) -> None:
        """Write the stage's columns."""


class Rollout(RowRole):
    """Generates with the weights that it received."""

    stage, reads, methods = "rollout", ("sample_id",), ("receive_weights",)
    version, weights = -1, ""

    def takes(self) -> bool:
        desired = self.context.desired()
        return desired is not None and desired.policy_version == self.version

    def receive_weights(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.context.activity("syncing")
        self.take_time()
        self.version, self.weights = int(args["version"]), args["meeting"]["weights"]
        self.context.serving(self.version)
        return {"bytes": 64, "seconds": 0.0}

    def write(self, claim: Claim) -> None:
        found = responses(claim.rows["sample_id"].to_pylist(), self.weights)
        columns = {
            "response_ids": found,
            "response_text": [str(one) for one in found],
            "rollout_logprobs": [[0.0] * len(one) for one in found],
            "loss_mask": [[True] * len(one) for one in found],
            "policy_versions": [[self.version] * len(one) for one in found],
            "turns": [[0] * len(one) for one in found],
            "truncated": [False] * len(found),
        }
        batch = pa.RecordBatch.from_pydict(columns, schema=arrow_schema(ROLLOUT_COLUMNS))
        facts = Facts(version=self.version, tokens=[len(one) for one in found])
        self.store.write(claim, batch, ack=True, facts=facts)


class Reward(RowRole):
    """Scores."""

    stage, reads, methods = "reward", ("sample_id", "response_ids"), ("failures",)

    def failures(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"count": 0, "last": ""}

    def write(self, claim: Claim) -> None:
        values = pa.array(rewards(claim.rows["response_ids"].to_pylist()), pa.float64())
        nothing = pa.nulls(len(values), pa.string())
        names = ["reward", "reward.score", "reward_fields"]
        columns = pa.RecordBatch.from_arrays([values, values, nothing], names=names)
        self.store.write(claim, columns, ack=True)


class Actor(EchoRole):
    """A trainer of one rank: batch log, redo, checkpoints by one rename."""

    methods = ("train", "offer", "send_weights", "checkpoint", "settle")

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        self._log = FileBatchLog(context.run.batch_log)
        self._folder = context.run.checkpoints
        self._weights, self._step = FIRST_WEIGHTS, 0
        newest = sorted(self._folder.glob("step-*"))[-1:]
        for path in newest:
            self._weights, self._step = (path / "model.safetensors").read_text(), int(path.name[5:])
        super().__init__(context, store)

    def train(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._reach(int(args["step"]))
        return {"samples": self._rows, "reward_mean": 0.5, "generated_tokens": 64, "staleness_mean": 0.0}

    def offer(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._reach(int(args["version"]))
        return {"meeting": {"weights": self._weights}, "manifest": {}}

    def send_weights(self, _: Mapping[str, Any]) -> dict[str, Any]:
        self.context.activity("syncing")
        return {"bytes": 64, "seconds": 0.0}

    def checkpoint(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._reach(int(args["step"]))
        return {"step": self._save()}

    def close(self) -> None:
        self._save()
        super().close()

    def settle(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"step": self._step}

    _rows = 0

    def _reach(self, step: int) -> None:
        """Redo what is logged, claim what is not."""
        while self._step < step:
            self.context.activity("training")
            self._advance(self._step + 1)

    def _advance(self, step: int) -> None:
        entry = next((one for one in self._log.entries(step - 1) if one.step == step), None)
        if entry is not None:
            self.store.finish_logged(TRAIN, "actor", _ranges(entry), step=step)
            rows = self.store.read(TRAIN, _ranges(entry), _READ).to_pylist()
            self.take_time()
        else:
            claim = self._claim(step)
            rows = claim.rows.to_pylist()
            self.points.reach("after_claim")
            self.store.write(claim, _advantages(rows))  # before the log: a redo of the step does not write them
            self.points.reach("after_write")
            entry = _entry(step, rows, claim.ranges)
            self._log.append(entry)
            self.points.reach("after_log")
            self.take_time()
            self._finish(claim, entry)
            self.store.set_version(TRAIN, step)
            self.points.reach("after_finish")
        self._weights, self._step, self._rows = trained(self._weights, rows), step, len(rows)

    def _claim(self, step: int) -> Claim:
        """All rows of the step, once they are there and scored."""
        while True:
            self.store.expire()
            counts = self.store.counts(TRAIN)
            if counts.live and counts.ready.get("actor", 0) == counts.live:
                claim = self.store.claim(TRAIN, "actor", max_rows=counts.live, min_rows=counts.live, columns=_READ)
                if claim is not None:
                    return claim
            self.store.wait([Interest(TRAIN, "actor", rows=max(1, counts.live))], timeout_s=0.2)
            self.context.progress()

    def _finish(self, claim: Claim, entry: BatchEntry) -> None:
        try:
            self.store.finish(claim, "trained", step=entry.step)
        except Fenced:
            self.store.finish_logged(TRAIN, "actor", _ranges(entry), step=entry.step)

    def _save(self) -> int:
        """A checkpoint of what was trained, unless there is one."""
        step, done = self._step, max((int(path.name[5:]) for path in self._folder.glob("step-*")), default=0)
        if step > done:
            self.context.activity("checkpointing")
            rows = [row for entry in self._log.entries(done) if entry.step <= step for row in entry.rows]
            self._write(step, rows)
        self.store.advance(step)
        return step

    def _write(self, step: int, rows: Sequence[str]) -> None:
        unfinished = self._folder / f".step-{step:06d}.{os.getpid()}.part"
        unfinished.mkdir(parents=True)
        (unfinished / "model.safetensors").write_text(self._weights)
        self.points.reach("in_checkpoint")
        files = {"model.safetensors": hashlib.sha256(self._weights.encode()).hexdigest()}
        manifest = {"step": step, "policy_version": step, "rows": rows, "world_size": 1, "files": files}
        (unfinished / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        unfinished.rename(self._folder / f"step-{step:06d}")


class Recorder(RecorderRole):
    """The product's, without its drawing, and as slow as it is told."""

    def _record(self) -> int:
        time.sleep(settings().work_s.get("recorder", 0.0))
        return super()._record()

    def _report(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"curve": ""}


def _advantages(rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    columns = {"advantages": [[0.0] * len(row["response_ids"]) for row in rows]}
    return pa.RecordBatch.from_pydict(columns, schema=arrow_schema(actor_columns()))


def _ranges(entry: BatchEntry) -> list[RowRange]:
    return [RowRange(one.chunk, one.first, one.count, use=one.use) for one in entry.ranges]


def _entry(step: int, rows: Sequence[Mapping[str, Any]], ranges: Sequence[RowRange]) -> BatchEntry:
    plain = tuple(LoggedRange(one.chunk, one.first, one.count, one.use) for one in ranges)
    update = Update(micro_batches=((tuple(range(len(rows))),),), denominators=(1.0,))
    ids = tuple(row["sample_id"] for row in rows)
    return BatchEntry(step, step, ids, plain, (update,), (step - 1, step - 1), 7)


ROLES = {name.lower(): name for name in ("Prompts", "Rollout", "Reward", "Actor", "Recorder")}


def main() -> None:
    """The product's command line with these roles in its processes."""
    from faults import echo_patches

    echo_patches.apply(settings())
    from rlmq.cli import main as rlmq

    rlmq()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    main()
