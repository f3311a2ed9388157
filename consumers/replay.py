"""Steps of a run made again from its recording, in a process of their own: `rlmq replay`.

A step is a function of the weights before it, its entry in the batch log, and its rows. So a replay is what a redo
after a crash is, with the rows of the recording in the place of those of the server. `Variant` trains the same rows
by another method.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from rlmq.buffer.recording import Recording, place_of
from rlmq.buffer.store import Claim, ExperienceStore, RowRange
from rlmq.buffer.tables import TRAIN
from rlmq.common.calls import Calls
from rlmq.common.engines.micro_batches import build_micro_batch
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.logs import configure
from rlmq.common.models import load_tokenizer
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.worker import WorkerContext
from rlmq.consumers.actor import ActorRole
from rlmq.consumers.batch import batch_columns, read_batch
from rlmq.consumers.file_checkpoints import FileCheckpoints
from rlmq.consumers.fingerprints import Fingerprints, StepPrint
from rlmq.consumers.trainer import Found

if TYPE_CHECKING:
    import torch


class _NoServer:
    """A replay asks the server for nothing but its name."""

    def server_id(self) -> str:
        """None."""
        return ""


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank of the trainer mesh this process is, and the folder in which the ranks of a replay meet."""

    rank: int = 0
    folder: Path = Path()

    def note(self, name: str, value: Mapping[str, Any]) -> None:
        """Leave a note for the other ranks; see `rlmq.common.calls.Calls`."""
        partial = self.folder / f".{name}"
        partial.write_text(json.dumps(value))
        partial.replace(self.folder / name)

    def noted(self, name: str) -> dict[str, Any] | None:
        """The note of this name, if there is one."""
        path = self.folder / name
        return json.loads(path.read_text()) if path.is_file() else None


class RecordedRows:
    """Rows of a recording by their ids."""

    def __init__(self, run: RunFolder) -> None:
        self._recording = Recording(place_of(run))

    def of(self, table: str, ids: Sequence[str], columns: Sequence[str]) -> pa.RecordBatch:
        """These columns of these rows, in the order of the ids.

        Raises:
            IntegrityError: the recording lacks a row. UsageError: it has no such column.
        """
        wanted, rows = pa.array(ids, pa.string()), self._recording.read(table, steps=_steps(ids))
        places = pc.index_in(wanted, value_set=rows["sample_id"].combine_chunks())
        if places.null_count:  # rows that are recorded in another step than their names say
            rows = self._recording.read(table)
            places = pc.index_in(wanted, value_set=rows["sample_id"].combine_chunks())
        if places.null_count:
            missing = ids[pc.index(pc.is_null(places), True).as_py()]
            got = f"no row {missing}"
            raise IntegrityError(f"recording {self._recording.place}", got=got, expected="every row of the step")
        lacking = [name for name in columns if name not in rows.column_names]
        if lacking:
            got = f"no column {lacking[0]}"
            remedy = "Choose a method that learns from the columns that there are"
            raise UsageError(f"recording {self._recording.place}", got=got, remedy=remedy)
        return rows.select(list(columns)).take(places).combine_chunks().to_batches()[0]


