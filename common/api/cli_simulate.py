"""`rlmq simulate`: what the schedules of a recipe would do on devices that are not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlmq.common.engines.engine_options import EmulatedOptions, EmulatedTrainingOptions
from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.simulation import Costs, Simulated, best

_AHEAD = (1, 2, 4)


def simulate_command(
    path: Path, overrides: Sequence[str], *, devices: int, lengths: str, steps: int, sync_s: float
) -> int:
    """Print the best split of the devices for each schedule."""
    loaded = load_recipe(path, overrides)
    recipe = loaded.recipe
    if devices < 2:
        raise UsageError("--gpus", got=devices, expected="at least 2: some generate while others train")
    costs = costs_of(recipe, sync_s)
    source = lengths or (recipe.rollout.engine_options.get("lengths", "") and _beside(recipe, loaded.folder))
    if not source:
        raise UsageError("--lengths", got="none", expected="a JSON list of response lengths, or a run's folder")
    found = in_steps(response_lengths(source), recipe.data.prompts_per_step * recipe.algorithm.group_size, steps)
    print_table(list(simulated(found, devices, costs)), Console())
    return 0


def costs_of(recipe: Recipe, sync_s: float) -> Costs:
    """Of the recipe's emulated engines, else the usual ones."""
    generation, training = EmulatedOptions(lengths="-", prompts=1, members=1), EmulatedTrainingOptions()
    if recipe.rollout.engine == "emulated":
        generation = EmulatedOptions.model_validate(recipe.rollout.engine_options)
    if recipe.placement.actor.strategy == "emulated":
        training = EmulatedTrainingOptions.model_validate(recipe.placement.actor.strategy_options)
    most = recipe.rollout.batch_size_per_device
    return Costs(generation.iteration_s, generation.active_s, training.token_s, sync_s, most)


def response_lengths(source: str) -> Sequence[int]:
    """Of a JSON list (`FILE` or `FILE#NAME`), or those that a run recorded, in the order of its samples."""
    folder = Path(source)
    if not folder.is_dir():
        from rlmq.common.engines.lengths import read_lengths

        return read_lengths(source)
    import pyarrow.dataset as ds

    files = sorted(str(one) for one in folder.glob("samples/train-*.parquet"))
    if not files:
        raise UsageError("--lengths", got=source, expected="the folder of a run that recorded samples")
    rows = ds.dataset(files).to_table(columns=["sample_id", "response_ids"]).sort_by("sample_id")
    return [len(ids) for ids in rows["response_ids"]]


def in_steps(lengths: Sequence[int], samples: int, steps: int) -> list[list[int]]:
    """The lengths of each step, the list taken in turn."""
    return [[lengths[(step * samples + one) % len(lengths)] for one in range(samples)] for step in range(steps)]


def simulated(steps: Sequence[Sequence[int]], devices: int, costs: Costs) -> Iterator[tuple[str, Simulated]]:
    """Each schedule at its best split."""
    yield "sync", best(steps, devices, costs, 0, interrupts=False)
    yield "one_step_off", best(steps, devices, costs, 1, interrupts=False)
    for ahead in _AHEAD:
        yield f"async, {ahead}", best(steps, devices, costs, ahead, interrupts=True)


def print_table(found: Sequence[tuple[str, Simulated]], console: Console) -> None:
    """One line each, beside the first."""
    table = Table("schedule", "generate", "train", "s/step", "x sync", "busy", "trains", "stale", box=None)
    first = found[0][1].step_s
    for name, one in found:
        arm = one.arm
        table.add_row(
            name,
            "all" if arm.shared else str(arm.generation),
            "all" if arm.shared else str(arm.training),
            f"{one.step_s:.1f}",
            f"{first / one.step_s:.2f}",
            *(f"{share:.0%}" for share in one.busy),
            f"{one.staleness:.2f}",
        )
    console.print(table)


def _beside(recipe: Recipe, folder: Path) -> str:
    return str(folder / str(recipe.rollout.engine_options["lengths"]))
