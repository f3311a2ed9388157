"""Workers of the fault suite: small real processes without torch, that write down what they did.

`python tests/faults/workers.py ROLE CONFIG`: CONFIG is a `Config` as JSON. A worker prints one line when it is
ready, works until its standard input ends, and appends each fact to `FOLDER/NAME.jsonl` after the server has
answered (`putting` and the batch log come before: they say what may have happened). What it writes is a function
of the sample id, so that every reader can tell a right value from a wrong one.

A worker passes named points, its `PHASES`; `fail_at` makes it kill or stop itself at the n-th passage of one.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import Claim, Facts, Interest, RowRange, Stage, Table, VersionWindow
from rlmq.common.columns import Column
from rlmq.common.errors import Fenced, RlmqError, SchemaMismatch

RUN, TABLE = "faults", "train"
BATCH_LOG = "batches.jsonl"
TOKENS = pa.list_(pa.field("item", pa.int32()))
COLUMNS = (
    Column("sample_id", pa.string(), "prompts"),
    Column("prompt_text", pa.string(), "prompts"),
    Column("response_ids", TOKENS, "rollout"),
    Column("reward", pa.float64(), "reward"),
)
STAGES: dict[str, dict[str, Any]] = {
    "rollout": {"needs": ("prompt_text",), "scope": "chunk"},
    "reward": {"needs": ("response_ids",)},
    "actor": {"needs": ("reward",), "scope": "group"},
    "recorder": {"needs": (), "ended": True},
}
READS = {
    "rollout": ("sample_id", "prompt_text"),
    "reward": ("sample_id", "response_ids"),
    "actor": ("sample_id", "prompt_text", "response_ids", "reward"),
    "recorder": ("sample_id", "response_ids", "reward", "end_state", "end_reason", "end_step"),
}
PHASES = {
    "produce": ("before_put", "after_put"),
    "rollout": ("after_claim", "after_write", "after_ack"),
    "reward": ("after_claim", "after_write", "after_ack"),
    "actor": ("after_claim", "after_log", "after_finish", "after_checkpoint"),
    "recorder": ("after_claim", "after_record", "after_ack"),
}
Poison = Literal["raise", "kill", "hang", "shape", "type", "null"]


class FailAt(msgspec.Struct, forbid_unknown_fields=True):
    """Kill or stop this process when it passes `phase` for the `seq`-th time."""

    phase: str
    seq: int = 1
    signal: Literal["KILL", "STOP"] = "KILL"


class Config(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker is told. `table` is what differs from the table that `make_table` makes."""

    name: str
    folder: str
    url: str
    table: dict[str, Any] = {}
    fail_at: list[FailAt] = []
    chunks: int = 10
    first_chunk: int = 0
    chunk_rows: int = 16
    group_size: int = 4
    text_bytes: int = 0
    rows: int = 8
    write_then_ack: bool = False
    poison: dict[str, Poison] = {}
    checkpoint_every: int = 3
    closes: bool = False
    versioned: bool = False
    put_timeout_s: float = 60.0
    retry_s: float = 30.0


def make_table(spec: dict[str, Any]) -> Table:
    """The suite's table. `spec` holds arguments of `Table`, and under `stages` those of each `Stage`."""
    changes = spec.get("stages", {})
    spec = spec | ({"window": VersionWindow(**spec["window"])} if "window" in spec else {})
    stages = [Stage(name, **({"lease_s": 30.0} | given | changes.get(name, {}))) for name, given in STAGES.items()]
    return Table(TABLE, COLUMNS, tuple(stages), **{key: value for key, value in spec.items() if key != "stages"})


def chunk_ids(producer: str, sequence: int, rows: int) -> list[str]:
    """Sample ids of one chunk."""
    return [f"{producer}-{sequence:04d}-{k:02d}" for k in range(rows)]


def response_of(sample_id: str) -> list[int]:
    """What the rollout writes."""
    return [zlib.crc32(sample_id.encode()) % 50_000, len(sample_id)]


def reward_of(sample_id: str) -> float:
    """What the reward stage writes."""
    return response_of(sample_id)[0] % 11 / 10


