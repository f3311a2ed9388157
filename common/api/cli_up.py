"""`rlmq up`: check, choose the run, start its server and processes, show it, say how it ended."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rlmq.common.errors import ExitCode, UsageError
from rlmq.common.placement import GIB, check_devices, check_memory, devices_here, placements
from rlmq.common.processes import signal_group, spawn
from rlmq.common.recipe.load import LoadedRecipe, dump_recipe, load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.compose import PRELOADED
from rlmq.consumers.file_checkpoints import FileCheckpoints
from rlmq.controller.addresses import claim_home, write_addresses
from rlmq.controller.commands import ProcessSpec, joined_specs, process_specs, threads
from rlmq.controller.display import Display, print_summary
from rlmq.controller.runs import OpenedRun, name_lock, next_run, open_run, read_summary
from rlmq.controller.server import Server, check_url, find_binary
from rlmq.controller.supervisor import Outcome, Patience, Supervisor

_CHECK_S = 900.0


def up_command(path: Path, overrides: Sequence[str], *, fresh: bool, dry_run: bool) -> int:
    """`rlmq up`."""
    loaded = load_recipe(path, overrides)
    if dry_run:
        _print_plan(loaded, next_run(loaded.recipe, fresh=fresh))
        return 0
    code = _check_in_child(path, overrides)
    if code != 0:
        return code
    return run_loaded(loaded, fresh=fresh)


def run_loaded(loaded: LoadedRecipe, *, fresh: bool) -> int:
    """Start or continue the run of a recipe that was checked; returns its exit code."""
    with name_lock(loaded.recipe):
        return _run(loaded, fresh=fresh)


def _run(loaded: LoadedRecipe, *, fresh: bool) -> int:
    recipe = loaded.recipe
    binary = find_binary() if recipe.redis.url is None else None
    if recipe.redis.url is not None:
        check_url(recipe.redis.url)
    opened = open_run(recipe, fresh=fresh)
    console = Console()
    _print_opening(opened, console)
    if opened.state == "finished":
        print_summary(opened.run, read_summary(opened.run), console)
        return 0
    server = Server(opened.run, binary) if binary is not None else None
    url = server.url if server is not None else str(recipe.redis.url)
    write_addresses(opened.run, url, recipe.control)
    if recipe.redis.url is not None:
        claim_home(opened.run, url)
    outcome = _supervise(loaded, opened.run, server, console)
    summary = read_summary(opened.run)
    if summary.get("exit") is not None:
        print_summary(opened.run, summary, console)
    if outcome.message:
        print(f"error: {outcome.message}", file=sys.stderr, flush=True)
    elif {outcome.exit_code, summary.get("exit")} & {ExitCode.INTERRUPTED, ExitCode.TERMINATED}:
        console.print("Stopped; the same command goes on.", highlight=False)
    return outcome.exit_code


def _supervise(loaded: LoadedRecipe, run: RunFolder, server: Server | None, console: Console) -> Outcome:
    display = Display(run, console)
    what = (loaded.recipe, loaded.path.absolute(), loaded.overrides, run)
    supervisor = Supervisor(
        run,
        process_specs(*what),
        joined=lambda: joined_specs(*what),
        server=server,
        modules=PRELOADED if os.environ.get("RLMQ_FORK_SERVER") != "0" else (),
        event=display.event,
        tick=display.tick,
        server_deadline_s=loaded.recipe.deadlines.start_s,
        silence_s=loaded.recipe.deadlines.silence_s,
        patience=Patience.within(loaded.recipe.deadlines.drain_s),
    )
    try:
        return supervisor.run()
    finally:
        display.close()


def _print_opening(opened: OpenedRun, console: Console) -> None:
    what = {
        "new": f"run {opened.run.run_id}",
        "continued": f"run {opened.run.run_id} goes on",
        "finished": f"run {opened.run.run_id} is finished; --fresh starts a new one, more train.steps continues it",
    }[opened.state]
    console.print(f"{what} ({opened.run.path})", markup=False, highlight=False, soft_wrap=True)
    for change in opened.changes:
        console.print(f"  changed: {change}", markup=False, highlight=False, soft_wrap=True)
    checkpoints = FileCheckpoints(opened.run.checkpoints)
    for path, reason in (*checkpoints.unfinished(), *checkpoints.incomplete()):
        console.print(f"  ignored: {path.name}: {reason}", markup=False, highlight=False, soft_wrap=True)


def _check_in_child(path: Path, overrides: Sequence[str]) -> int:
    """Run `rlmq check` in a process of its own: it imports the user's files, whatever these import.

    What it says on stderr the user sees at once: a model that is converted, the problems that it finds.

    Raises:
        UsageError: the check takes too long.
    """
    argv = [sys.executable, "-P", "-m", "rlmq.cli", "check", str(path), *overrides]
    child = spawn(argv, errors=None)
    try:
        child.wait(timeout=_CHECK_S)
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            "the check of what the recipe names",
            got=f"no end after {_CHECK_S:g} s",
            remedy="Look for a reward or data file that hangs when it is imported: `rlmq check` does the same",
        ) from error
    finally:
        if child.returncode is None:
            signal_group(child.pid, signal.SIGKILL)
            child.wait()
    return 128 - child.returncode if child.returncode < 0 else child.returncode


def _print_plan(loaded: LoadedRecipe, run: RunFolder) -> None:
    """The resolved recipe, and each process with what it gets and reads."""
    recipe = loaded.recipe
    print(f"# run {run.run_id} in {run.path}")
    print(f"# relative names are looked up in {loaded.folder}")
    print(dump_recipe(recipe), end="")
    _print_placement(loaded)
    print("\n# processes")
    if recipe.redis.url is None:
        server = Server(run, find_binary())
        print(f"redis-0:\n  command: {_quoted(server.command())}\n  folder: {run.server}")
    for spec in process_specs(recipe, loaded.path.absolute(), loaded.overrides, run):
        _print_process(recipe, spec)


def _print_placement(loaded: LoadedRecipe) -> None:
    """Who runs where, and about how much memory that takes."""
    here = devices_here()
    check_devices(loaded.recipe, here)
    placed = placements(loaded.recipe, loaded.folder)
    what = f"{here.count} GPUs" if here.kind == "gpu" else f"no GPU, {here.count} cores"
    each = ", ".join(f"{one / GIB:.1f}" for one in here.bytes)
    print(f"\n# placement on {what} with {each} GiB; weights, optimizer, keys and values, logits of a micro-batch")
    for one in placed:
        where = f"every {here.kind}" if one.device is None else f"{here.kind} {one.device}"
        print(f"#   {one.name:<16}{where:<12}{f'{one.bytes / GIB:6.2f} GiB' if one.bytes else ''}".rstrip())
    print(f"#   {'together':<28}{sum(one.bytes for one in placed) / GIB:6.2f} GiB")
    check_memory(loaded.recipe, placed, here)


def _print_process(recipe: Recipe, spec: ProcessSpec) -> None:
    print(f"{spec.name}:")
    print(f"  role: {spec.role}\n  index: {spec.index}\n  threads: {threads(recipe, spec.role)}")
    print(f"  command: {_quoted(spec.argv)}")
    print("  environment:")
    for name, value in spec.environment.items():
        print(f"    {name}: {'(removed)' if value is None else value}")
    print("  reads:")
    for key in spec.reads:
        print(f"    {key}: {_value(recipe, key)}")


def _value(recipe: Recipe, key: str) -> object:
    value: object = recipe.model_dump(mode="json")
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else None
    return value


def _quoted(argv: Sequence[str]) -> str:
    return shlex.join(argv)
