"""What a deployment is made of: the processes of a recipe, where its files lie, and how long things may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePosixPath

from rlmq.common.errors import UsageError
from rlmq.common.recipe.load import LoadedRecipe
from rlmq.controller.runs import run_stem

CODE_ROLES = frozenset({"reward"})
"""Roles that may start walls of their own around code: they keep the right to make namespaces."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One worker process: `name` is ROLE-INDEX, as everywhere."""

    role: str
    index: int

    @property
    def name(self) -> str:
        """ROLE-INDEX."""
        return f"{self.role}-{self.index}"

    @property
    def makes_namespaces(self) -> bool:
        """Whether it may put code into a sandbox."""
        return self.role in CODE_ROLES


@dataclass(frozen=True, slots=True)
class Site:
    """A recipe as something to deploy.

    Attributes:
        name: the run's, as a file name.
        recipe: path of the recipe where the processes run; the files that it names lie beside it.
        overrides: `key=value` words that every process gets.
        memory_gib: of the Redis server.
        remote: whether processes of other machines join: control over TCP with keys.
    """

    name: str
    recipe: PurePosixPath
    home: PurePosixPath
    state: PurePosixPath
    user: str
    overrides: tuple[str, ...]
    workers: tuple[Instance, ...]
    start_s: int
    drain_s: int
    watchdog_s: int
    memory_gib: int
    remote: bool
    recipe_name: str

    @property
    def roles(self) -> dict[str, list[Instance]]:
        """Workers by role, in starting order."""
        found: dict[str, list[Instance]] = {}
        for worker in self.workers:
            found.setdefault(worker.role, []).append(worker)
        return found


def site_of(
    loaded: LoadedRecipe,
    *,
    home: PurePosixPath,
    state: PurePosixPath,
    user: str,
    redis_url: str,
    memory_gib: int = 8,
    overrides: tuple[str, ...] = (),
) -> Site:
    """What the recipe says about its processes.

    Args:
        home: folder of the installation; the recipe lies in it under `recipes/`.
        state: folder of runs.
        redis_url: of the server that the deployment brings along.
        memory_gib: most memory of the server.
        overrides: further `key=value` words, after those of the deployment.

    Raises:
        UsageError: the recipe names a server of its own.
    """
    recipe = loaded.recipe
    if recipe.redis.url is not None:
        raise UsageError(
            "redis.url",
            got=recipe.redis.url,
            expected="none: the deployment has a server of its own",
            remedy="Leave it out of the recipe",
        )
    workers = [Instance(role, index) for role, count in recipe.workers().items() for index in range(count)]
    deadlines = recipe.deadlines
    return Site(
        name=run_stem(recipe.run.name),
        recipe=home / "recipes" / loaded.path.name,
        home=home,
        state=state,
        user=user,
        overrides=(f"redis.url={redis_url}", f"run.folder={state / 'runs'}", *overrides, *loaded.overrides),
        workers=tuple(workers),
        start_s=math.ceil(deadlines.start_s) + 60,
        drain_s=math.ceil(deadlines.drain_s) + 20,
        watchdog_s=math.ceil(deadlines.step_s) + 60,
        memory_gib=memory_gib,
        remote=recipe.control.address is not None,
        recipe_name=loaded.path.name,
    )