class Journal:
    """Facts as JSON lines, each one appended by a single write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def add(self, did: str, **facts: Any) -> None:
        os.write(self._file, msgspec.json.encode({"did": did, **facts}) + b"\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The facts in a file, oldest first; none when there is no such file."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


class Worker:
    """A store, a journal, and the points at which this process may be told to fail."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.folder)
        self.journal = Journal(self.folder / f"{config.name}.jsonl")
        self.store = RedisStore(
            config.url, run_id=RUN, worker=config.name, put_timeout_s=config.put_timeout_s, retry_s=config.retry_s
        )
        self.store.open([make_table(config.table)])
        self.rows = config.rows
        self.version: int | None = None  # the trainer's, when it tells
        self._passed: dict[str, int] = {}
        self.journal.add("started", pid=os.getpid())

    def ready(self) -> None:
        print("ready", flush=True)

    def running(self) -> bool:
        """False once standard input has ended."""
        return not select.select([0], [], [], 0)[0]

    def sleep_until_end(self) -> None:
        select.select([0], [], [])

    def reach(self, phase: str) -> None:
        """Pass a point; die or stop here when the configuration says so."""
        self._passed[phase] = self._passed.get(phase, 0) + 1
        for fail in self.config.fail_at:
            if fail.phase == phase and fail.seq == self._passed[phase]:
                self.journal.add("failing", phase=phase, signal=fail.signal)
                os.kill(os.getpid(), signal.SIGKILL if fail.signal == "KILL" else signal.SIGSTOP)

    def claims(self, stage: str) -> Iterator[Claim]:
        """Claims of at most `rows` rows, until standard input ends."""
        while self.running():
            told = {} if self.version is None else {"version": self.version}
            claim = self.store.claim(TABLE, stage, max_rows=self.rows, columns=READS[stage], **told)
            if claim is None:
                self.store.wait([Interest(TABLE, stage)], timeout_s=5.0, wake_fd=0)
                continue
            rows = [[i, r.delivery, r.use] for i, r in zip(ids_of(claim), single_rows(claim), strict=True)]
            self.journal.add("claimed", stage=stage, lease=claim.lease, rows=rows)
            self.reach("after_claim")
            yield claim

    def under_lease(self, did: str, claim: Claim, call: Callable[[], None], **facts: Any) -> bool:
        """A verb under the claim's lease for `rows` (all of it), and what came of it; False: the lease was over."""
        try:
            call()
        except Fenced as error:
            self.journal.add("fenced", verb=did, stage=claim.stage, lease=claim.lease, error=str(error))
            return False
        self.journal.add(did, **({"stage": claim.stage, "lease": claim.lease, "rows": ids_of(claim)} | facts))
        return True

    def check(self, claim: Claim) -> None:
        """Note columns that are not what their writer writes."""
        wrong = wrong_values(claim.rows.to_pylist())
        if wrong:
            self.journal.add("wrong", stage=claim.stage, rows=wrong)


def ids_of(claim: Claim) -> list[str]:
    """Sample ids of the claimed rows, in order."""
    ids: list[str] = claim.rows["sample_id"].to_pylist()
    return ids


def single_rows(claim: Claim) -> list[RowRange]:
    """The claim's rows as ranges of one row."""
    return [RowRange(r.chunk, r.first + k, 1, r.delivery, r.use) for r in claim.ranges for k in range(r.count)]


