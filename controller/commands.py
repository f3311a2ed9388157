"""The processes of a run: command line, threads, environment, and what each reads of the recipe.

`rlmq up` starts exactly these commands; started by hand they do the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmq.common.control import TRAINERS
from rlmq.common.joined_nodes import joined_nodes
from rlmq.common.placement import device_of, devices_here
from rlmq.common.processes import cores
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder

COMPUTE_ROLES = ("rollout", "reference", *TRAINERS)

_FOREIGN = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)
"""Variables of other launchers: a run on this machine must not meet another one at their address."""

READS: Mapping[str, tuple[str, ...]] = {
    "controller": ("run", "algorithm", "data", "train", "evaluate", "checkpoint", "deadlines", "track", "redis"),
    "prompts": (
        "run",
        "model",
        "algorithm.name",
        "algorithm.group_size",
        "data",
        "losses",
        "rollout.batch_size_per_device",
        "rollout.chunk_rows",
        "evaluate",
        "redis",
    ),
    "rollout": (
        "run",
        "model",
        "rollout",
        "evaluate",
        "train.dtype",
        "train.lora",
        "deterministic",
        "deadlines.sync_s",
        "redis",
    ),
    "reward": (
        "run",
        "reward",
        "reward_controller",
        "nodes",
        "algorithm",
        "rollout.truncated",
        "rollout.truncation_penalty",
        "redis",
    ),
    "reference": ("run", "model", "train.dtype", "train.micro_batch_tokens", "redis"),
    **dict.fromkeys(
        TRAINERS,
        (
            "run",
            "model",
            "critic",
            "critics",
            "reward_model",
            "algorithm",
            "losses",
            "rollout",
            "train",
            "checkpoint",
            "deterministic",
            "deadlines",
            "redis",
        ),
    ),
    "recorder": ("run", "reward", "nodes", "losses", "evaluate", "redis"),
}
"""Blocks and keys of the recipe that a process of each role reads."""
_BASE = (sys.executable, "-P", "-m", "rlmq.cli")
_NODE_READS = ("run", "nodes", "algorithm.group_size", "redis")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start. `environment` holds what differs from the caller's; None removes a variable."""

    role: str
    index: int
    argv: tuple[str, ...]
    environment: Mapping[str, str | None]
    reads: tuple[str, ...] = ()
    forked: bool = False
    """It is forked from a process that has imported torch already; see `rlmq.controller.fork_server`."""
    joined: bool = False
    """It joined the run later, which goes on without it."""

    @property
    def name(self) -> str:
        """`rollout-0`; also the stem of its log."""
        return f"{self.role}-{self.index}"

    def full_environment(self) -> dict[str, str]:
        """The caller's environment with this process's changes."""
        changed = {**os.environ, **{k: v for k, v in self.environment.items() if v is not None}}
        return {k: v for k, v in changed.items() if self.environment.get(k, "") is not None}


def threads(recipe: Recipe, role: str) -> int:
    """Compute threads of a process of this role: as placed, else all cores for roles that run a model."""
    placed = recipe.place_of(role)
    if placed is not None and placed.threads is not None:
        return placed.threads
    if getattr(placed, "devices", ()) and devices_here().kind == "core":
        return 1
    return cores() if role in COMPUTE_ROLES or getattr(placed, "model", None) is not None else 1


def process_environment(recipe: Recipe, role: str) -> dict[str, str | None]:
    """Environment variables that a process of this role sets (or, None, removes) before it imports torch."""
    count = str(threads(recipe, role))
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        # Spinning threads of one process would take the cores from the one that works.
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(name for name in _FOREIGN if name in os.environ),
    }


def process_specs(recipe: Recipe, recipe_path: Path, overrides: Sequence[str], run: RunFolder) -> list[ProcessSpec]:
    """Controller and workers of a run, in starting order."""
    tail = (str(recipe_path), *overrides, "--run", str(run.path))
    specs = [_spec(recipe, "controller", 0, (*_BASE, "controller", *tail))]
    for role, count in recipe.workers().items():
        for index in range(count):
            specs.append(_spec(recipe, role, index, (*_BASE, "worker", role, "--index", str(index), *tail)))
    return specs + joined_specs(recipe, recipe_path, overrides, run)


def joined_specs(recipe: Recipe, recipe_path: Path, overrides: Sequence[str], run: RunFolder) -> list[ProcessSpec]:
    """Workers of nodes that joined the run."""
    found = []
    for name, block in joined_nodes(run).items():
        known = recipe.model_copy(update={"nodes": (block,)})
        for index in range(block.workers):
            tail = (str(recipe_path), *overrides, "--run", str(run.path))
            argv = (*_BASE, "worker", name, "--index", str(index), *tail)
            found.append(replace(_spec(known, name, index, argv), joined=True))
    return found


def _spec(recipe: Recipe, role: str, index: int, argv: tuple[str, ...]) -> ProcessSpec:
    critic = recipe.own_critic(role) is not None
    reads = (*READS.get("critic" if critic else role, _NODE_READS), "control")
    placed = recipe.place_of(role)
    forked = role in COMPUTE_ROLES or bool(getattr(placed, "model", None) or getattr(placed, "method", None))
    environment, device = process_environment(recipe, role), device_of(recipe, role, index)
    if device is not None and devices_here().kind == "gpu":
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    return ProcessSpec(role, index, argv, environment, reads, forked)
