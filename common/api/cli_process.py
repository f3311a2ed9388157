"""`rlmq controller` and `rlmq worker`: one process of a run, started by `rlmq up` or by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlmq.cli_errors import leave, tell
from rlmq.common.errors import RlmqError, UsageError
from rlmq.common.joined_nodes import joined_nodes
from rlmq.common.model_cache import torch_cache
from rlmq.common.recipe.load import LoadedRecipe, load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.compose import apply_environment, check_place, controller_main, start_process, wait_for_file, worker_main
from rlmq.controller.addresses import claim_home, control_of, server_url, write_addresses
from rlmq.controller.commands import process_environment
from rlmq.controller.runs import name_lock, newest_run, open_run, run_stem
from rlmq.controller.server import check_url


def controller_command(path: Path, overrides: Sequence[str], run_path: Path | None) -> int:
    """`rlmq controller`. By hand it begins or continues the run itself, with the server of `redis.url`."""
    loaded = _load(path, overrides, run_path)
    apply_environment(process_environment(loaded.recipe, "controller"))
    run = RunFolder(run_path) if run_path is not None else _open_by_hand(loaded.recipe)
    return _end(controller_main, loaded, run, "controller", 0)


def worker_command(role: str, index: int, path: Path, overrides: Sequence[str], run_path: Path | None) -> int:
    """`rlmq worker`. By hand it joins the newest run of the recipe's name, and waits for one to begin.

    A role may bring its index along: `rollout-1`, as systemd's instances are called.
    """
    loaded = _load(path, overrides, run_path)
    name, dash, number = role.rpartition("-")
    if dash and number.isdecimal() and role not in loaded.recipe.workers():
        role, index = name, int(number)
    joined = joined_nodes(RunFolder(run_path)).get(role) if run_path is not None else None
    recipe = loaded.recipe if joined is None else loaded.recipe.model_copy(update={"nodes": (joined,)})
    if joined is None:
        check_place(recipe, role, index)
        _check_launcher(recipe, role)
    apply_environment({**process_environment(recipe, role), **torch_cache()})
    run = RunFolder(run_path) if run_path is not None else _await_run(loaded.recipe)
    return _end(worker_main, loaded, run, role, index)


def _check_launcher(recipe: Recipe, role: str) -> None:
    """Raises UsageError: torchrun started another number of processes than the role has."""
    told, workers = os.environ.get("WORLD_SIZE", ""), recipe.workers().get(role)
    if "TORCHELASTIC_RUN_ID" in os.environ and told.isdecimal() and int(told) != workers:
        raise UsageError(
            f"WORLD_SIZE of torchrun, for {role}",
            got=told,
            expected=f"placement.{role}.workers, which is {workers}",
            remedy=f"Set placement.{role}.workers={told}, or torchrun --nproc-per-node {workers}",
        )


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
        recipe, url = loaded.recipe, server_url(loaded.recipe, run)
        if main is worker_main:
            recipe = recipe.model_copy(update={"control": control_of(recipe, run)})
        process = start_process(recipe, loaded.folder, run, role, index, url)
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
    with name_lock(recipe):  # only while choosing: the controller's lease guards the run
        run = open_run(recipe).run
    url = server_url(recipe, run)
    write_addresses(run, url, recipe.control)
    if recipe.redis.url is not None:
        check_url(url)
        claim_home(run, url)
    return run


def _await_run(recipe: Recipe) -> RunFolder:
    folder = Path(recipe.run.folder).absolute()
    found = newest_run(recipe)
    if found is None:
        first = RunFolder(folder / f"{run_stem(recipe.run.name)}-1")
        wait_for_file(first.recipe, f"run {recipe.run.name!r}", recipe.deadlines.start_s)
        found = newest_run(recipe) or first
    wait_for_file(found.addresses, f"run {found.run_id}", recipe.deadlines.start_s)
    return found