def wrong_values(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Ids of rows in which a column that is there is not what its writer writes."""
    return [
        row["sample_id"]
        for row in rows
        if row.get("response_ids", None) not in (None, response_of(row["sample_id"]))
        or row.get("reward", None) not in (None, reward_of(row["sample_id"]))
    ]


# -- roles -------------------------------------------------------------------------------------------------------


def produce(worker: Worker) -> None:
    """Put chunks; ends by itself after the last one."""
    config = worker.config
    last = config.first_chunk + config.chunks - 1
    worker.ready()
    for sequence in range(config.first_chunk, last + 1):
        if not worker.running():
            return
        ids = chunk_ids(config.name, sequence, config.chunk_rows)
        texts = [f"{i} {'.' * config.text_bytes}" for i in ids]
        chunk = f"{config.name}.{sequence}"
        worker.journal.add("putting", chunk=chunk, rows=ids)
        worker.reach("before_put")
        new = worker.store.put(
            TABLE,
            pa.record_batch({"sample_id": ids, "prompt_text": texts}),
            producer=config.name,
            sequence=sequence,
            group_size=config.group_size,
            **({"closes": True} if config.closes and sequence == last else {}),
        )
        worker.journal.add("put", chunk=chunk, new=new)
        worker.reach("after_put")


def rollout(worker: Worker) -> None:
    """Write `response_ids`, chunk by chunk."""
    _transform(worker, "rollout", "response_ids", lambda ids: pa.array(map(response_of, ids), TOKENS))


def reward(worker: Worker) -> None:
    """Write `reward`, row by row."""
    _transform(worker, "reward", "reward", lambda ids: pa.array(map(reward_of, ids), pa.float64()))


def _transform(worker: Worker, stage: str, column: str, values: Callable[[list[str]], pa.Array]) -> None:
    """Rows that came back, or whose work raised, are worked on one by one: its other rows must not suffer."""
    worker.ready()
    for claim in worker.claims(stage):
        suspect = claim.ranges[0].delivery > 1
        if suspect and claim.count > 1 and STAGES[stage].get("scope") != "chunk":
            worker.rows = 1
            worker.under_lease("released", claim, partial(worker.store.release, claim))
            continue
        worker.check(claim)
        try:
            columns = _poisoned(worker, claim, pa.record_batch({column: values(ids_of(claim))}))
            null = [k for k, i in enumerate(ids_of(claim)) if worker.config.poison.get(i) == "null"]
            if null:
                finish = partial(worker.store.finish, claim, "filtered", "no verdict", rows=null)
                rows = [ids_of(claim)[k] for k in null]
                worker.under_lease("finished", claim, finish, rows=rows, state="filtered")
            if len(null) < claim.count:
                _write(worker, claim, columns)
            worker.rows = 1 if suspect else worker.config.rows
        except (ValueError, SchemaMismatch):
            reason = traceback.format_exc()
            if claim.count > 1:
                worker.rows = 1
                worker.under_lease("released", claim, partial(worker.store.release, claim))
            else:
                worker.under_lease("nacked", claim, partial(worker.store.nack, claim, reason), reason=reason)


def _write(worker: Worker, claim: Claim, columns: pa.RecordBatch) -> None:
    told: dict[str, Any] = {}
    if worker.config.versioned:
        told = {"facts": Facts(version=worker.store.counts(TABLE).version)}
    end = partial(worker.store.write, claim, columns, ack=True, **told)
    if worker.config.write_then_ack:
        if not worker.under_lease("wrote", claim, partial(worker.store.write, claim, columns)):
            return
        worker.reach("after_write")
        end = partial(worker.store.ack, claim)
    rows = [i for i in ids_of(claim) if worker.config.poison.get(i) != "null"]
    made_by = {"version": told["facts"].version} if told else {}
    if worker.under_lease("acked", claim, end, rows=rows, **made_by):
        worker.reach("after_ack")


def _poisoned(worker: Worker, claim: Claim, columns: pa.RecordBatch) -> pa.RecordBatch:
    """The columns, unless a row of the claim makes the work fail in its way."""
    for sample_id in ids_of(claim):
        how = worker.config.poison.get(sample_id)
        if how == "raise":
            raise ValueError(f"cannot work on {sample_id}")
        if how == "kill":
            worker.journal.add("failing", phase="poison", signal="KILL")
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            worker.journal.add("hanging", rows=[sample_id])
            worker.sleep_until_end()
        if how == "shape":
            return pa.record_batch([pa.concat_arrays([c, c]) for c in columns.columns], names=columns.schema.names)
        if how == "type":
            return pa.record_batch({name: ["text"] * claim.count for name in columns.schema.names})
    return columns


class BatchLog:
    """The trainer's batch log and its checkpoints: one JSON line each, synced before the caller goes on."""

    def __init__(self, path: Path) -> None:
        lines = read_journal(path)
        self.entries = {line["step"]: line for line in lines if line["did"] == "logged"}
        self.checkpoint = max((line["step"] for line in lines if line["did"] == "checkpoint"), default=-1)
        self._steps = {tuple(one): step for step, entry in self.entries.items() for one in entry["ranges"]}
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, rows: Sequence[str], ranges: Sequence[RowRange]) -> int:
        """Log the next step: rows and their ranges, one by one. Returns the step."""
        step = max(self.entries, default=-1) + 1
        plain = [[r.chunk, r.first, r.use] for r in ranges]
        entry = {"did": "logged", "step": step, "rows": list(rows), "ranges": plain}
        self._write(entry)
        self.entries[step] = entry
        self._steps |= {tuple(one): step for one in plain}
        return step

    def save_checkpoint(self, step: int) -> None:
        """All steps up to `step` are in a checkpoint."""
        self._write({"did": "checkpoint", "step": step})
        self.checkpoint = step

    def ranges(self, step: int) -> list[RowRange]:
        """What a step trained on."""
        return [RowRange(chunk, first, 1, 1, use) for chunk, first, use in self.entries[step]["ranges"]]

    def step_of(self, one: RowRange) -> int | None:
        """The step that trained on this row in this use."""
        return self._steps.get((one.chunk, one.first, one.use))

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")
        os.fsync(self._file)


