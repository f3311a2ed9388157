"""Who runs on which device, and whether the memory is there: from the recipe, before anything starts.

A device is a GPU; where there is none, a core, and all cores share the machine's memory. Estimates count weights,
gradients, optimizer state, keys and values, and the logits of one micro-batch; other activations are not in them.
Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlmq.common.errors import UsageError
from rlmq.common.models import resolve_model
from rlmq.common.processes import cores
from rlmq.common.recipe.schema import Recipe
from rlmq.common.user_code import is_spec

GIB = 1 << 30
_PROCESS_BYTES = 150 << 20
"""Of a process before it has a model; the libraries' own memory is shared by those of one fork server."""
_WITH_MODEL = ("rollout", "reference", "actor", "critic", "reward_model")


@dataclass(frozen=True, slots=True)
class Devices:
    """What this machine has: `kind` is gpu or core; bytes of each GPU, or of the machine."""

    kind: str
    bytes: tuple[int, ...]

    @property
    def count(self) -> int:
        """GPUs, or cores."""
        return len(self.bytes) if self.kind == "gpu" else cores()


@dataclass(frozen=True, slots=True)
class Placed:
    """One process: its device (None: it was given none), and the bytes that it is expected to need; 0: unknown."""

    name: str
    role: str
    device: int | None
    bytes: int


@cache
def devices_here() -> Devices:
    """The GPUs that `nvidia-smi` lists, else this machine's cores and memory."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        told = []
    if told:
        return Devices("gpu", tuple(int(one) << 20 for one in told))
    return Devices("core", (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),))


def device_of(recipe: Recipe, role: str, index: int) -> int | None:
    """The device of a worker; None: it was given none."""
    own: Sequence[int] = getattr(recipe.place_of(role), "devices", ())
    return own[index % len(own)] if own else None


def check_devices(recipe: Recipe, here: Devices) -> None:
    """Raises UsageError: a role has a device that is not there."""
    for role in recipe.workers():
        for device in getattr(recipe.place_of(role), "devices", ()):
            if device >= here.count:
                raise UsageError(
                    f"placement.{role}.devices",
                    got=device,
                    expected=f"0 to {here.count - 1}: this machine has {here.count} {here.kind}s",
                    remedy="Start the roles of other machines there (`rlmq worker`), or name devices of this one",
                )


def placements(recipe: Recipe, folder: Path) -> list[Placed]:
    """Every process of the run, in starting order."""
    found = []
    for role, count in recipe.workers().items():
        model = _shape_of(_model_of(recipe, role), folder) if role in _WITH_MODEL else {}
        need = _bytes(recipe, role, model) if model else 0
        found += [Placed(f"{role}-{i}", role, device_of(recipe, role, i), need) for i in range(count)]
    return found


def check_memory(recipe: Recipe, placed: Sequence[Placed], here: Devices) -> None:
    """Raises UsageError: a device cannot hold what is placed on it; those without a device share the first."""
    limits = {device: pool.memory_gib for pool in recipe.placement.pools for device in pool.devices}
    wanted: dict[int, list[Placed]] = defaultdict(list)
    for one in placed:
        wanted[(one.device or 0) if here.kind == "gpu" else 0].append(one)
    for device, there in sorted(wanted.items()):
        own = limits.get(device) if here.kind == "gpu" else None
        room = int(own * GIB) if own is not None else here.bytes[min(device, len(here.bytes) - 1)]
        need = sum(one.bytes for one in there)
        if need > room:
            roles = Counter(one.role for one in there if one.bytes)
            first = max(there, key=lambda one: one.bytes)
            raise UsageError(
                f"memory of {'GPU ' + str(device) if here.kind == 'gpu' else 'this machine'}",
                got=f"{need / GIB:.1f} GiB for {', '.join(f'{count} {role}' for role, count in roles.items())}",
                expected=f"at most {room / GIB:.1f} GiB",
                remedy=f"{first.name} needs most, {first.bytes / GIB:.1f} GiB: placement.actor.strategy fsdp on "
                "more devices, train.lora.r, train.dtype bfloat16, a smaller model or fewer workers",
            )


def _model_of(recipe: Recipe, role: str) -> str:
    own: str | None = getattr(getattr(recipe, role, None), "model", None)
    return own or recipe.model


def _shape_of(model: str, folder: Path) -> Mapping[str, Any]:
    """Nothing for a model that is not on this machine, which is not fetched for this, or that cannot be loaded."""
    if is_spec(model) or (folder / Path(model).expanduser()).exists():
        with suppress(UsageError):  # told by those who load it
            return _shape(resolve_model(model, folder))
    return {}


@cache
def _shape(folder: str) -> Mapping[str, Any]:
    """`parameters`, and of `config.json` what keys and values and logits take."""
    parameters = 0
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, one in header.items():
            size = 1
            for extent in one["shape"] if name != "__metadata__" else [0]:
                size *= extent
            parameters += size
    config = json.loads((Path(folder) / "config.json").read_text())
    config = config.get("text_config") or config
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    cached = layers * (config.get("num_key_value_heads") or heads) * (config.get("head_dim") or hidden // heads)
    return {"parameters": parameters, "cached": 2 * cached, "vocabulary": config.get("vocab_size") or 0}


def _bytes(recipe: Recipe, role: str, model: Mapping[str, Any]) -> int:
    """Of one process of a role."""
    count, served = model["parameters"], 2 if recipe.train.dtype == "bfloat16" else 4
    rollout = recipe.rollout
    if role == "rollout":
        tokens = rollout.batch_size_per_device * (recipe.data.max_prompt_tokens + rollout.max_response_tokens)
        return int(2 * served * count + served * tokens * model["cached"] + _PROCESS_BYTES)
    logits = 8 * min(recipe.train.micro_batch_tokens, 1 << 16) * model["vocabulary"]
    master = 4 if served == 2 else 0
    if role == "reference":
        return int((served + master) * count + logits // 2 + _PROCESS_BYTES)
    # Bytes of a parameter: computing weight, master, gradient, two moments.
    weight, gradient, state = float(served + master), 4.0, 8.0
    if role == "actor":
        actor = recipe.placement.actor
        ranks, stage = actor.workers, actor.strategy_options.get("stage", 2)
        if recipe.train.lora.r is not None:
            weight, gradient, state = float(served), 0.0, 0.0
        if actor.strategy == "3d":
            count //= actor.pp * actor.tp
        elif actor.strategy == "fsdp":
            count //= ranks
        elif actor.strategy == "deepspeed":
            state, gradient = state / ranks, gradient / (ranks if stage > 1 else 1)
            weight = weight / ranks if stage > 2 else served + master / ranks
        return int((weight + gradient + state) * count + logits + _PROCESS_BYTES)
    return int((weight + gradient + state) * count + _PROCESS_BYTES)