class Replay(ActorRole):
    """The actor at a checkpoint, with the rows of the recording. It writes nothing.

    Args:
        after: begin at the newest checkpoint up to this step.
        keeps_gradients: the gradient of the newest step is kept, in `gradient`.
        seat: where the run's actor has several ranks: which this is. Each makes the same steps.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, run: RunFolder, rows: RecordedRows, after: int, **more: Any
    ) -> None:
        self._after, self._recorded = after, rows
        self._keeps_gradients = bool(more.get("keeps_gradients"))
        self.gradient: list[torch.Tensor] = []
        context = _context(recipe, folder, run, more.get("seat", Seat()))
        super().__init__(context, cast("ExperienceStore", _NoServer()))
        self._fingerprints = Fingerprints(None)
        if context.rank == 0:
            self._engine.watch = self._watched  # type: ignore[attr-defined]  # engines of others have none

    @property
    def trained(self) -> int:
        """The step that the weights are of."""
        return self._trained

    @property
    def figures(self) -> Mapping[str, Any]:
        """Those of the newest step, as `metrics.jsonl` has them."""
        return self._metrics

    def redo(self, step: int) -> StepPrint:
        """Make the step, which is the next one.

        Raises:
            UsageError: the batch log has no such step. IntegrityError: the recording lacks a row of it.
        """
        self.gradient = []
        self.follow(step)
        assert self._fingerprints.last is not None
        return self._fingerprints.last

    def follow(self, step: int) -> None:
        """Take part in the step, as another rank than the first."""
        self._advance(step, redo=True)

    def admitted(self, step: int) -> list[int]:
        """The steps in which the rows of this one were admitted."""
        entry = self._log.find(step)
        if entry is None:
            raise UsageError(f"run {self._context.run.run_id}", got=f"no step {step} in its batch log")
        return sorted(_steps(entry.rows) or {step})

    def ratios(self, rows: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, float]]]:
        """Each token of these rows' responses: its text, and log of its probability now over that at generation."""
        tokenizer = load_tokenizer(self._model_folder)
        found = []
        for row in rows:
            micro = build_micro_batch([row["prompt_ids"]], [row["response_ids"]], pad_id=self._pad_id)
            now = self._engine.logprobs(micro).logprobs[0].tolist()
            texts = [str(tokenizer.decode([token])) for token in row["response_ids"]]
            pairs = zip(now, row["rollout_logprobs"], strict=True)
            found.append(list(zip(texts, (new - old for new, old in pairs), strict=True)))
        return found

    def save(self, checkpoints: Path) -> None:
        """Put a checkpoint of the weights as they are now into this folder; step 0 has none."""
        if self._trained:
            state = dict(self._engine.shards()), self._engine.state()
            FileCheckpoints(checkpoints).save(self._trained, *state, model_folder=self._model_folder)

    def _watched(self, kind: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        held = list(tensors)
        self._fingerprints.watch(kind, held)
        if kind == "gradient" and self._keeps_gradients:
            own = [tensor.detach().clone() for _, tensor in held]
            self.gradient = [a + b for a, b in zip(self.gradient, own, strict=True)] if self.gradient else own

    def _newest(self) -> int:
        return self._after

    def _agree_with_server(self) -> None:
        """There is none."""

    def _rows(
        self, table: str, _ranges: Sequence[RowRange], ids: Sequence[str], columns: Sequence[str]
    ) -> pa.RecordBatch:
        return self._recorded.of(table.partition(".")[0], ids, columns)  # slots of a table are recorded as it

    def _found(self, step: int, *, redo: bool, update: bool = True) -> Found:
        entry = self._log.find(step)
        if entry is None:
            raise UsageError(f"run {self._context.run.run_id}", got=f"no step {step} in its batch log")
        return self._with_rows(entry)


@dataclass(frozen=True, slots=True)
class Change:
    """What a variant does otherwise, beside its recipe.

    Attributes:
        rewards: of samples by id, in the place of the recorded ones.
        max_staleness: rows with an older token are left out.
    """

    rewards: Mapping[str, float | None] = field(default_factory=dict)
    max_staleness: int | None = None


class Variant(Replay):
    """A replay by another method: advantages and micro-batches are made anew of the recorded rows."""

    def __init__(self, *args: Any, change: Change, **more: Any) -> None:
        self._change = change
        super().__init__(*args, **more)

    def _found(self, step: int, *, redo: bool, update: bool = True) -> Found:
        logged = self._log.find(step)
        if logged is None or logged.losses:
            got = "no such step" if logged is None else "losses of several tables"
            raise UsageError(f"step {step} of run {self._context.run.run_id}", got=got)
        columns = dict.fromkeys(
            (*batch_columns(self._algorithm, self._heads), "policy_versions", *self._more(TRAIN))
        )
        rows = kept(self._recorded.of(TRAIN, logged.rows, list(columns)), step, self._change)
        batch = read_batch(rows, self._algorithm, self._log.state_before(step), self._heads)
        claims = {TRAIN: Claim(TRAIN, "actor", "", (), rows)}
        return self._planned(step, batch, claims, update=update), batch


def kept(rows: pa.RecordBatch, step: int, change: Change) -> pa.RecordBatch:
    """The rows of a step that are left under a change, with its rewards.

    Raises:
        UsageError: none is.
    """
    ids, limit = rows["sample_id"].to_pylist(), change.max_staleness
    if change.rewards:
        place = rows.schema.get_field_index("reward")
        rewards = pa.array([change.rewards.get(name) for name in ids], pa.float64())
        rows = rows.set_column(place, rows.schema.field(place), rewards)
    oldest = [min(versions or [step - 1]) for versions in rows["policy_versions"].to_pylist()]
    fresh = [limit is None or step - 1 - version <= limit for version in oldest]
    found = rows.filter(pc.and_(pa.array(fresh), pc.is_valid(rows["reward"])))
    if not found.num_rows:
        expected = f"rows with a reward, at most {limit} versions old" if limit is not None else "rewards"
        raise UsageError(f"step {step}", got=f"none of {len(ids)} rows left", expected=expected)
    return found


@contextmanager
def beside(run: RunFolder) -> Iterator[RunFolder]:
    """A run in a temporary folder with the batch log and environment of this one, for checkpoints of a replay."""
    with TemporaryDirectory(prefix="rlmq-replay-") as folder:
        made = RunFolder(Path(folder) / run.run_id)
        made.path.mkdir()
        made.batch_log.symlink_to(run.batch_log.absolute())
        if run.environment.exists():
            made.environment.symlink_to(run.environment.absolute())
        yield made


def cosine(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Of two gradients as one vector each; nan where one is nothing."""
    dot = sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))
    norms = [math.sqrt(sum(float(x.double().square().sum()) for x in one)) for one in (a, b)]
    return dot / (norms[0] * norms[1]) if all(norms) else float("nan")


def _steps(ids: Sequence[str]) -> set[int] | None:
    """The steps in which rows were admitted, by their ids (`train-000012-0003-05`); None: the ids do not say."""
    words = [name.split("-") for name in ids]
    if all(len(word) > 1 and word[1].isdecimal() for word in words):
        return {int(word[1]) for word in words}
    return None


def _context(recipe: Recipe, folder: Path, run: RunFolder, seat: Seat) -> WorkerContext:
    return WorkerContext(
        recipe=recipe,
        recipe_folder=folder,
        run=run,
        role="actor",
        rank=seat.rank,
        world_size=recipe.placement.actor.workers,
        incarnation=0,
        calls=cast("Calls", seat),  # all that ranks ask of them is notes, by which they meet
        log=configure("replay", 0, level="warning"),
        activity=lambda _: None,
        progress=lambda: None,
        serving=lambda _: None,
        desired=lambda: None,
        stopping=lambda: False,
    )
