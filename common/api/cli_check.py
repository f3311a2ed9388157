"""`rlmq check`: everything about a recipe that can be known before a process starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlmq.common.dataflow import DataFlow
from rlmq.common.errors import ExitCode, RlmqError, UsageError
from rlmq.common.flow import flow_of
from rlmq.common.recipe.load import LoadedRecipe, load_recipe
from rlmq.common.user_code import find_beside, is_spec, load_function

_STEPS_TRIED = 1000  # of a function from steps to weights


def check_command(path: Path, overrides: Sequence[str]) -> int:
    """`rlmq check`: prints each problem, or that there is none."""
    loaded = load_recipe(path, overrides)
    problems = [str(problem) for problem in find_problems(loaded)]
    for problem in problems:
        _print_error(problem)
    if problems:
        return int(ExitCode.USAGE)
    recipe = loaded.recipe
    learns = f"rewards {', '.join(recipe.reward_names)}" if recipe.reward else "no rewards"
    print(
        f"{path}: fine. Run {recipe.run.name!r}, {recipe.train.steps} steps of "
        f"{recipe.data.prompts_per_step} × {recipe.algorithm.group_size} samples, "
        f"{learns}."
    )
    return 0


def find_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    """Problems of what the recipe names: data, model, reward functions. Imports the user's files."""
    for check in (
        _data_problems,
        _model_problems,
        _mesh_problems,
        _reward_problems,
        _algorithm_problems,
        _engine_problems,
        _placement_problems,
        _environment_problems,
        _node_problems,
    ):
        yield from check(loaded)


def data_sources(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    """`(recipe key, source)` of every data source of the algorithm."""
    data = loaded.recipe.data
    if isinstance(data.train, str):
        yield "data.train", data.train
    else:
        yield from ((f"data.train.{name}", source) for name, source in data.train.items())
    if isinstance(data.eval, str):
        yield "data.eval", data.eval
    elif data.eval is not None:
        yield from ((f"data.eval.{name}", source) for name, source in data.eval.items())


def _data_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    from rlmq.producers.prompts import read_rows

    sources = [(loaded.recipe, source, key) for key, source in data_sources(loaded)]
    sources += [(own, str(own.data.train), f"losses.{name}.data") for name, own in loaded.recipe.tables.items()]
    for recipe, source, key in sources:
        try:
            read_rows(recipe, source, loaded.folder, subject=key)
        except RlmqError as error:
            yield error


def _model_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    from rlmq.common.models import resolve_model

    model = loaded.recipe.model
    try:
        if is_spec(model):
            resolve_model(model, loaded.folder)  # makes it, the first time
        elif model.startswith((".", "/", "~")) or (loaded.folder / model).exists():
            folder = find_beside(model, loaded.folder, subject="model")
            if not (folder / "config.json").is_file():
                yield UsageError(
                    "model", got=f"{folder} without config.json", expected="a Hugging Face model folder"
                )
    except RlmqError as error:
        yield error


def _mesh_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    """A model that the actor's ranks cannot hold together; one that is not on this machine is not looked at."""
    model, placed = loaded.recipe.model, loaded.recipe.placement.actor
    if placed.strategy != "3d" or not (is_spec(model) or (loaded.folder / Path(model).expanduser()).exists()):
        return
    from transformers import AutoConfig

    from rlmq.common.engines.decoder_shape import DecoderShape
    from rlmq.common.models import resolve_model

    try:
        config = AutoConfig.from_pretrained(resolve_model(model, loaded.folder), local_files_only=True)
        DecoderShape.of(config).check(placed.mesh, f"placement.actor {placed.mesh}")
    except RlmqError as error:
        yield error


def _reward_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    from rlmq.producers.process_runner import ProcessRewardRunner

    for index, block in enumerate(loaded.recipe.reward):
        try:
            if block.function is not None or is_spec(block.source):
                load_function(block.source, loaded.folder, subject=f"reward.{index}.{block.kind}")
            if block.kind in ("function", "builtin"):  # what else it needs may be on the workers' machine only
                ProcessRewardRunner(block, block.label, loaded.folder).close()
        except RlmqError as error:
            yield error
    from rlmq.producers.reward_weights import RewardController

    try:
        controller = RewardController(loaded.recipe, loaded.folder)
        for step in range(1, min(loaded.recipe.train.steps, _STEPS_TRIED) + 1):
            controller.of(step)
    except RlmqError as error:
        yield error


def _algorithm_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    from rlmq.common.algorithms import algorithm_of
    from rlmq.common.algorithms.own_functions import OwnFunctions

    for recipe in (loaded.recipe, *loaded.recipe.tables.values()):
        try:
            algorithm = algorithm_of(recipe, loaded.folder)
        except RlmqError as error:
            yield error
            continue
        if isinstance(algorithm, OwnFunctions):
            yield from algorithm.trial(recipe)


def _engine_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    from rlmq.common.engines.registry import GENERATION, LORA, TRAINING, require_installed

    recipe, folder = loaded.recipe, loaded.folder
    rollout, actor, roles = recipe.rollout, recipe.placement.actor, recipe.workers()
    fixed = recipe.deterministic
    try:
        if "rollout" in roles:
            GENERATION.check(
                rollout.engine, rollout.engine_options, folder, deterministic=fixed, trains="actor" in roles
            )
    except RlmqError as error:
        yield error
    try:
        if "actor" in roles:
            TRAINING.check(actor.strategy, actor.strategy_options, folder, deterministic=fixed)
        if recipe.train.optimizer is not None:
            load_function(recipe.train.optimizer, folder, subject="train.optimizer")
        if recipe.train.lora.r is not None:
            require_installed("train.lora", LORA)
    except RlmqError as error:
        yield error


def _placement_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    from rlmq.common.placement import check_devices, check_memory, devices_here, placements

    try:
        check_devices(loaded.recipe, devices_here())
        check_memory(loaded.recipe, placements(loaded.recipe, loaded.folder), devices_here())
    except RlmqError as error:
        yield error


def _environment_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    from rlmq.producers.episodes import make_environment

    spec = loaded.recipe.rollout.environment
    try:
        if spec is not None:
            make_environment(spec, loaded.folder)
    except RlmqError as error:
        yield error


def _node_problems(loaded: LoadedRecipe) -> Iterator[RlmqError]:
    try:
        flow_of(loaded.recipe)
    except RlmqError as error:
        yield error
    for critic in loaded.recipe.critics:
        try:
            if critic.role is not None:
                subject = f"critics: role of {critic.name}"
                made = load_function(critic.role, loaded.folder, subject=subject)
                if not hasattr(made, "handlers"):
                    yield UsageError(subject, got=critic.role, expected="a class that extends CriticRole")
        except RlmqError as error:
            yield error
    for block in loaded.recipe.nodes:
        try:
            if block.scorer is not None:
                if block.scorer.function is not None:
                    load_function(block.scorer.function, loaded.folder, subject=f"scorer of node {block.name}")
                continue
            found = load_function(str(block.function), loaded.folder, subject=f"node {block.name}")
            if isinstance(found, DataFlow):
                found.node(block.name)
        except RlmqError as error:
            yield error


def _print_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)
