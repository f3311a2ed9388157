"""`rlmq train-offline`: `rlmq up` with recordings for data, in which nothing is generated."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from rlmq.buffer.recording import Recording, place_of
from rlmq.cli_up import up_command
from rlmq.common.algorithms import spec_of
from rlmq.common.errors import RlmqError, UsageError
from rlmq.common.recipe.load import load_recipe
from rlmq.controller.runs import find_run

_WEIGHTED = re.compile(r"(?P<place>.+):(?P<weight>\d+(\.\d+)?)")


def offline_command(words: Sequence[str], *, folder: Path, order: str, fresh: bool, dry_run: bool) -> int:
    """`rlmq train-offline`."""
    recipe, places, overrides = _sorted(words)
    return up_command(
        recipe, offline_overrides(recipe, places, overrides, folder, order), fresh=fresh, dry_run=dry_run
    )


def offline_overrides(
    recipe: Path, places: Sequence[str], given: Sequence[str], folder: Path, order: str
) -> list[str]:
    """What makes a recipe one of offline training: recordings for data, no evaluation, a name of its own.

    Raises:
        UsageError: no such run or recording, or another order than `groups` and `steps`.
    """
    if order not in ("groups", "steps"):
        raise UsageError("--order", got=repr(order), expected="groups or steps")
    block = load_recipe(recipe, given).recipe
    sets, weights = _recordings(places, folder)
    values = [f"run.name={block.run.name}-offline", "data.eval=null"]
    values.append(f"data.train={json.dumps(sets if len(sets) > 1 else next(iter(sets.values())))}")
    mixture = [{"from_step": 1, "weights": weights}] if weights else []
    values += [f"data.mixture={json.dumps(mixture)}", "data.difficulty.window=null"]
    if block.algorithm.online:
        values.append(f"data.recorded={order}")
        reads = "old_logprobs" in spec_of(block.algorithm.name).keys
        if order == "groups" and reads and block.algorithm.importance == "none":
            values.append("algorithm.old_logprobs=rollout")  # the ratio is to the policy that wrote the rows
    keys = {one.partition("=")[0] for one in given}
    return [*(one for one in values if one.partition("=")[0] not in keys), *given]


def _sorted(words: Sequence[str]) -> tuple[Path, list[str], list[str]]:
    recipes = [word for word in words if word.endswith((".yaml", ".yml", ".py")) and "=" not in word]
    overrides = [word for word in words if "=" in word]
    places = [word for word in words if word not in recipes and word not in overrides]
    if len(recipes) != 1 or not places:
        got = f"recordings {', '.join(places) or '-'}, recipes {', '.join(recipes) or '-'}"
        raise UsageError("train-offline", got=got, expected="RECORDING… RECIPE.yaml [KEY=VALUE]…")
    return Path(recipes[0]), places, overrides


def _recordings(words: Sequence[str], folder: Path) -> tuple[dict[str, str], dict[str, float]]:
    """Place and weight of each recording by a name; weights only where one is given (the others are 1)."""
    sets: dict[str, str] = {}
    weights: dict[str, float] = {}
    for number, word in enumerate(words, 1):
        match = _WEIGHTED.fullmatch(word)
        place = _place(match["place"] if match else word, folder)
        name = f"r{number}"
        sets[name], weights[name] = place, float(match["weight"]) if match else 1.0
    return sets, weights if len(sets) > 1 and any(_WEIGHTED.fullmatch(word) for word in words) else {}


def _place(word: str, folder: Path) -> str:
    """A run by name, or a recording by its place."""
    if "://" in word or (Path(word).is_dir() and Recording(word).tables()):
        return word if "://" in word else str(Path(word).absolute())
    try:
        found = place_of(find_run(folder, word))
    except RlmqError as error:
        raise UsageError("RECORDING", got=repr(word), expected=f"a recording, or a run in {folder}") from error
    return found if isinstance(found, str) else str(found.absolute())
