"""The rollout role: claims one chunk of prompts at a time, generates it, writes the response columns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa
import torch

from rlmq.buffer.slots import SlottedStore
from rlmq.buffer.store import Claim, ExperienceStore, Facts, Interest
from rlmq.buffer.tables import EVAL, TRAIN
from rlmq.common.columns import ROLLOUT_COLUMNS, arrow_schema, is_greedy
from rlmq.common.determinism import require_same_environment
from rlmq.common.engines.generation import (
    EngineSettings,
    GenerationEngine,
    PlainMemory,
    Request,
    Sampling,
)
from rlmq.common.engines.registry import GENERATION
from rlmq.common.errors import DeadlineExceeded, Fenced, IntegrityError
from rlmq.common.flow import flow_table
from rlmq.common.layouts.layout import Box
from rlmq.common.layouts.part import whole_part
from rlmq.common.layouts.weight_sync import WeightReceiver
from rlmq.common.metrics import (
    GENERATED_TOKENS,
    POLICY_VERSION,
    ROWS_WRITTEN,
    WEIGHT_SYNC_BYTES,
    WEIGHT_SYNC_SECONDS,
)
from rlmq.common.models import eos_ids, folder_context_length, load_tokenizer, pad_id, resolve_model
from rlmq.common.recipe.load import recipe_hash
from rlmq.common.weights import Rendezvous
from rlmq.common.worker import CallHandler, WorkerContext
from rlmq.producers.chunk import Chunk
from rlmq.producers.episodes import Answers, Episode

_COLUMNS = ("sample_id", "prompt_ids")
_EXTEND_EVERY_S = 10.0
_LOOK_EVERY_S = 0.05  # for more rows, while some are generated


class RolloutRole:
    """Generates with one policy version at a time; without weights of the wanted version it claims nothing."""

    def __init__(self, context: WorkerContext, store: ExperienceStore) -> None:
        require_same_environment(context)
        self._context = context
        self._store = store
        recipe = context.recipe
        folder = resolve_model(recipe.model, context.recipe_folder)
        self._tokenizer = load_tokenizer(folder)
        self._engine = self._made(folder)
        if "actor" not in recipe.workers():  # nobody sends weights: those of the recipe are version 0
            self._engine.serve(0)
            context.serving(0)
        self._receiver = WeightReceiver(f"{context.role}-{context.rank}")
        self._sampling = {
            TRAIN: self._sampling_at(recipe.rollout.temperature),
            EVAL: self._sampling_at(recipe.evaluate.temperature),
        }
        self._greedy = self._sampling_at(0.0)
        self._answers = Answers(
            recipe.rollout.environment,
            context.recipe_folder,
            most_turns=recipe.rollout.max_turns,
            encode=lambda text: list(self._tokenizer.encode(text, add_special_tokens=False)),
            decode=lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=True)),
        )
        self._columns = (*_COLUMNS, "record") if recipe.rollout.environment else _COLUMNS
        self._held: list[Chunk] = []  # between two policy versions
        self._interrupts = recipe.schedule.interrupts and not recipe.deterministic
        self._tag = f"config {recipe_hash(recipe)} seed {recipe.run.seed}"

    def _made(self, folder: str) -> GenerationEngine:
        """The recipe's engine, with the model's first weights."""
        recipe, rollout = self._context.recipe, self._context.recipe.rollout
        options = GENERATION.check(
            rollout.engine,
            rollout.engine_options,
            self._context.recipe_folder,
            deterministic=recipe.deterministic,
            trains="actor" in recipe.workers(),
        )
        settings = EngineSettings(
            model=folder,
            dtype=recipe.train.dtype,
            max_batch=rollout.batch_size_per_device,
            max_tokens=min(
                recipe.data.max_prompt_tokens + rollout.max_response_tokens, folder_context_length(folder)
            ),
            eos_ids=eos_ids(folder, self._tokenizer),
            pad_id=pad_id(self._tokenizer),
            decode=lambda ids: str(self._tokenizer.decode(ids)),
            sampling=self._sampling_at(rollout.temperature),
            deterministic=recipe.deterministic,
            options=options,
            folder=self._context.recipe_folder,
        )
        made: GenerationEngine = GENERATION.find(rollout.engine, self._context.recipe_folder)(settings)
        lora = recipe.train.lora
        if lora.r is not None and lora.sync == "adapters" and "actor" in recipe.workers():
            from rlmq.common.engines.adapted_engine import AdaptedEngine

            return AdaptedEngine(made, folder, lora)
        return made

    def _sampling_at(self, temperature: float) -> Sampling:
        rollout = self._context.recipe.rollout
        return Sampling(
            temperature=temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_response_tokens,
            stop=rollout.stop,
        )

    def handlers(self) -> Mapping[str, CallHandler]:
        """`receive_weights`."""
        return {"receive_weights": self._receive_weights}

    def wait(self, timeout_s: float, wake_fd: int) -> None:
        """Sleep until prompts may be there; without the wanted weights, until a call comes."""
        current = self._up_to_date()
        interests = [Interest(EVAL, "rollout"), Interest(TRAIN, "rollout")] if current else []
        desired = self._context.desired()
        version = f"weights of version {desired.policy_version}" if desired is not None else "weights"
        self._context.waits(f"rows of stage rollout in table {TRAIN}" if current else version)
        self._store.wait(interests, timeout_s=timeout_s, wake_fd=wake_fd)

    def work(self) -> bool:
        """Generate one chunk, evaluation first: it holds up the next step.

        In normal mode, more chunks are taken while the engine has free slots, until there are none.
        """
        if not self._up_to_date():
            return False
        chunks = self._resumed()
        if not chunks:
            first = self._claim()
            if first is None:
                return False
            chunks = [self._begun(first)]
        self._generate(chunks)
        return True

    def _resumed(self) -> list[Chunk]:
        """What was interrupted, with the engine again."""
        chunks, self._held = self._held, []
        self._each(chunks, lambda chunk: self._store.extend(chunk.claim), chunks)
        for chunk in chunks:
            self._engine.submit(chunk.first())
        return chunks

    def close(self) -> None:
        """Give back what was interrupted, and end the engine."""
        for chunk in self._held:
            with suppress(Fenced):
                self._store.release(chunk.claim)
        self._engine.close()

    def _up_to_date(self) -> bool:
        desired = self._context.desired()
        serving = self._engine.state == "serving"
        return serving and desired is not None and self._engine.version == desired.policy_version

    def _claim(self, tables: tuple[str, ...] = (EVAL, TRAIN)) -> Claim | None:
        if not self._up_to_date():
            return None
        if isinstance(self._store, SlottedStore):  # what is trained next comes first
            self._store.first_step = self._engine.version + 1
        rows = self._context.recipe.rollout.claimed
        claims = (self._store.claim(table, "rollout", max_rows=rows, columns=self._columns) for table in tables)
        return next((claim for claim in claims if claim is not None), None)

    def _generate(self, chunks: list[Chunk]) -> None:
        self._context.activity("generating")
        extended_at = looked_at = time.monotonic()
        try:
            while chunks and not self._context.stopping():
                turns = self._engine.step()
                self._context.progress()
                now = time.monotonic()
                if now - extended_at > _EXTEND_EVERY_S:
                    self._each(chunks, lambda chunk: self._store.extend(chunk.claim), chunks)
                    extended_at = now
                for chunk in chunks:
                    self._engine.submit(chunk.take(turns))
                written = [chunk for chunk in chunks if chunk.done]
                self._each(written, self._write, chunks)
                chunks = [chunk for chunk in chunks if chunk not in written]
                if self._interrupts and not self._up_to_date():
                    self._hold(chunks)
                    return
                if self._has_room(chunks) and now - looked_at > _LOOK_EVERY_S:
                    # Not training prompts beside an evaluation: it would wait for their chunks to end.
                    more = self._claim((EVAL,) if chunks[0].claim.table == EVAL else (EVAL, TRAIN))
                    chunks += [self._begun(more)] if more is not None else []
                    looked_at = looked_at if more is not None else now
        finally:
            for chunk in chunks:
                self._engine.abort(chunk.requests)
        for chunk in chunks:
            self._store.release(chunk.claim)

    def _hold(self, chunks: Sequence[Chunk]) -> None:
        """Other weights are wanted: responses go on with them, with the tokens that they have."""
        for chunk in chunks:
            chunk.interrupt(self._engine.abort(chunk.requests))
        self._held = list(chunks)

    def _begun(self, claim: Claim) -> Chunk:
        episodes = [Episode(one, fields) for one, fields in zip(*self._requests(claim), strict=True)]
        chunk = Chunk(claim, episodes, self._answers, together=self._context.recipe.deterministic)
        self._engine.submit(chunk.first())
        return chunk

    def _has_room(self, chunks: Sequence[Chunk]) -> bool:
        recipe, desired = self._context.recipe, self._context.desired()
        free = self._engine.pending < recipe.rollout.batch_size_per_device
        wanted = desired is not None and desired.phase == "run"
        return bool(chunks) and free and wanted and not recipe.deterministic

    def _each(self, some: Sequence[Chunk], action: Callable[[Chunk], None], chunks: list[Chunk]) -> None:
        """Do something under the lease of each chunk; one whose lease ran out is somebody else's."""
        for chunk in list(some):
            try:
                action(chunk)
            except Fenced as error:  # the same tokens are generated there
                self._context.log.warning("chunk was given to another worker", error=str(error))
                self._engine.abort(chunk.requests)
                chunks.remove(chunk)

    def _write(self, chunk: Chunk) -> None:
        claim, finished = chunk.claim, chunk.episodes
        columns = self._response_columns(claim, finished)
        facts = Facts(version=self._engine.version, tokens=self._tokens(claim, finished), tag=self._tag)
        self._store.write(claim, columns, ack=True, facts=facts)
        seconds = round(time.monotonic() - chunk.began, 3)
        self._context.log.info("rollout.generated", table=claim.table, rows=claim.count, seconds=seconds)
        GENERATED_TOKENS.labels(table=claim.table).inc(sum(len(r.token_ids) for r in finished.values()))
        ROWS_WRITTEN.labels(table=claim.table, stage="rollout").inc(claim.count)

    def _requests(self, claim: Claim) -> tuple[list[Request], list[Mapping[str, Any]]]:
        """The first turn of each row, and what the environment may read of its data."""
        ids = claim.rows["sample_id"].to_pylist()
        prompts = claim.rows["prompt_ids"].to_pylist()
        sampling, seed = self._sampling[flow_table(claim.table)], self._context.recipe.run.seed
        requests = [
            Request(i, prompt, self._greedy if is_greedy(i) else sampling, seed)
            for i, prompt in zip(ids, prompts, strict=True)
        ]
        if "record" not in self._columns:
            return requests, [{}] * len(requests)
        return requests, [json.loads(record) for record in claim.rows["record"].to_pylist()]

    def _tokens(self, claim: Claim, finished: Mapping[str, Episode]) -> list[int]:
        """Prompt and response tokens of each row."""
        ids, prompts = claim.rows["sample_id"].to_pylist(), claim.rows["prompt_ids"].to_pylist()
        return [len(prompt) + len(finished[i].token_ids) for i, prompt in zip(ids, prompts, strict=True)]

    def _response_columns(self, claim: Claim, finished: Mapping[str, Episode]) -> pa.RecordBatch:
        responses = [finished[i] for i in claim.rows["sample_id"].to_pylist()]
        masked = self._context.recipe.rollout.truncated == "mask"
        texts = self._tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True)
        columns = {
            "response_ids": [r.token_ids for r in responses],
            "response_text": texts,
            "rollout_logprobs": [r.logprobs for r in responses],
            "loss_mask": [[own and not (masked and r.truncated) for own in r.own] for r in responses],
            "policy_versions": [r.policy_versions for r in responses],
            "turns": [r.turns for r in responses],
            "truncated": [r.truncated for r in responses],
        }
        return pa.RecordBatch.from_pydict(columns, schema=arrow_schema(ROLLOUT_COLUMNS))

    def _load(self, name: str, _: Box, tensor: torch.Tensor) -> None:
        self._engine.load(name, tensor)
        self._context.progress()

    def _receive_weights(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Two-phase: receive and verify everything, then serve it; on failure the old version goes on.

        An engine that failed between two versions is torn: it serves none, until the next transfer succeeds.
        """
        self._context.activity("syncing")
        meeting = msgspec.convert(args["meeting"], Rendezvous)
        version = int(args["version"])
        layout, memory = self._engine.layout(), self._engine
        self._engine.begin_load(layout, version)
        try:
            stats = self._receiver.receive(
                meeting,
                whole_part(layout),
                self._load,
                room=memory.room if isinstance(memory, PlainMemory) else None,
                served=memory.served if isinstance(memory, PlainMemory) else None,
            )
            self._engine.commit()
            self._receiver.committed()
        except (DeadlineExceeded, IntegrityError, RuntimeError) as error:
            self._engine.abandon()
            if self._engine.state == "torn":
                self._context.serving(-1)
            return {"failed": str(error)}
        self._context.serving(version)
        POLICY_VERSION.set(version)
        WEIGHT_SYNC_BYTES.labels(direction="received").inc(stats.bytes)
        WEIGHT_SYNC_SECONDS.labels(direction="received").observe(stats.seconds)
        return {"bytes": stats.bytes, "seconds": round(stats.seconds, 4)}
