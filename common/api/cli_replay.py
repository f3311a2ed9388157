"""`rlmq replay`: the steps of a run once more, from its checkpoints, batch log and recording."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlmq.buffer.tables import TRAIN
from rlmq.common.algorithms import spec_of
from rlmq.common.errors import ExitCode, UsageError
from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.load import LoadedRecipe, code_hash, load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.commands import process_environment, threads
from rlmq.controller.runs import find_run

if TYPE_CHECKING:
    from rlmq.consumers.fingerprints import StepPrint
    from rlmq.consumers.replay import Replay, Seat

_SHOWN = ("loss", "grad_norm", "reward_mean", "samples", "trained_tokens")


def run_and_overrides(words: Sequence[str], folder: Path) -> tuple[RunFolder, list[str]]:
    """The run that is named (default: the newest), and `KEY=VALUE`s.

    Raises:
        UsageError: several runs are named, or there is no such run.
    """
    runs = [word for word in words if "=" not in word]
    if len(runs) > 1:
        raise UsageError("RUN", got=", ".join(runs), expected="one run")
    return find_run(folder, runs[0] if runs else None), [word for word in words if "=" in word]


def recipe_of(run: RunFolder, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe of a run, as its processes read it; other values may be put over it.

    With another algorithm, keys that were not given have its defaults.

    Raises:
        UsageError: as `load_recipe`, or the run does not tell its recipe's folder.
    """
    try:
        folder = Path(json.loads(run.source.read_text())["folder"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"run {run.run_id}", got=f"no {run.source.name}", expected="a run that has begun"
        ) from error
    stored = load_recipe(run.recipe).recipe
    values = stored.model_dump(mode="json")
    plain = {key: one.default for key, one in AlgorithmBlock.model_fields.items()}
    plain |= spec_of(stored.algorithm.name).preset
    own = AlgorithmBlock.model_validate({"name": stored.algorithm.name}).model_dump(mode="json")
    values["algorithm"] = {k: v for k, v in values["algorithm"].items() if k == "name" or v != own[k]}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / run.recipe.name
        path.write_text(yaml.safe_dump(values))
        loaded = load_recipe(path, overrides)
    return LoadedRecipe(loaded.recipe, folder / "recipe.yaml", folder, tuple(overrides))


def replay_command(
    words: Sequence[str],
    *,
    folder: Path,
    step: int | None,
    loss: str | None,
    reward: str | None,
    max_staleness: int | None,
    as_json: bool,
    rank: int,
    meet: Path | None,
) -> int:
    """`rlmq replay`; `rank` and `meet` are told to the further ranks of a replay that it starts."""
    run, overrides = run_and_overrides(words, folder)
    if loss is not None:
        overrides.append(f"algorithm.loss={loss}" if ":" in loss else f"algorithm.name={loss}")
    loaded = recipe_of(run)
    _begin_torch(loaded.recipe)
    if rank > 0:
        return _follow(run, loaded, step, rank, meet or Path())
    _tell_of_code(run, loaded)
    if not overrides and reward is None and max_staleness is None:
        return _replay(run, loaded, step, as_json=as_json)
    if step is None:
        raise UsageError("--step", got="none", expected="the step that another method is compared at")
    other = recipe_of(run, overrides)
    if loaded.recipe.placement.actor.workers > 1:
        raise UsageError("rlmq replay", got="an actor of several ranks", expected="one, to compare methods")
    return _compare(run, loaded, other, step, reward, max_staleness, as_json=as_json)


def replay_at(run: RunFolder, step: int | None = None) -> Replay:
    """A replay at the newest checkpoint (up to a step), in a process with the actor's threads."""
    loaded = recipe_of(run)
    _begin_torch(loaded.recipe)
    from rlmq.consumers.replay import RecordedRows, Replay

    return Replay(loaded.recipe, loaded.folder, run, RecordedRows(run), step or sys.maxsize)


def _begin_torch(recipe: Recipe) -> None:
    """Threads as the actor has them."""
    from rlmq.compose import apply_environment

    apply_environment(process_environment(recipe, "actor"))
    import torch

    torch.set_num_threads(threads(recipe, "actor"))  # where it was imported before


def _tell_of_code(run: RunFolder, loaded: LoadedRecipe) -> None:
    before = json.loads(run.source.read_text()).get("code")
    if before != code_hash(loaded.recipe, loaded.folder):
        changed = f"files that the recipe names have changed since the run ({loaded.folder})"
        print(f"note: {changed}", file=sys.stderr)


def _replay(run: RunFolder, loaded: LoadedRecipe, step: int | None, *, as_json: bool) -> int:
    from rlmq.consumers.replay import RecordedRows, Replay

    with _other_ranks(run, loaded.recipe, step) as seat:
        after, last = _span(run, step)
        replay = Replay(loaded.recipe, loaded.folder, run, RecordedRows(run), after, seat=seat)
        return _replayed(run, loaded, replay, last, as_json=as_json)


def _span(run: RunFolder, step: int | None) -> tuple[int, int]:
    """The step after which a replay begins, or a checkpoint before that; and its last step."""
    return (0, _last_step(run)) if step is None else (step - 1, step)


def _follow(run: RunFolder, loaded: LoadedRecipe, step: int | None, rank: int, meet: Path) -> int:
    """Another rank than the first: it says nothing."""
    from rlmq.consumers.replay import RecordedRows, Replay, Seat

    after, last = _span(run, step)
    replay = Replay(loaded.recipe, loaded.folder, run, RecordedRows(run), after, seat=Seat(rank, meet))
    for number in range(replay.trained + 1, last + 1):
        replay.follow(number)
    return 0


@contextmanager
def _other_ranks(run: RunFolder, recipe: Recipe, step: int | None) -> Iterator[Seat]:
    """Processes for the ranks after the first, while the first replays."""
    from rlmq.consumers.replay import Seat

    with tempfile.TemporaryDirectory(prefix="rlmq-ranks-") as place:
        words = [sys.executable, "-P", "-m", "rlmq.cli", "replay", str(run.path.absolute()), "--meet", place]
        words += ["--step", str(step)] if step is not None else []
        ranks = range(1, recipe.placement.actor.workers)
        others = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in ranks]
        try:
            yield Seat(0, Path(place))
        finally:
            for other in others:
                other.kill()
                other.wait()


