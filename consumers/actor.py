"""The actor role: a deterministic state machine over the batch log, which trains the policy and sends it out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rlmq.buffer.batch_log import BatchEntry, LoggedLoss, Update
from rlmq.buffer.response_scoring import ResponseScoring
from rlmq.buffer.store import Claim, ExperienceStore, Facts, Interest, TableCounts
from rlmq.buffer.tables import TRAIN
from rlmq.common.columns import REFERENCE_COLUMNS
from rlmq.common.engines.registry import TRAINING
from rlmq.common.engines.scoring import ScoringEngine, load_scorer, scorer_config
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import (
    LossFunction,
    LossTerms,
    MicroBatch,
    PolicyOutput,
    TrainingEngine,
    TrainingSettings,
)
from rlmq.common.errors import DeadlineExceeded, Fenced, IntegrityError, RlmqError
from rlmq.common.flow import flows_of
from rlmq.common.layouts.layout import MeshShape
from rlmq.common.layouts.part import WeightPart
from rlmq.common.layouts.weight_sync import WeightSender
from rlmq.common.metrics import POLICY_VERSION, WEIGHT_SYNC_BYTES, WEIGHT_SYNC_SECONDS
from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.weights import Rendezvous
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.common.worker_loop import raise_if_stopping
from rlmq.consumers.batch import Batch, batch_columns, plan_loss, plan_step, read_batch
from rlmq.consumers.fingerprints import Fingerprints
from rlmq.consumers.reward_figures import reward_figures
from rlmq.consumers.trainer import Found, Trainer, Work

if TYPE_CHECKING:
    from rlmq.common.engines.decoder_shape import Place


class ActorRole(Trainer[TrainingEngine]):
    """One trainer rank of the policy. Rank 0 alone claims rows and writes the batch log."""

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        super().__init__(context, store, context.recipe.model, context.run.checkpoints)
        self._sender = WeightSender(
            context.rank,
            self._mesh.size,
            delta=self._recipe.rollout.weight_sync == "delta",
            timeout_s=self._recipe.deadlines.sync_s,
        )
        self._reference = self._own_reference() if self._recipe.own_reference else None
        self._formed: Found | None = None
        self._earlier: tuple[int, WeightPart] | None = None
        self._prompts: tuple[int, ...] = ()
        self._fingerprints = Fingerprints(context.run.fingerprints)
        if context.rank == 0:
            if self._recipe.record.fingerprints and hasattr(self._engine, "watch"):
                self._engine.watch = self._fingerprints.watch
            self._agree_with_server()

    def _agree_with_server(self) -> None:
        """The server may have come back older than the checkpoint, or than the log."""
        self._tell_durable()
        self._log.cut_back(self._trained)

    def _shape(self) -> MeshShape:
        return self._recipe.placement.actor.mesh

    def _build(self, checkpoint: Path | None) -> TrainingEngine:
        placed, lora = self._recipe.placement.actor, self._recipe.train.lora
        folder = self._model_folder if checkpoint is None or lora.r is not None else checkpoint
        if self._algorithm.scorer:
            model = load_scorer(folder, pad_id=self._pad_id, seed=self._recipe.run.seed)
            self._config = scorer_config(model)
            return ScoringEngine(model, self._recipe.train, group=self._mesh.group)
        options = TRAINING.check(
            placed.strategy,
            placed.strategy_options,
            self._context.recipe_folder,
            deterministic=self._recipe.deterministic,
        )
        settings = TrainingSettings(
            model=str(folder),
            block=self._recipe.train,
            temperature=self._recipe.rollout.temperature,
            rank=self._context.rank,
            mesh=self._mesh.shape,
            group=self._mesh.group,
            part=self._mesh.part,
            generation=self._generation_places(),
            folder=self._context.recipe_folder,
            seed=self._recipe.run.seed,
            options=options,
        )
        engine: TrainingEngine = TRAINING.find(placed.strategy, self._context.recipe_folder)(settings)
        if isinstance(engine, TorchEngine) and engine.adapters is not None:
            self._adapter = {**engine.adapters.config(), "base_model_name_or_path": self._recipe.model}
        return engine

    def _generation_places(self) -> list[Place] | None:
        """What every rank generates with; none: the actor's ranks do not generate."""
        return None

    def _tell_durable(self) -> None:
        self._log.tell_durable(self._trained)
        self._let_go()

    def handlers(self) -> Mapping[str, CallHandler]:
        """`form`, `train`, `offer`, `send_weights`, `checkpoint`, `settle`."""
        return {
            "form": self._form_batch,
            "train": self._train,
            "offer": self._offer,
            "send_weights": self._send_weights,
            "checkpoint": self._checkpoint,
            "settle": self._settle,
        }

    def _own_reference(self) -> ResponseScoring | None:
        """The reference's work, where the policy without its adapters is the reference."""
        nodes = [node for flow in flows_of(self._recipe) for node in flow if node.name == "reference"]
        engine, facts = self._engine, Facts(tag=f"config {recipe_hash(self._recipe)}")
        assert isinstance(engine, TorchEngine)
        if not nodes:
            return None
        return ResponseScoring(
            self._context,
            self._store,
            "reference",
            [table for node in nodes for table in node.tables],
            REFERENCE_COLUMNS,
            lambda batch: {"ref_logprobs": engine.reference_logprobs(batch)},
            pad_id=self._pad_id,
            facts=lambda: facts,
            min_batch=self._recipe.stages.reference.min_batch,
        )

    def work(self) -> bool:
        """The actor's row work is commanded, but for the reference's: False when there is none of it."""
        return self._reference is not None and self._reference.work()

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until a call comes, or rows of the reference."""
        if self._reference is None:
            super().wait(timeout_s, wake_fd)
            return
        self._settle_saved()
        self._reference.wait(timeout_s, wake_fd)

    # -- training ------------------------------------------------------------------------------------------

    def _form_batch(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Log the batch of a step, for those who train on it side by side.

        `update: false` logs a step that leaves the policy as it is.

        Returns:
            Nothing; or `again`, as `train`.
        """
        step = int(args["step"])
        self._catch_up(step - 1)
        self._prompts = tuple(args.get("prompts", ()))
        if self._trained >= step:
            return {}
        if self._context.rank == 0:
            self._formed = self._found(step, redo=False, update=bool(args["update"]))
        self._finish_giving()
        return {"again": True} if self._context.rank == 0 and self._formed is None else {}

    def _train(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Train one step: redo it if it is in the log, else claim its batch, log it, and train.

        Returns:
            Figures; or `again`: the server was started again, its rows must be seen to first.
        """
        step = int(args["step"])
        self._saved.settle()
        self._catch_up(step - 1)
        self._prompts = tuple(args.get("prompts", ()))
        if self._trained < step and not self._advance(step):
            return {"again": True}
        return {**self._metrics, **self._saved.take_figures()}

    def _advance(self, step: int, *, redo: bool = False) -> bool:
        """See `Trainer._advance`; a new entry is in the log before it is used."""
        self._context.activity("training")
        began = time.monotonic()
        found = self._on_every_rank(self._found(step, redo=redo) if self._context.rank == 0 else None)
        if found is None:
            return False
        entry, batch = found
        updates = self._for_this_mesh(entry.updates, step)
        if self._exact_ahead:
            self._earlier = (step - 1, self._engine.part().copied())
        micro_batches = self._micro_batches(batch, batch.ragged(), updates)
        self._add_old_logprobs(micro_batches, self._recipe.algorithm)
        learn = partial(self._engine.accumulate, loss=partial(self._algorithm.loss, state=entry.state))
        work: list[list[Work]] = [[partial(learn, micro) for micro in share] for share in micro_batches]
        for loss in entry.losses:
            for place, more in enumerate(self._work_of(loss, batch.losses[loss.table], updates, step)):
                work[place] += more
        figures = self._update_all(updates, work, entry.losses)
        self._trained = step
        if getattr(self._engine, "watch", None) is not None:
            self._fingerprints.take(step, figures)
        POLICY_VERSION.set(step)
        self._metrics = {**figures, **_described(entry, batch), "train_s": round(time.monotonic() - began, 4)}
        self._warn_of_mismatch(step)
        return True

    def _work_of(self, loss: LoggedLoss, batch: Batch, updates: Sequence[Update], step: int) -> list[list[Work]]:
        """The micro-batches of another loss in each update.

        The optimizer's step divides all sums by the denominators of the first loss, so this one's sums are scaled
        to `weight · sum / own denominators`.
        """
        function, own = self._algorithms[loss.table].loss, self._for_this_mesh(loss.updates, step)
        shares = self._micro_batches(batch, batch.ragged(), own)
        if batch.versions:
            self._add_old_logprobs(shares, self._recipe.tables[loss.table].algorithm)
        found: list[list[Work]] = []
        for update, first, share in zip(own, updates, shares, strict=True):
            scale = loss.weight * math.prod(first.denominators) / math.prod(update.denominators)
            scaled = scaled_loss(partial(function, state=batch.estimates.state), loss.table, scale)
            found.append([partial(self._engine.accumulate, micro, scaled) for micro in share])
        return found

    def _warn_of_mismatch(self, step: int) -> None:
        """Rollout and trainer are two engines: where they say too different things, training is off-policy."""
        limit, found = self._recipe.rollout.mismatch_alert, self._metrics.get("logprob_mismatch", 0.0)
        if self._context.rank == 0 and limit is not None and found > limit:
            figures = {name: value for name, value in self._metrics.items() if name.startswith("logprob_mismatch")}
            self._context.log.warning("rollout and trainer disagree", step=step, limit=limit, **figures)

    def _found(self, step: int, *, redo: bool, update: bool = True) -> Found | None:
        """What the log has of the step, or a new batch."""
        logged = self._log.find(step)
        formed, self._formed = self._formed, None
        if formed is not None and formed[0] == logged:
            return formed
        if logged is None and redo:
            raise IntegrityError(f"batch log {self._context.run.batch_log}", got=f"no entry of step {step}")
        if logged is None:
            return self._form(step, update=update)
        found = self._with_rows(logged)
        self._log.tell(logged)
        return found

    def _form(self, step: int, *, update: bool) -> Found | None:
        """Claim every live row, compute advantages, log the step, and end the rows as trained."""
        claims = self._claim_tables(step)
        if claims is None:
            return None
        claim, state = claims[TRAIN], self._log.state_before(step)
        batch = read_batch(claim.rows, self._algorithm, state, self._heads)
        others = {t: read_batch(one.rows, self._algorithms[t], {}) for t, one in claims.items() if t != TRAIN}
        batch = replace(batch, losses=others)
        entry = self._planned(step, batch, claims, update=update)
        try:  # before the log, since a redo of the step does not write them
            tag = f"call {self._context.call()} config {recipe_hash(self._recipe)}"
            self._store.write(claim, batch.actor_columns(), facts=Facts(tag=tag))
        except Fenced as error:
            self._context.log.warning("actor.lease_lost", step=step, error=str(error))
            return self._form(step, update=update)
        with self._saved.waiting():
            self._log.append(entry)
        try:
            for one in claims.values():
                self._store.finish(one, "trained", step=step)
        except Fenced as error:  # the lease ran out, but the log has the step: what it says counts
            self._context.log.warning("actor.lease_lost", step=step, error=str(error))
            if self._log.held(entry):
                self._log.tell(entry)
        self._store.set_version(TRAIN, entry.policy_version)
        return entry, batch

    def _planned(self, step: int, batch: Batch, claims: Mapping[str, Claim], *, update: bool) -> BatchEntry:
        entry = plan_step(
            batch,
            claims[TRAIN].ranges,
            step=step,
            recipe=self._recipe,
            algorithm=self._algorithm,
            world_size=self._mesh.shape.dp,
            update=update,
        )
        losses = [
            plan_loss(
                block,
                self._recipe.tables[block.name],
                self._algorithms[block.name],
                batch.losses[block.name],
                claims[block.name].ranges,
                entry,
            )
            for block in self._recipe.losses
        ]
        self._check_staleness(entry)
        table = self._recipe.table_of(step)
        return msgspec.structs.replace(entry, prompts=self._prompts, losses=tuple(losses), table=table)

    def _check_staleness(self, entry: BatchEntry) -> None:
        """The schedule's bound holds by construction; here it is seen to.

        Raises:
            IntegrityError: a row was generated with older weights.
        """
        most, found = self._recipe.schedule.staleness, entry.step - 1 - entry.behaviour_versions[0]
        if most and found > most:
            raise IntegrityError(f"staleness of step {entry.step}", got=found, expected=f"at most {most}")

    def _claim_tables(self, step: int) -> dict[str, Claim] | None:
        """The step's rows of each table; see `_claim_all`."""
        claims: dict[str, Claim] = {}
        for table in self._algorithms:
            claim = self._claim_all(table, step)
            if claim is None:
                for earlier in claims.values():
                    self._store.release(earlier)
                return None
            claims[table] = claim
        return claims

    def _claim_all(self, table: str, step: int) -> Claim | None:
        """All live rows of a table at once; None when the server was started again since the last look.

        Rows that a killed actor had claimed come back when its lease expires.
        """
        seen: TableCounts | None = None
        heads = self._heads if table == TRAIN else {}
        columns = (*batch_columns(self._algorithms[table], heads), *self._more(table))
        table = self._recipe.table_of(step) if table == TRAIN else table
        moved_at = time.monotonic()
        while time.monotonic() - moved_at < self._recipe.deadlines.step_s:
            self._store.expire()
            counts = self._store.counts(table)
            if counts != seen:  # rows move on
                seen, moved_at = counts, time.monotonic()
            rows, claim = counts.live, None
            if rows and counts.ready.get("actor", 0) == rows:
                claim = self._store.claim(table, "actor", max_rows=rows, min_rows=rows, columns=columns)
            if self._log.server_is_another():
                self._make_good(claim)
                return None
            if claim is not None:
                return claim
            raise_if_stopping(self._context)
            if self.work():
                continue
            self._context.waits(f"{rows} rows of stage actor in table {table}")
            more = [Interest(table, "reference")] if self._reference is not None else []
            self._store.wait([Interest(table, "actor", rows=rows), *more] if rows else more, timeout_s=1.0)
        raise DeadlineExceeded(
            f"batch of step {step} in table {table}",
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
        self._tell_durable()

    def _add_old_logprobs(self, updates: Sequence[Sequence[MicroBatch]], block: AlgorithmBlock) -> None:
        """With several updates on one batch, the ratio's denominator is the policy before the first."""
        if len(updates) == 1 or block.old_logprobs == "rollout":
            return
        for micro_batches in updates:
            for micro in micro_batches:
                micro.columns["old_logprobs"] = self._engine.logprobs(micro).logprobs
                self._context.progress()
            for _ in range(self._lacking(len(micro_batches))):
                self._engine.idle(backward=False)

    # -- weights --------------------------------------------------------------------------------------------

    def _offer(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Be at the wanted version (all ranks), then open the meeting place (rank 0).

        Later weights are offered where the wanted ones are gone.
        """
        wanted = int(args["version"])
        self._catch_up(wanted)
        if self._context.rank != 0:
            return {}
        meeting = self._sender.offer(args["generation"], tuple(args["members"]))
        kept = self._earlier is not None and self._earlier[0] == wanted
        return {"meeting": msgspec.to_builtins(meeting), "version": wanted if kept else self._trained}

    def _send_weights(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Send this rank's part of what each replica lacks."""
        self._context.activity("syncing")
        meeting, version = msgspec.convert(args["meeting"], Rendezvous), int(args["version"])
        kept = self._earlier if self._earlier is not None and self._earlier[0] == version else None

        def gone(member: str) -> bool:
            """Whether the controller has given up the member's call to receive."""
            results = self._context.calls.results(args.get("receive", ""))
            return any(one.released and member == f"rollout-{one.rank}" for one in results)

        try:
            stats = self._sender.send(meeting, kept[1] if kept else self._engine.part(), version, gone)
        except RlmqError as error:  # a receiver's end, or an offer of an earlier incarnation, is not the trainer's
            return {"failed": str(error)}
        WEIGHT_SYNC_BYTES.labels(direction="sent").inc(stats.bytes)
        WEIGHT_SYNC_SECONDS.labels(direction="sent").observe(stats.seconds)
        return {"bytes": stats.bytes, "full_bytes": stats.full_bytes, "changed": stats.changed}


def scaled_loss(loss: LossFunction, table: str, scale: float) -> LossFunction:
    """The loss of a table's rows as a part of an update: its sum times `scale`, its figures as `TABLE/NAME`."""

    def of(output: PolicyOutput, batch: MicroBatch) -> LossTerms:
        terms = loss(output, batch)
        sums = {f"{table}/{name}": value for name, value in terms.metric_sums.items()}
        return LossTerms(terms.loss_sum * scale, sums)

    return of


def _described(entry: BatchEntry, batch: Batch) -> dict[str, Any]:
    """Figures of the rows of a step."""
    lengths = np.array([len(response) for response in batch.responses])
    return {
        **entry.figures,
        **(_generated(entry, batch) if batch.versions else {}),
        **{f"{table}_samples": len(other.ids) for table, other in batch.losses.items()},
        "samples": len(batch.ids),
        "groups": len(set(batch.groups)),
        "trained_tokens": int(batch.counted.sum()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": int(lengths.max()),
        "truncated_ratio": float(batch.truncated.mean()),
    }


def _generated(entry: BatchEntry, batch: Batch) -> dict[str, Any]:
    """Figures of rows that a policy generated."""
    oldest = np.array([min(v, default=entry.step - 1) for v in batch.versions])
    return {
        "reward_mean": float(batch.rewards.mean()),
        "reward_std": float(batch.rewards.std()),
        **reward_figures(batch.columns),
        "generated_tokens": sum(len(response) for response in batch.responses),
        "staleness_mean": float((entry.step - 1 - oldest).mean()),
        "staleness_max": int((entry.step - 1 - oldest).max()),
        "interrupted_ratio": float(np.mean([len(set(versions)) > 1 for versions in batch.versions])),
    }
