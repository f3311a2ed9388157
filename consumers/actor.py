"""The actor role: a deterministic state machine over the batch log, which trains the policy and sends it out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rlmq.buffer.batch_log import BatchEntry, Update
from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.buffer.store import Claim, ExperienceStore, Interest, TableCounts
from rlmq.buffer.tables import TRAIN
from rlmq.common.algorithms import algorithm_of
from rlmq.common.algorithms.metric_sums import merge_sums, metric_means
from rlmq.common.determinism import require_same_environment
from rlmq.common.engines.micro_batches import build_micro_batch
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import MicroBatch, StepStats
from rlmq.common.errors import DeadlineExceeded, Fenced, IntegrityError, RlmqError, UsageError
from rlmq.common.gloo import GlooTransport
from rlmq.common.metrics import POLICY_VERSION, WEIGHT_SYNC_BYTES, WEIGHT_SYNC_SECONDS
from rlmq.common.models import load_model, load_tokenizer, pad_id, resolve_model
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.weights import Rendezvous, WeightManifest
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.common.worker_loop import raise_if_stopping
from rlmq.consumers.batch import Batch, batch_columns, dealt, plan_step, read_batch
from rlmq.consumers.file_checkpoints import FileCheckpoints
from rlmq.consumers.logged_steps import LoggedSteps, ranges_of
from rlmq.consumers.mesh import meet
from rlmq.consumers.saved_steps import SavedSteps

_NO_ENTRY = b"\xc0"  # nil in msgpack


class ActorRole:
    """One trainer rank. All ranks run the same calls; rank 0 alone claims rows, logs, sends and saves.

    A step is a pure function of the weights before it and its batch-log entry: recovery loads the newest
    checkpoint and redoes the entries after it.
    """

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        require_same_environment(context)
        self._context = context
        self._store = store
        recipe = context.recipe
        self._recipe = recipe
        self._algorithm = algorithm_of(recipe, context.recipe_folder)
        self._checkpoints = FileCheckpoints(context.run.checkpoints)
        self._model_folder = resolve_model(recipe.model, context.recipe_folder)
        self._tokenizer = load_tokenizer(self._model_folder)
        self._mesh = meet(
            context.calls,
            rank=context.rank,
            size=context.world_size,
            incarnation=context.incarnation,
            timeout_s=recipe.deadlines.step_s,
        )
        self._transport = GlooTransport(timeout_s=recipe.deadlines.sync_s)
        self._log = LoggedSteps(
            store, FileBatchLog(context.run.batch_log), self._read, exact=recipe.deterministic, events=context.log
        )
        self._trained = 0
        self._whole = True  # false in the middle of a step that has several updates
        self._protect: frozenset[int] | None = None
        self._metrics: dict[str, Any] = {}
        self._engine = self._restored()
        self._saved = SavedSteps(self._engine, self._trained, self._committed, context.log)
        if context.rank == 0:
            self._log.tell_durable(self._trained)
            self._log.cut_back(self._trained)

    def _restored(self) -> TorchEngine:
        """The engine at the newest checkpoint, or at the recipe's model."""
        with self._checkpoints.reading_newest() as newest:
            folder = self._model_folder if newest is None else str(newest[0])
            model = load_model(folder, torch.float32)
            engine = TorchEngine(
                model, self._recipe.train, temperature=self._recipe.rollout.temperature, group=self._mesh.group
            )
            if newest is not None:
                path, manifest = newest
                engine.load_state(self._checkpoints.optimizer_state(path))
                self._trained, self._metrics = manifest.step, manifest.figures
                self._context.log.info("restored", checkpoint=str(path), step=manifest.step)
        return engine

    def handlers(self) -> Mapping[str, CallHandler]:
        """`train`, `offer`, `send_weights`, `checkpoint`, `settle`."""
        return {
            "train": self._train,
            "offer": self._offer,
            "send_weights": self._send_weights,
            "checkpoint": self._checkpoint,
            "settle": self._settle,
        }

    def work(self) -> bool:
        """The actor's row work is commanded: nothing to do by itself."""
        return False

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a call comes."""
        self._context.waits("a call")
        self._saved.settle()
        if self._saved.writing:
            self._context.activity("checkpointing")
        self._store.wait([], timeout_s=timeout_s, wake_fd=wake_fd)

    def close(self) -> None:
        """Save what was trained since the last checkpoint."""
        self._saved.settle(wait=True)
        if self._whole and self._context.rank == 0:
            self._save()

    # -- training ------------------------------------------------------------------------------------------

    def _train(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Train one step: redo it if it is in the log, else claim its batch, log it, and train.

        Returns:
            Figures; or `again`: the server was started again, its rows must be seen to first.
        """
        step = int(args["step"])
        self._saved.settle()
        self._catch_up(step - 1)
        if self._trained < step and not self._advance(step):
            return {"again": True}
        return {**self._metrics, **self._saved.take_figures()}

    def _catch_up(self, step: int) -> None:
        """Redo logged steps up to `step`."""
        while self._trained < step:
            self._context.log.info("redo", step=self._trained + 1)
            self._advance(self._trained + 1, redo=True)

    def _advance(self, step: int, *, redo: bool = False) -> bool:
        """Train a step; False when there is no batch to rely on."""
        self._context.activity("training")
        began = time.monotonic()
        found = self._entry(step, redo=redo)
        if found is None:
            return False
        entry, batch = found
        micro_batches = [self._micro_batches(batch, update) for update in entry.updates]
        self._add_old_logprobs(micro_batches)
        parts, stats = self._update_all(entry, micro_batches)
        self._trained, self._whole = step, True
        POLICY_VERSION.set(step)
        self._metrics = self._describe(entry, batch, parts, stats, time.monotonic() - began)
        return True

    def _entry(self, step: int, *, redo: bool) -> tuple[BatchEntry, Batch] | None:
        """The step's entry and rows, the same on every rank; a new entry is in the log before it is used."""
        own = self._found(step, redo=redo) if self._context.rank == 0 else None
        encoded = self._mesh.broadcast(_NO_ENTRY if own is None else msgspec.msgpack.encode(own[0]))
        if encoded == _NO_ENTRY:
            return None
        return own or self._with_rows(msgspec.msgpack.decode(encoded, type=BatchEntry))

    def _found(self, step: int, *, redo: bool) -> tuple[BatchEntry, Batch] | None:
        """What the log has of the step, or a new batch."""
        logged = self._log.find(step)
        if logged is None and redo:
            raise IntegrityError(f"batch log {self._context.run.batch_log}", got=f"no entry of step {step}")
        if logged is None:
            return self._form(step)
        found = self._with_rows(self._for_this_mesh(logged))
        self._log.tell(logged)
        return found

    def _for_this_mesh(self, entry: BatchEntry) -> BatchEntry:
        logged = len(entry.updates[0].micro_batches)
        if self._recipe.deterministic and logged != self._mesh.size:
            raise UsageError(
                f"placement.actor.workers, step {entry.step}",
                got=f"{self._mesh.size} ranks",
                expected=f"the {logged} that the batch log was written with, for the same bits",
            )
        return dealt(entry, self._mesh.size)

    def _form(self, step: int) -> tuple[BatchEntry, Batch] | None:
        """Claim every live row, compute advantages, log the step, and end the rows as trained."""
        claim = self._claim_all(step)
        if claim is None:
            return None
        batch = read_batch(claim.rows, self._algorithm, self._log.state_before(step))
        entry = plan_step(
            batch,
            claim.ranges,
            step=step,
            recipe=self._recipe,
            algorithm=self._algorithm,
            world_size=self._mesh.size,
        )
        try:  # before the log, since a redo of the step does not write them
            self._store.write(claim, batch.actor_columns())
        except Fenced as error:
            self._context.log.warning("actor.lease_lost", step=step, error=str(error))
            return self._form(step)
        with self._saved.waiting():
            self._log.append(entry)
        try:
            self._store.finish(claim, "trained", step=step)
        except Fenced as error:  # the lease ran out, but the log has the step: what it says counts
            self._context.log.warning("actor.lease_lost", step=step, error=str(error))
            if self._log.held(entry):
                self._log.tell(entry)
        self._store.set_version(TRAIN, entry.policy_version)
        return entry, batch

    def _claim_all(self, step: int) -> Claim | None:
        """All live rows at once; None when the server was started again since the last look.

        Rows that a killed actor had claimed come back when its lease expires.
        """
        seen: TableCounts | None = None
        moved_at = time.monotonic()
        while time.monotonic() - moved_at < self._recipe.deadlines.step_s:
            self._store.expire()
            counts = self._store.counts(TRAIN)
            if counts != seen:  # rows move on
                seen, moved_at = counts, time.monotonic()
            rows, claim = counts.live, None
            if rows and counts.ready.get("actor", 0) == rows:
                claim = self._store.claim(TRAIN, "actor", max_rows=rows, min_rows=rows, columns=self._columns())
            if self._log.server_is_another():
                self._make_good(claim)
                return None
            if claim is not None:
                return claim
            raise_if_stopping(self._context)
            self._context.waits(f"{rows} rows of stage actor in table {TRAIN}")
            self._store.wait([Interest(TRAIN, "actor", rows=rows)] if rows else [], timeout_s=1.0)
        raise DeadlineExceeded(
            f"batch of step {step}",
            got=f"{counts.ready.get('actor', 0)} of {counts.live} rows ready; leased: {dict(counts.leased)}",
            expected="all of them",
        )

    def _make_good(self, claim: Claim | None) -> None:
        """A server that was started again may have come back older.

        Among its rows may be some that are trained, it may lack some of this step, and some that a redo would need.
        So what is trained is made durable, and told again.
        """
        self._context.log.warning("the server was started again", trained=self._trained)
        if claim is not None:
            self._store.release(claim)
        self._save()
        self._log.tell_durable(self._trained)

    def _with_rows(self, entry: BatchEntry) -> tuple[BatchEntry, Batch]:
        return entry, self._read(entry)

    def _read(self, entry: BatchEntry) -> Batch:
        """The rows of a logged step; their payload is held until a checkpoint covers them."""
        rows = self._store.read(TRAIN, ranges_of(entry), self._columns())
        whole = not any(column.null_count for column in rows.columns)
        batch = read_batch(rows, self._algorithm, self._log.state_before(entry.step)) if whole else None
        if batch is None or tuple(batch.ids) != entry.rows:
            raise IntegrityError(
                f"rows of step {entry.step}",
                got=f"{rows.num_rows} rows that are not those of the batch log",
                expected=f"the {len(entry.rows)} logged ones",
                remedy="Restore the run's Redis data, or start anew with --fresh",
            )
        return batch

    def _columns(self) -> tuple[str, ...]:
        return batch_columns(self._algorithm)

    def _micro_batches(self, batch: Batch, update: Update) -> list[MicroBatch]:
        """This rank's share of an update as rectangles."""
        return [self._rectangle(batch, rows) for rows in update.micro_batches[self._context.rank]]

    def _rectangle(self, batch: Batch, rows: Sequence[int]) -> MicroBatch:
        columns = {name: [values[i] for i in rows] for name, values in batch.ragged().items()}
        return build_micro_batch(
            [batch.prompts[i] for i in rows],
            [batch.responses[i] for i in rows],
            [batch.loss_masks[i] for i in rows],
            columns,
            pad_id=pad_id(self._tokenizer),
        )

    def _add_old_logprobs(self, updates: Sequence[Sequence[MicroBatch]]) -> None:
        """With several updates on one batch, the ratio's denominator is the policy before the first."""
        if len(updates) == 1 or self._recipe.algorithm.old_logprobs == "rollout":
            return
        for micro_batches in updates:
            for micro in micro_batches:
                micro.columns["old_logprobs"] = self._engine.logprobs(micro).logprobs
                self._context.progress()

    def _update_all(
        self, entry: BatchEntry, updates: Sequence[Sequence[MicroBatch]]
    ) -> tuple[list[dict[str, float]], list[StepStats]]:
        """All optimizer steps of the entry; metric sums per update over all ranks."""
        parts: list[dict[str, float]] = []
        stats: list[StepStats] = []
        loss = partial(self._algorithm.loss, state=entry.state)
        for update, micro_batches in zip(entry.updates, updates, strict=True):
            sums = []
            for micro in micro_batches:
                raise_if_stopping(self._context)
                sums.append(self._engine.accumulate(micro, loss))
                self._context.progress()
            self._saved.before_change()
            self._whole = False
            stats.append(self._engine.step(update.denominators))
            everyone = self._mesh.gather(msgspec.msgpack.encode(merge_sums(sums)))
            total = merge_sums(msgspec.msgpack.decode(part, type=dict[str, float]) for part in everyone)
            parts.append(metric_means(total, update.denominators))
        return parts, stats

    def _describe(
        self,
        entry: BatchEntry,
        batch: Batch,
        parts: Sequence[Mapping[str, float]],
        stats: Sequence[StepStats],
        seconds: float,
    ) -> dict[str, Any]:
        """The step's metrics; those of the policy are means over its updates."""
        counted = batch.counted
        lengths = np.array([len(r) for r in batch.responses])
        tokens = {"tokens", "rows"}
        policy = {k: float(np.mean([p[k] for p in parts])) for k in parts[0] if k not in tokens}
        return {
            **policy,
            **entry.figures,
            **(_generated(entry, batch) if batch.versions else {}),
            "samples": len(batch.ids),
            "groups": len(set(batch.groups)),
            "trained_tokens": int(counted.sum()),
            "response_tokens_mean": float(lengths.mean()),
            "response_tokens_max": int(lengths.max()),
            "truncated_ratio": float(batch.truncated.mean()),
            "grad_norm": float(np.mean([s.grad_norm for s in stats])),
            "lr": stats[-1].lr,
            "train_s": round(seconds, 4),
        }

    # -- weights --------------------------------------------------------------------------------------------

    def _offer(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Be at the wanted version (all ranks), then open the meeting place (rank 0)."""
        self._catch_up(int(args["version"]))
        if self._context.rank != 0:
            return {}
        meeting = self._transport.offer(args["generation"], tuple(args["members"]))
        return {
            "meeting": msgspec.to_builtins(meeting),
            "manifest": msgspec.to_builtins(self._engine.layout()),
            "version": self._trained,
        }

    def _send_weights(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._context.activity("syncing")
        meeting = msgspec.convert(args["meeting"], Rendezvous)
        manifest = msgspec.convert(args["manifest"], WeightManifest)

        def gone(member: str) -> bool:
            """Whether the controller has given up the member's call to receive."""
            results = self._context.calls.results(args.get("receive", ""))
            return any(one.released and member == f"rollout-{one.rank}" for one in results)

        try:
            stats = self._transport.send(meeting, manifest, self._engine.shards(), gone)
        except RlmqError as error:  # a receiver's end, or an offer of an earlier incarnation, is not the trainer's
            return {"failed": str(error)}
        WEIGHT_SYNC_BYTES.labels(direction="sent").inc(stats.bytes)
        WEIGHT_SYNC_SECONDS.labels(direction="sent").observe(stats.seconds)
        return {"bytes": stats.bytes, "seconds": round(stats.seconds, 4)}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _checkpoint(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to write a checkpoint. Replicas are equal: rank 0 writes.

        One that fails is told by the next call, and made up for by the next checkpoint.
        """
        self._catch_up(int(args["step"]))
        if self._context.rank != 0:
            return {}
        self._context.activity("checkpointing")
        self._protect = frozenset(args["protect"])
        with self._saved.waiting():
            self._saved.begin(self._trained, self._saving())
        return {"step": self._trained}

    def _settle(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The run's last step has a checkpoint when this returns.

        Raises:
            DependencyError: it cannot be written.
        """
        self._catch_up(int(args["step"]))
        if self._context.rank == 0:
            with self._saved.waiting():
                self._save()
        return {"step": self._trained, **self._saved.take_figures()}

    def _save(self) -> None:
        self._context.activity("checkpointing")
        self._saved.save(self._trained, self._saving())

    def _saving(self) -> partial[Path]:
        """What writes the checkpoint of the step that is trained now."""
        return partial(
            self._checkpoints.save,
            model_folder=self._model_folder,
            rows=self._log.rows(self._saved.durable, self._trained),
            world_size=self._mesh.size,
            recipe_hash=recipe_hash(self._recipe),
            figures=self._metrics,
        )

    def _committed(self, step: int) -> None:
        self._store.advance(step)
        if self._protect is not None:
            self._checkpoints.prune(self._recipe.checkpoint.keep, self._protect)


def _generated(entry: BatchEntry, batch: Batch) -> dict[str, Any]:
    """Figures of rows that a policy generated."""
    oldest = np.array([min(v, default=entry.step - 1) for v in batch.versions])
    return {
        "reward_mean": float(batch.rewards.mean()),
        "reward_std": float(batch.rewards.std()),
        "generated_tokens": sum(len(response) for response in batch.responses),
        "staleness_mean": float((entry.step - 1 - oldest).mean()),
    }
