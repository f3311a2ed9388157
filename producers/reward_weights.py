"""Weights of the rewards by the step of a row: an operator's, those of the user's controller, or the recipe's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlmq.common.errors import UsageError
from rlmq.common.recipe.schema import Recipe
from rlmq.common.user_code import load_function, source_file, user_error
from rlmq.common.worker import WorkerContext
from rlmq.producers.reward_values import UnusableValue, to_number

_KEY = "reward_controller"
_STEPS_KNOWN = 100

Weights = tuple[float, ...]
"""One per reward function."""


class RewardController:
    """The recipe's `reward_controller`, or its plain weights where there is none.

    Raises:
        UsageError: it is not there.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self._names = recipe.reward_names
        self._spec, self._folder = recipe.reward_controller, folder
        self.of_recipe: Weights = tuple(block.weight for block in recipe.reward)
        self._function = None if self._spec is None else load_function(self._spec, folder, subject=_KEY)

    def of(self, step: int) -> Weights:
        """Weights of a step.

        Raises:
            UsageError: the function raises, names a weight of no reward, or gives one that is no number.
        """
        if self._function is None or self._spec is None:
            return self.of_recipe
        subject = f"{_KEY} ({self._spec}), step {step}"
        try:
            given = self._function(step)
        except Exception as error:  # the user's code may raise anything
            file = source_file(self._spec, self._folder, subject=_KEY)
            raise user_error(error, file, subject=subject) from error
        if not isinstance(given, Mapping) or not set(given) <= set(self._names):
            wrong = (
                sorted(map(repr, set(given) - set(self._names))) if isinstance(given, Mapping) else [repr(given)]
            )
            raise UsageError(
                subject, got=", ".join(wrong), expected=f"weights by name, of {', '.join(self._names)}"
            )
        weights: list[float] = []
        for name, own in zip(self._names, self.of_recipe, strict=True):
            try:
                weight = to_number(given.get(name, own))
            except UnusableValue:
                weight = None
            if weight is None or not math.isfinite(weight):
                raise UsageError(subject, got=f"{name}: {given[name]!r}", expected="a finite number")
            weights.append(weight)
        return tuple(weights)


class StepWeights:
    """Weights as a reward worker uses them: what an operator set from a step on comes before the controller's.

    Settings of a step are in the records before its rows are, so that they are read once for each new step.

    Raises:
        UsageError: see `RewardController`.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._calls = context.calls
        self._role = context.role
        self._names = [f"reward.{name}.weight" for name in context.recipe.reward_names]
        self._controller = RewardController(context.recipe, context.recipe_folder)
        self._known: dict[int, Weights] = {}
        self.of_recipe = self._controller.of_recipe
        self._controller.of(1)

    def of(self, step: int) -> Weights:
        """Weights of the rows of this step, one per function."""
        if step not in self._known:
            if len(self._known) >= _STEPS_KNOWN:
                self._known.clear()
            desired = self._calls.wanted(self._role)
            settings = desired.settings if desired is not None else {}
            pairs = zip(self._names, self._controller.of(step), strict=True)
            self._known[step] = tuple(_at_step(settings.get(name, ()), step, weight) for name, weight in pairs)
        return self._known[step]


def _at_step(changes: Sequence[tuple[int, str]], step: int, weight: float) -> float:
    """The newest value that counts for the step."""
    return next((float(value) for first, value in reversed(changes) if first <= step), weight)
