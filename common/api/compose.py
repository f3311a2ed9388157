"""Composition: which class fills a role, and how a process of a run gets its store, calls and log.

The top layer alone knows the three layers below; everything is imported in the process that needs it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from rlmq.buffer.store import ExperienceStore
from rlmq.common.calls import Calls
from rlmq.common.control import FIXED
from rlmq.common.errors import DeadlineExceeded, SchemaMismatch, SecondController, UsageError
from rlmq.common.joined_nodes import joined_nodes
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.common.user_code import load_function
from rlmq.common.worker import Role, WorkerContext

ROLES: Mapping[str, str] = {
    "prompts": "rlmq.producers.prompts:PromptsRole",
    "rollout": "rlmq.producers.rollout:RolloutRole",
    "reward": "rlmq.producers.reward:RewardRole",
    "reference": "rlmq.producers.reference:ReferenceRole",
    "critic": "rlmq.consumers.critic:CriticRole",
    "reward_model": "rlmq.consumers.reward_model:RewardModelRole",
    "actor": "rlmq.consumers.actor:ActorRole",
    "recorder": "rlmq.consumers.recorder:RecorderRole",
}
"""Role → class; each is constructed as `Class(context, store)`."""

PRELOADED = (
    "torch.distributed",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_utils",
    "rlmq.cli",
    "rlmq.cli_process",
    "rlmq.common.worker_loop",
    "rlmq.common.engines.hf",
    "rlmq.common.engines.torch_trainer",
    "rlmq.common.models",
    "rlmq.consumers.actor",
    "rlmq.producers.rollout",
)
"""What processes that run a model have imported when they are forked."""

_NODE = "rlmq.producers.node:NodeRole"
_CAPACITY_ROWS = 1_000_000
"""The schedule bounds what is in flight; the table's own limit is a fuse."""

_LEASE_MARGIN_S = 2.0
_LEASE_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Process:
    """What a process of a run starts with."""

    recipe: Recipe
    recipe_folder: Path
    run: RunFolder
    log: structlog.stdlib.BoundLogger
    store: ExperienceStore
    calls: Calls
    fingerprint: str


def start_process(
    recipe: Recipe, recipe_folder: Path, run: RunFolder, role: str, index: int, redis_url: str
) -> Process:
    """Connect a process of the run to its store and calls, and set up its log and metrics.

    Raises:
        DependencyError: the server does not answer. SchemaMismatch: the run's tables have other columns.
    """
    from rlmq import __version__
    from rlmq.buffer.redis_calls import RedisCalls
    from rlmq.buffer.slots import SlottedStore
    from rlmq.buffer.tables import sample_tables
    from rlmq.common.columns import fingerprint
    from rlmq.common.flow import flows_of, sample_columns
    from rlmq.common.logs import configure
    from rlmq.common.metrics import serve_metrics
    from rlmq.common.recipe.load import code_hash

    log = configure(role, index)
    flows = flows_of(recipe)
    columns = [column for flow in flows for column in sample_columns(flow)]
    tables = [table for flow in flows for table in sample_tables(flow, capacity_rows=_CAPACITY_ROWS)]
    joined = joined_nodes(run).get(role)
    if joined is not None:
        from rlmq.consumers.joined_node import stage_of

        tables[0] = replace(tables[0], stages=(*tables[0].stages, stage_of(joined)))
    store = SlottedStore(redis_url, run_id=run.run_id, worker=f"{role}-{index}", slots=recipe.slots)
    store.open(tables)
    store.recover()  # what a killed process of this name held is redelivered now, not when its lease is over
    calls = RedisCalls(redis_url, run_id=run.run_id)
    serve_metrics(role, index, run)
    code = code_hash(recipe, recipe_folder)
    if role == "controller":
        run.source.write_text(json.dumps({"folder": str(recipe_folder), "code": code}) + "\n")
    same = f"columns {fingerprint(columns)}, rlmq {__version__}, code {code}"
    return Process(recipe, recipe_folder, run, log, store, calls, same)


def check_place(recipe: Recipe, role: str, index: int) -> None:
    """Check that the recipe has a place for this worker; roles that may come and go have any number.

    Raises:
        UsageError: no such role, or fewer workers of it.
    """
    workers = recipe.workers()
    known_roles = dict.fromkeys((*ROLES, *workers))
    if role not in known_roles:
        raise UsageError("ROLE", got=repr(role), expected=f"one of {', '.join(known_roles)}")
    if role not in (*FIXED, *recipe.mesh_nodes) and role in workers and recipe.own_critic(role) is None:
        return
    if index >= workers.get(role, 0):
        known = f"0 to {workers[role] - 1}" if role in workers else "no worker of this role (kl_coef is 0)"
        raise UsageError(f"{role} --index", got=index, expected=known, remedy=f"Set placement.{role}.workers")


