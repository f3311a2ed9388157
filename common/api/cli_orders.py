"""`rlmq set`, `pause`, `resume`, `drain`, `stop`: an operator's order, and a line that says what became of it.

The order is a record of the run: a controller that restarts obeys it too. The message that rings the controller
may be lost; it looks at the records once a second.
"""

from __future__ import annotations

import contextlib
import difflib
import getpass
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmq.buffer.redis_calls import RedisCalls
from rlmq.cli_log import order_words
from rlmq.common.bus import ring_controller
from rlmq.common.control import Order, Snapshot, Verb
from rlmq.common.errors import DeadlineExceeded, DependencyError, ExitCode, RlmqError, UsageError
from rlmq.common.recipe.diff import changes, harmless
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.addresses import claim_home, control_of, server_url
from rlmq.controller.display import GrowingLines
from rlmq.controller.records import read_snapshot
from rlmq.controller.runs import find_run, read_summary

_POLL_S = 0.1
_RETRY_S = 5.0
_OWN_KEYS = ("checkpoint.every_steps", "evaluate.every_steps", "deadlines.step_s", "train.steps")
_PHASES: Mapping[Verb, str] = {"pause": "pause", "resume": "run"}


def order_command(verb: Verb, run: str | None, *, folder: Path, wait: bool, within_s: float) -> int:
    """`rlmq pause`, `resume`, `drain`, `stop`."""
    return _give(find_run(folder, run), verb, {}, wait=wait, within_s=within_s)


def set_command(words: Sequence[str], *, folder: Path, wait: bool, within_s: float) -> int:
    """`rlmq set`: the run, if it is named, and `KEY=VALUE`s."""
    runs = [word for word in words if "=" not in word]
    pairs = [word for word in words if "=" in word]
    if len(runs) > 1 or not pairs:
        got = f"runs {', '.join(runs)}" if pairs else "no KEY=VALUE"
        raise UsageError("set", got=got, expected="[RUN] KEY=VALUE…, for example train.steps=40")
    found = find_run(folder, runs[0] if runs else None)
    return _give(found, "set", checked_settings(found, pairs), wait=wait, within_s=within_s)


def checked_settings(run: RunFolder, pairs: Sequence[str]) -> dict[str, str]:
    """Keys and values of `KEY=VALUE` words, as the recipe's types write them.

    Raises:
        UsageError: a key that cannot be set while the run goes on (the nearest one and all are named), a value
            that is not of the recipe's type, or a schedule that would change what was trained.
    """
    before = load_recipe(run.recipe).recipe
    places = {f"reward.{name}.weight": f"reward.{n}.weight" for n, name in enumerate(before.reward_names)}
    places |= {key: key for key in _OWN_KEYS}
    settings = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        key = re.sub(r"^reward\.weights\.(.+)$", r"reward.\1.weight", key)
        if key not in places:
            raise _unknown(key, list(places))
        after = load_recipe(run.recipe, [f"{places[key]}={text}"]).recipe
        if key in _OWN_KEYS and not all(harmless(change) for change in changes(before, after)):
            remedy = "Continue the run with another recipe, or leave it"
            raise UsageError(
                key, got=text, expected="a value that leaves the learning rate's schedule", remedy=remedy
            )
        settings[key] = str(_value(after, places[key]))
    return settings