def actor(worker: Worker) -> None:
    """Train: log a step, end its rows, and now and then a checkpoint. What the log has is never trained again."""
    log = BatchLog(worker.folder / BATCH_LOG)
    for step in log.entries:
        worker.store.finish_logged(TABLE, "actor", log.ranges(step), step=step)
    if log.checkpoint >= 0:
        worker.store.advance(log.checkpoint)
    _tell_version(worker, log)
    worker.ready()
    for claim in worker.claims("actor"):
        worker.check(claim)
        rows = single_rows(claim)
        fresh = [k for k, one in enumerate(rows) if log.step_of(one) is None]
        for step in {log.step_of(one) for one in rows} - {None}:  # the server is older than the log
            worker.store.finish_logged(TABLE, "actor", log.ranges(step), step=step)
        if not fresh:
            worker.under_lease("released", claim, partial(worker.store.release, claim))
            continue
        ids = [ids_of(claim)[k] for k in fresh]
        step = log.append(ids, [rows[k] for k in fresh])
        worker.reach("after_log")
        finish = partial(worker.store.finish, claim, "trained", step=step, rows=fresh)
        facts = {"rows": ids, "state": "trained", "step": step, "version": step}
        if not worker.under_lease("finished", claim, finish, **facts):
            worker.store.finish_logged(TABLE, "actor", log.ranges(step), step=step)
        worker.reach("after_finish")
        _tell_version(worker, log)
        if (step + 1) % worker.config.checkpoint_every == 0:
            log.save_checkpoint(step)
            worker.reach("after_checkpoint")
            worker.store.advance(step)


def _tell_version(worker: Worker, log: BatchLog) -> None:
    """Each step makes the next policy version."""
    if worker.config.versioned:
        worker.version = max(log.entries, default=-1) + 1
        worker.store.set_version(TABLE, worker.version)


def recorder(worker: Worker) -> None:
    """Write down how rows ended."""
    worker.ready()
    for claim in worker.claims("recorder"):
        worker.check(claim)
        ended = [row for row in claim.rows.to_pylist() if row["end_state"]]  # null: the server forgot that it ended
        ends = [[row[name] for name in ("sample_id", "end_state", "end_reason", "end_step")] for row in ended]
        worker.journal.add("recorded", rows=ends)
        worker.reach("after_record")
        if worker.under_lease("acked", claim, partial(worker.store.ack, claim)):
            worker.reach("after_ack")


ROLES = {role.__name__: role for role in (produce, rollout, reward, actor, recorder)}


def main() -> int:
    """Run one worker; an expected error is written down and becomes its exit code."""
    role, config = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Config)
    try:
        worker = Worker(config)
        ROLES[role](worker)
        worker.store.close()
    except RlmqError as error:
        facts = {"error": type(error).__name__, "text": str(error)}
        Journal(Path(config.folder) / f"{config.name}.jsonl").add("raised", **facts)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