def _replayed(run: RunFolder, loaded: LoadedRecipe, replay: Replay, last: int, *, as_json: bool) -> int:
    from rlmq.consumers.fingerprints import read_fingerprints

    recorded = read_fingerprints(run.fingerprints)
    begin = replay.trained
    if not as_json:
        at = f"checkpoint {begin}" if begin else "the first model"
        print(f"run {run.run_id}: steps {begin + 1} to {last}, from {at} and the recorded rows")
    first = ""
    for number in range(begin + 1, last + 1):
        made, before = replay.redo(number), recorded.get(number)
        said = _verdict(made, before)
        first = first or (f"step {number}: {said}" if said not in ("equal", "not recorded") else "")
        _tell(made, said, as_json=as_json)
    if not as_json:
        compared = [number for number in range(begin + 1, last + 1) if number in recorded]
        print(f"not the run's: {first}" if first else f"steps equal to the run's, bit for bit: {len(compared)}")
    return int(ExitCode.INTEGRITY if first and loaded.recipe.deterministic else ExitCode.OK)


def _last_step(run: RunFolder) -> int:
    from rlmq.buffer.file_batch_log import FileBatchLog

    last = FileBatchLog(run.batch_log).last_step()
    if last < 1:
        raise UsageError(f"run {run.run_id}", got="no step in its batch log", expected="a run that has trained")
    return last


def _verdict(made: StepPrint, before: StepPrint | None) -> str:
    if before is None:
        return "not recorded"
    differs = made.differs_from(before)
    if not differs:
        return "equal"
    return f"{differs} differs first (loss {made.loss!r}, the run's {before.loss!r})"


def _tell(made: StepPrint, said: str, *, as_json: bool) -> None:
    prints = {"gradient": made.whole("gradient"), "weights": made.whole("weights")}
    if as_json:
        line = {"step": made.step, "loss": made.loss, "grad_norm": made.grad_norm, **prints, "verdict": said}
        print(json.dumps(line))
        return
    figures = f"loss {made.loss:.6g}  grad_norm {made.grad_norm:.6g}"
    print(f"step {made.step}  {figures}  gradient {prints['gradient']}  weights {prints['weights']}  {said}")


def _compare(
    run: RunFolder,
    loaded: LoadedRecipe,
    other: LoadedRecipe,
    step: int,
    reward: str | None,
    max_staleness: int | None,
    *,
    as_json: bool,
) -> int:
    """One step, as the run made it and by another method, from the same weights and rows."""
    from rlmq.consumers.replay import Change, RecordedRows, Replay, Variant, beside, cosine

    rows = RecordedRows(run)
    own = Replay(loaded.recipe, loaded.folder, run, rows, step - 1, keeps_gradients=True)
    for number in range(own.trained + 1, step):
        own.redo(number)
    from rlmq.cli_rescore import rescored, rewards_of

    new = rescored(run, rewards_of((), reward), TRAIN, own.admitted(step)) if reward is not None else []
    change = Change({one.row["sample_id"]: one.new for one in new}, max_staleness)
    with beside(run) as place:
        own.save(place.checkpoints)
        how: dict[str, Any] = {"change": change, "keeps_gradients": True}
        variant = Variant(other.recipe, other.folder, place, rows, step - 1, **how)
        own.redo(step)
        variant.redo(step)
    angle = cosine(own.gradient, variant.gradient)
    _tell_both(run, step, own, variant, angle, as_json=as_json)
    return 0


def _tell_both(run: RunFolder, step: int, own: Replay, variant: Replay, angle: float, *, as_json: bool) -> None:
    figures: dict[str, Mapping[str, Any]] = {"run": own.figures, "variant": variant.figures}
    if as_json:
        print(json.dumps({"step": step, **figures, "gradient_cosine": angle}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{run.run_id}, step {step}: the same rows and weights")
    for title in ("", "as the run did", "otherwise"):
        table.add_column(title, justify="left" if not title else "right")
    names = dict.fromkeys([*_SHOWN, *sorted({*own.figures, *variant.figures})])
    for name in names:
        before, after = own.figures.get(name), variant.figures.get(name)
        if (before != after and not name.endswith("_s")) or name in _SHOWN:
            table.add_row(name, _number(before), _number(after))
    table.add_row("cosine of the gradients", "", _number(angle))
    Console().print(table)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
