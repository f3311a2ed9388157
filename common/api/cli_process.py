"""`rlmq controller` and `rlmq worker`: one process of a run, started by `rlmq up` or by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlmq.cli_errors import leave, tell
from rlmq.common.errors import DecodeError, DependencyError, RlmqError, UsageError
from rlmq.common.recipe.load import LoadedRecipe, load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.compose import apply_environment, check_place, controller_main, start_process, wait_for_file, worker_main
from rlmq.controller.commands import process_environment
from rlmq.controller.runs import newest_run, open_run, unusable, write_atomically


def controller_command(path: Path, overrides: Sequence[str], run_path: Path | None) -> int:
    """`rlmq controller`. By hand it begins or continues the run itself, with the server of `redis.url`."""
    loaded = _load(path, overrides, run_path)
    apply_environment(process_environment(loaded.recipe, "controller"))
    run = RunFolder(run_path) if run_path is not None else _open_by_hand(loaded.recipe)
    return _end(controller_main, loaded, run, "controller", 0)


def worker_command(role: str, index: int, path: Path, overrides: Sequence[str], run_path: Path | None) -> int:
    """`rlmq worker`. By hand it joins the newest run of the recipe's name, and waits for one to begin."""
    loaded = _load(path, overrides, run_path)
    check_place(loaded.recipe, role, index)
    apply_environment(process_environment(loaded.recipe, role))
    run = RunFolder(run_path) if run_path is not None else _await_run(loaded.recipe)
    return _end(worker_main, loaded, run, role, index)


def _load(path: Path, overrides: Sequence[str], run_path: Path | None) -> LoadedRecipe:
    """The recipe of the run where there is one: an edit of the file while it runs must not split the run."""
    if run_path is None:
        return load_recipe(path, overrides)
    stored = RunFolder(run_path).recipe
    if not stored.is_file():
        raise UsageError("--run", got=f"{run_path} without recipe.yaml", expected="the folder of a run")
    return replace(load_recipe(stored), path=path, folder=path.resolve().parent)


def _end(main: object, loaded: LoadedRecipe, run: RunFolder, role: str, index: int) -> int:
    """Run the process's main function, then leave at once: libraries' threads may not end by themselves."""
    try:
        process = start_process(loaded.recipe, loaded.folder, run, role, index, server_url(loaded.recipe, run))
        code = controller_main(process) if main is controller_main else worker_main(process, role, index)
    except (RlmqError, OSError) as error:
        code = tell(error, to_log=True)
    except Exception as error:  # noqa: BLE001 - the outermost frame of the process
        code = tell(error, to_log=True)
    leave(code)


def _open_by_hand(recipe: Recipe) -> RunFolder:
    if recipe.redis.url is None:
        run = newest_run(recipe)
        if run is None or not run.addresses.is_file():
            raise UsageError(
                "redis.url",
                got="none, and no `rlmq up` has begun this run",
                expected="the server that the run's processes share",
                remedy="Set redis.url, or start the run with `rlmq up`",
            )
    opened = open_run(recipe)
    write_addresses(opened.run, server_url(recipe, opened.run))
    return opened.run


def _await_run(recipe: Recipe) -> RunFolder:
    folder = Path(recipe.run.folder).absolute()
    found = newest_run(recipe)
    if found is None:
        from rlmq.controller.runs import run_stem

        first = RunFolder(folder / f"{run_stem(recipe.run.name)}-1")
        wait_for_file(first.recipe, f"run {recipe.run.name!r}", recipe.deadlines.start_s)
        found = newest_run(recipe) or first
    wait_for_file(found.addresses, f"run {found.run_id}", recipe.deadlines.start_s)
    return found


def server_url(recipe: Recipe, run: RunFolder) -> str:
    """The URL of the run's server: the recipe's, else the one that `rlmq up` started.

    Raises:
        DependencyError: the run has no server. DecodeError: `addresses.json` is damaged.
    """
    if recipe.redis.url is not None:
        return recipe.redis.url
    try:
        found = json.loads(run.addresses.read_text())["redis"]
    except FileNotFoundError as error:
        raise DependencyError(
            f"run {run.run_id}", got="no server address", remedy="Start it with `rlmq up`, or set redis.url"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DecodeError(str(run.addresses), got=str(error), expected='{"redis": URL}') from error
    return str(found)


def write_addresses(run: RunFolder, url: str) -> None:
    """Write `addresses.json`, by which processes find the run's server."""
    with unusable(run.path):
        write_atomically(run.addresses, json.dumps({"redis": url}) + "\n")