def role_class(role: str, process: Process) -> Callable[..., Role]:
    """What makes a role: rlmq's class, the user's own (a node whose function is a class with `work`), or a node's.

    Raises:
        UsageError: the user's file has no such class or function.
    """
    joined = joined_nodes(process.run).get(role)
    if joined is not None:
        from rlmq.consumers.joined_node import JoinedNode

        return partial(JoinedNode, block=joined)
    node = next((block for block in process.recipe.nodes if block.name == role), None)
    if node is not None and node.method is not None:
        from rlmq.consumers.mesh_node import MeshNode

        return MeshNode
    if node is not None and node.function is not None:
        found = load_function(node.function, process.recipe_folder, subject=f"node {role}")
        if isinstance(found, type) and hasattr(found, "work"):
            return found
    if role == "actor" and process.recipe.placement.actor.hybrid and process.recipe.data.recorded is None:
        return _hybrid_actor
    critic = process.recipe.own_critic(role)
    if critic is not None and critic.role is not None:
        return load_function(critic.role, process.recipe_folder, subject=f"critics: role of {role}")
    module, _, name = ROLES.get("critic" if critic is not None else role, _NODE).partition(":")
    made: Callable[..., Role] = getattr(importlib.import_module(module), name)
    return made


def _hybrid_actor(context: WorkerContext, store: ExperienceStore) -> Role:
    """The actor with the rollout's work, which lies in another layer."""
    from rlmq.consumers.hybrid_actor import HybridActorRole
    from rlmq.producers.hybrid_rollout import HybridRollout

    return HybridActorRole(context, store, HybridRollout(context, store).generate)


def wait_for_file(path: Path, what: str, deadline_s: float) -> None:
    """Wait until a file exists, for processes that are started before their run.

    Raises:
        DeadlineExceeded: it does not come.
    """
    deadline = time.monotonic() + deadline_s
    while not path.is_file():
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(
                what, got=f"no {path}", expected=f"it within {deadline_s:g} s", remedy="Start the run's controller"
            )
        time.sleep(0.1)


def worker_main(process: Process, role: str, rank: int) -> int:
    """Run one worker of a role; returns its exit code.

    After a change of version or user code the lease of the controller before it may still be live: wait that long.

    Raises:
        SchemaMismatch: the run's controller has another version or other user code.
    """
    from rlmq.common.worker_loop import Worker
    from rlmq.controller.dispatch import EPOCH_LEASE_S

    def make_role(context: WorkerContext) -> Role:
        gc.disable()  # imports make objects by the million and no garbage: looking for it is a quarter of the time
        made: Role = role_class(role, process)(context, process.store)
        gc.freeze()
        gc.enable()
        return made

    deadline = time.monotonic() + EPOCH_LEASE_S + _LEASE_MARGIN_S
    while True:
        try:
            worker = Worker(
                process.recipe,
                process.recipe_folder,
                process.run,
                role,
                rank,
                process.calls,
                process.fingerprint,
                process.log,
            )
        except SchemaMismatch:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LEASE_PAUSE_S)
        else:
            return worker.run(make_role)


def controller_main(process: Process) -> int:
    """Run the controller; returns the run's exit code.

    The lease of a killed controller outlives it: wait that long before calling it a living one.

    Raises:
        SecondController: another controller keeps its lease.
    """
    from rlmq.controller.controller import Controller
    from rlmq.controller.dispatch import EPOCH_LEASE_S

    controller = Controller(
        process.recipe,
        process.run,
        process.store,
        process.calls,
        process.fingerprint,
        process.log,
        process.recipe_folder,
    )
    deadline = time.monotonic() + EPOCH_LEASE_S + _LEASE_MARGIN_S
    told = False
    while True:
        try:
            return controller.main()
        except SecondController as error:
            if time.monotonic() >= deadline:
                raise
            if not told:
                process.log.info("waiting for the lease of another controller", reason=str(error))
            told = True
            time.sleep(_LEASE_PAUSE_S)


def apply_environment(changes: Mapping[str, str | None]) -> None:
    """Change this process's environment; before torch is imported, or its threads are there already."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