def _value(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    return value


def _unknown(key: str, keys: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.4)
    return UsageError(
        f"KEY {key}",
        got="a key that cannot be set while the run goes on",
        expected=f"one of {', '.join(keys)}",
        remedy=f"Did you mean {near[0]}?" if near else "",
    )


# -- giving it -----------------------------------------------------------------------------------------------------


def _give(run: RunFolder, verb: Verb, settings: Mapping[str, str], *, wait: bool, within_s: float) -> int:
    """Store the order, ring, and wait until the controller's records show what became of it.

    Raises:
        DependencyError: the run has ended, or no controller steers it. UsageError: the controller refuses it.
        DeadlineExceeded: nothing was seen in time; the order stays.
    """
    heard = GrowingLines(run.control_log)
    order = Order(verb=verb, at_unix_s=time.time(), by=_operator(), settings=dict(settings))
    calls = _records(run)
    try:
        if not calls.controller()[1]:
            raise _no_controller(run, "no controller")
        number = calls.order(order)
    finally:
        calls.close()
    _ring(run)
    if not wait:
        print(f"run {run.run_id}: order {number} is stored: {order_words(order)}")
        return int(ExitCode.OK)
    print(f"run {run.run_id}: {_await(run, order, number, heard, within_s)}")
    return int(ExitCode.OK)


def _records(run: RunFolder) -> RedisCalls:
    """The control records of a run that is up."""
    ended = read_summary(run).get("exit")
    if ended is not None:
        raise _no_controller(run, f"a run that has ended (exit {ended})")
    recipe = load_recipe(run.recipe).recipe
    url = server_url(recipe, run)
    try:
        calls = RedisCalls(url, run_id=run.run_id, retry_s=_RETRY_S)
    except DependencyError as error:
        raise _no_controller(run, f"no server ({error.got})") from error
    if recipe.redis.url is not None:
        claim_home(run, url)
    return calls


def _no_controller(run: RunFolder, got: str) -> DependencyError:
    remedy = "The command that began the run continues it"
    return DependencyError(f"run {run.run_id}", got=got, expected="a run that is up", remedy=remedy)


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    return f"{user}@{platform.node()}"


def _ring(run: RunFolder) -> None:
    """Tell the controller to look; when this is lost, it looks a second later."""
    with contextlib.suppress(RlmqError):  # without the operator's key
        ring_controller(run, control_of(load_recipe(run.recipe).recipe, run))


# -- what became of it ---------------------------------------------------------------------------------------------


def _await(run: RunFolder, order: Order, number: int, heard: GrowingLines, within_s: float) -> str:
    deadline = time.monotonic() + within_s
    obeyed = None
    while True:
        for line in heard.new():
            obeyed = obeyed or _obeyed(line, order, number)
        snapshot = read_snapshot(run)
        if obeyed is not None and order.verb == "set":
            return _changed(order, obeyed)
        effect = _effect(order.verb, snapshot) if obeyed is not None and snapshot is not None else ""
        if effect:
            return effect
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"order {number} of run {run.run_id}, {order_words(order)}",
                got="no effect yet, though it was read" if obeyed is not None else "no word of the controller",
                expected=f"its effect within {within_s:g} s",
                remedy="The order is stored and stays; `rlmq why` names who holds it up",
            )
        time.sleep(_POLL_S)


def _obeyed(line: Mapping[str, Any], order: Order, number: int) -> Mapping[str, Any] | None:
    """The commands of this line of the controller's log by type, if the line is about the order.

    Raises:
        UsageError: the controller refuses it.
    """
    event = line.get("event", {})
    if (event.get("type"), event.get("number")) != ("ordered", number):
        return None
    commands = {one["type"]: one for one in line.get("commands", ())}
    if "refuse" in commands:
        raise UsageError(f"order {number}, {order_words(order)}", got=f"refused: {commands['refuse'].get('why')}")
    return commands


def _changed(order: Order, commands: Mapping[str, Any]) -> str:
    """From which step on the settings count, as the controller keeps them."""
    kept = commands["keep"]["settings"]
    first = max(kept[key][-1][0] for key in order.settings)
    return f"{', '.join(f'{key}={value}' for key, value in order.settings.items())} from step {first} on"


def _effect(verb: Verb, snapshot: Snapshot) -> str:
    """What the order has brought about; empty while it has not."""
    where = f"at step {snapshot.step} of {snapshot.steps}"
    if verb in _PHASES:
        words = "paused" if verb == "pause" else "goes on"
        return f"{words} {where}" if snapshot.phase == _PHASES[verb] else ""
    return f"ended {where} with exit {snapshot.ended}" if snapshot.ended is not None else ""
