"""`rlmq remap`: drain a live run, and go on with one role placed elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlmq.cli_orders import order_command
from rlmq.cli_up import run_loaded
from rlmq.common.errors import DeadlineExceeded, SecondController, UsageError
from rlmq.common.placement import check_devices, check_memory, devices_here, placements
from rlmq.common.recipe.load import LoadedRecipe, load_recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.runs import find_run, name_lock, read_summary

_POLL_S = 0.2


def remap_command(words: Sequence[str], *, folder: Path, within_s: float) -> int:
    """`[RUN] ROLE KEY=VALUE…`: keys of `placement.ROLE`. The rest of the run is in this terminal.

    Raises:
        UsageError: no such role or place, or a deterministic run whose trainer would get other ranks.
        DeadlineExceeded: the run did not end in time; it is drained, and `rlmq up` goes on as before.
    """
    names, pairs = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    if not 1 <= len(names) <= 2 or not pairs:
        got = " ".join(words) or "nothing"
        raise UsageError("remap", got=got, expected="[RUN] ROLE KEY=VALUE…, for example actor devices=[0,1]")
    run = find_run(folder, names[0] if len(names) == 2 else None)
    loaded = _elsewhere(run, names[-1], pairs)
    order_command("drain", run.run_id, folder=folder, wait=True, within_s=within_s)
    _await_end(run, loaded, within_s)
    return run_loaded(loaded, fresh=False)


def _elsewhere(run: RunFolder, role: str, pairs: Sequence[str]) -> LoadedRecipe:
    """The run's recipe with the role in its new place."""
    before = load_recipe(run.recipe).recipe
    if role not in before.workers() or before.place_of(role) is None or role in {n.name for n in before.nodes}:
        known = [one for one in before.workers() if getattr(before.placement, one, None) is not None]
        raise UsageError("remap ROLE", got=role, expected=f"one of {', '.join(known)}")
    given = dict(pair.split("=", 1) for pair in pairs)
    if "devices" in given and "workers" not in given:
        given["workers"] = str(given["devices"].count(",") + 1)
    # All at once: halfway, devices and workers may not fit each other.
    own = before.placement.model_dump(mode="json")[role]
    place = ", ".join(f"{key}: {given[key] if key in given else json.dumps(own[key])}" for key in {**own, **given})
    more = [f"placement.{role}={{{place}}}", f"run.folder={run.path.parent}"]
    source = Path(json.loads(run.source.read_text())["folder"])
    loaded = replace(load_recipe(run.recipe, more), folder=source, path=source / run.recipe.name, overrides=())
    after = loaded.recipe
    ranks = before.placement.actor.mesh != after.placement.actor.mesh
    if before.deterministic and (ranks or before.placement.actor.strategy != after.placement.actor.strategy):
        raise UsageError(
            f"remap {role}",
            got="other ranks in a run with deterministic: true",
            expected="the same sums",
            remedy="Other ranks add in another order: begin the run with deterministic: false",
        )
    check_devices(after, devices_here())
    check_memory(after, placements(after, source), devices_here())
    return loaded


def _await_end(run: RunFolder, loaded: LoadedRecipe, within_s: float) -> None:
    """Until the run has ended and the command that began it too."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if read_summary(run).get("exit") is not None:
            with suppress(SecondController), name_lock(loaded.recipe):
                return
        time.sleep(_POLL_S)
    raise DeadlineExceeded(f"end of run {run.run_id}", got="it goes on", expected=f"it within {within_s:g} s")
