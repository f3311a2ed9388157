"""`rlmq.Run`: a run declared in Python, whose loop steers it.

A script is three things (see `rlmq.common.script`): a command, a recipe, and the controller's loop. To know
the recipe before there is a run, the loop is *traced*: run for a few steps with nothing behind the handles. What
the handles were told then are settings of the recipe; one that tells them something else later has diverged.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlmq.algorithms import Settings
from rlmq.common import script
from rlmq.common.critics import CRITIC
from rlmq.common.errors import ControlLoopDiverged, UsageError
from rlmq.common.recipe.placement_block import ActorPlacement
from rlmq.common.user_code import spec_of
from rlmq.handles import Actor, Batch, Critic, Prompts, Reference, Reward, Update
from rlmq.tracing import ScriptSteering, Tracing

_PLACED = frozenset(ActorPlacement.model_fields)
"""Settings of a role that are its placement."""


class Run:
    """A run of this name. Nothing starts before `main`.

    Args:
        name: the same name continues an unfinished run.
        seed: of data order, sampling and initialisation.
        blocks: blocks of the recipe that no role declares: `evaluate={"every_steps": 10}`, `deterministic=True`.

    Example::

        run = rlmq.Run("letters", seed=7)
        actor = run.actor("Qwen/Qwen2.5-0.5B-Instruct", lr=1e-6)
    """

    def __init__(self, name: str, *, seed: int = 0, **blocks: Any) -> None:
        self._recipe: dict[str, Any] = {}
        for key, value in {"run.name": name, "run.seed": seed, **_flat(blocks)}.items():
            self._put(key, value)
        self._settled: dict[str, Any] = {}
        self._steering: ScriptSteering | None = None
        self._step = 0
        self._asked: dict[str, bool] = {}
        """Roles that the step's loop has an update of, and whether it is made."""
        self._waited: tuple[str, ...] = ()
        self._critics: list[str] = []
        self._done: set[str] = set()

    # -- declarations --------------------------------------------------------------------------------------

    def actor(self, model: Any, **settings: Any) -> Actor:
        """The policy. `settings` are keys of the recipe's `train` block (`lr`, …) and of `placement.actor`."""
        self._put("model", _source(model))
        self._declare("actor", "train", settings)
        return Actor(self, "actor")

    def critic(self, model: Any = None, *, name: str = CRITIC, **settings: Any) -> Critic:
        """A critic. `settings` are keys of the recipe's `critic` block, and `workers`, `threads`.

        With a name it is one more, a role of its own: an item of the recipe's `critics`, whose keys `settings` are
        (`learns`, `role`, …).
        """
        if name != CRITIC:
            self._recipe.setdefault("critics", []).append({"name": name})
        if model is not None and _source(model) != self._recipe.get("model"):
            self._put(f"{self.block_of(name)}.model", _source(model))
        self._declare(name, self.block_of(name), settings)
        self._critics.append(name)
        return Critic(self, name)

    def block_of(self, role: str) -> str:
        """Where the recipe has a trained role's settings."""
        if role == "actor":
            return "train"
        own = [item["name"] for item in self._recipe.get("critics", [])]
        return f"critics.{own.index(role)}" if role in own else role

    def reference(self, model: Any = None, **settings: Any) -> Reference:
        """The actor's model as it was in the beginning."""
        if model is not None and _source(model) != self._recipe.get("model"):
            raise UsageError("reference", got=repr(_source(model)), expected="the actor's model")
        self._declare("reference", "", settings)
        return Reference(self, "reference")

    def reward(self, functions: Sequence[Any], **settings: Any) -> Reward:
        """Reward functions: `"file.py:function"`, a function of the script, or an item of the recipe's `reward`.

        `settings` are keys of each item (`weight`, `timeout_s`, `name`), and `workers`, `threads`. Declared again,
        it is another round of scores under columns of its own.
        """
        placed: dict[str, Any] = {key: settings.pop(key) for key in ("workers", "threads") if key in settings}
        self._declare("reward", "", placed)
        items = [
            dict(one) if isinstance(one, Mapping) else {"function": _source(one), **settings} for one in functions
        ]
        self._recipe.setdefault("reward", []).extend(items)
        names = (one.get("name") or str(one.get("function", "")).rpartition(":")[2] for one in items)
        return Reward(self, "reward", tuple(names))

    def set_reward_controller(self, function: Any) -> None:
        """Weights of the rewards by step: a function of the script, or `"file.py:function"`, that returns
        `{name: weight}` for a step."""
        self._put("reward_controller", _source(function))

    def prompts(
        self, source: Any, *, per_step: int, max_tokens: int | None = None, samples: int | None = None, **data: Any
    ) -> Prompts:
        """Prompts: a file, `"file.py:function"`, or a function of the script.

        Args:
            source: of the training prompts.
            per_step: prompts of each step.
            max_tokens: longest prompt.
            samples: of each prompt (`algorithm.group_size`).
            data: other keys of the recipe's `data` block (`eval`, `passes`, …).
        """
        given = {"train": _source(source), "prompts_per_step": per_step, "max_prompt_tokens": max_tokens, **data}
        for key, value in given.items():
            if value is not None:
                self._put(f"data.{key}", _source(value) if callable(value) else value)
        if samples is not None:
            self._put("algorithm.group_size", samples)
        return Prompts(self, "prompts")

    def _declare(self, role: str, block: str, settings: Mapping[str, Any]) -> None:
        for key, value in settings.items():
            placed = (key in _PLACED and not block.startswith("critics.")) or not block
            self._put(f"placement.{role}.{key}" if placed else f"{block}.{key}", value)

    def _put(self, key: str, value: Any) -> None:
        *blocks, last = key.split(".")
        place: Any = self._recipe
        for block in blocks:
            place = place[int(block)] if isinstance(place, list) else place.setdefault(block, {})
        place[last] = value

    # -- the loop ------------------------------------------------------------------------------------------

    def main(self, loop: Callable[[], None]) -> None:
        """Do what this process is for: steer the run, write its recipe, or all that `rlmq up` does.

        Command-line arguments are those of `rlmq up`: `python ppo.py --fresh train.steps=2`.
        """
        if (steering := script.steering()) is not None:
            self.bind(steering)
            loop()
            return
        self.begin(loop, "run.main(loop)")

    def begin(self, loop: Callable[[], None], what: str) -> None:
        """Write the recipe, or do all that `rlmq up` does; then the process ends."""
        script.must_be_main(what)
        if script.asked_for_recipe():
            script.write_recipe(json.dumps(self.recipe(loop, Path(sys.argv[0]).resolve()), indent=1))
            raise SystemExit(0)
        from rlmq.cli import main

        sys.argv = ["rlmq", "up", *sys.argv]
        main()

    def bind(self, steering: ScriptSteering) -> None:
        """Steer this run from now on."""
        self._steering = steering

    def recipe(self, loop: Callable[[], None], file: Path) -> dict[str, Any]:
        """The recipe: what was declared, and what the first steps of the loop tell the handles."""
        self.bind(Tracing())
        try:
            loop()
        finally:
            self._steering = None
        for key, value in self._settled.items():
            self._put(key, value)
        self._put("algorithm.loop", f"{file.name}:__main__")
        return self._recipe

    @property
    def steering(self) -> ScriptSteering:
        """What the loop steers.

        Raises:
            UsageError: it is not inside `main`.
        """
        if self._steering is None:
            raise UsageError(
                f"run {self._recipe['run']['name']!r}",
                got="a handle used outside of the loop",
                expected="run.main(loop)",
            )
        return self._steering

    def steps(self, count: int) -> Iterator[int]:
        """Step numbers from the open step on, up to `count` (`train.steps`).

        Before the first one the weights are published and evaluated; after each, the step is evaluated and saved
        when it is its turn, unless the loop has done so.
        """
        run = self.steering
        if isinstance(run, Tracing):
            run.total_steps = count
        self.settle({"train.steps": count})
        return self.all_steps()

    def all_steps(self) -> Iterator[int]:
        """As `steps`, up to what the recipe says."""
        run = self.steering
        run.publish(0)
        run.evaluate(0)
        for step in run.steps():
            self._step, self._asked, self._done = step, {}, set()
            yield step
            self._end_step(run, step)
        self._step = 0

    def _end_step(self, run: ScriptSteering, step: int) -> None:
        needed = self._critics[0] if self._critics else "actor"
        if needed not in self._asked:
            raise UsageError(f"step {step} of the loop", got="no update", expected=f"{needed}.update(batch)")
        for role in tuple(self._asked):
            self.train(step, role)
        for name in ("evaluate", "checkpoint"):
            if name not in self._done:
                getattr(self, name)()

    def settle(self, settings: Settings) -> None:
        """Keep what a handle was told.

        Raises:
            ControlLoopDiverged: it was told something else before.
        """
        for key, value in settings.items():
            known = self._settled.setdefault(key, value)
            if known != value:
                raise ControlLoopDiverged(
                    f"{key} in step {self._step} of the loop",
                    got=str(value),
                    expected=f"{known}, as before",
                    remedy="Settings are the run's, not a step's",
                )

    def admit(self) -> Batch:
        """See `Prompts.next`."""
        self._once("prompts.next()")
        self.steering.admit(self._step)
        return Batch(self, self._step, ("prompt_ids", "prompt_text"), ("prompts",))

    def ask(self, batch: Batch, role: str) -> Update:
        """See `Trained.update`."""
        self._once(f"{role}.update(...)")
        if batch.step != self._step:
            raise UsageError(
                f"{role}.update", got=f"the batch of step {batch.step}", expected=f"that of step {self._step}"
            )
        if any(self._asked.values()):
            raise UsageError(f"{role}.update", got="a step that is trained", expected="all updates, then wait()")
        self._asked[role] = False
        self._waited = batch.stages
        return Update(self, self._step, role)

    def train(self, step: int, role: str, timeout_s: float | None = None) -> dict[str, Any]:
        """See `Update.wait`: train all that the step's loop asked for, once, and tell the role's figures."""
        run = self.steering
        if step == self._step and not self._asked[role]:
            for stage in self._waited if timeout_s is not None else ():
                run.passed(stage, timeout_s)
            run.wait_batch(step)
            if self._critics:
                run.form(step, update="actor" in self._asked)
                run.train_both(step)
            else:
                run.train(step)
            self._asked = dict.fromkeys(self._asked, True)
        return run.last_train if isinstance(run, Tracing) else dict(run.last_train)

    def publish(self) -> None:
        """See `Actor.publish`."""
        for role in tuple(self._asked):
            self.train(self._step, role)
        self.steering.publish(self._step)

    def evaluate(self) -> None:
        """Generate and score the evaluation sets, when it is their turn."""
        self._done.add("evaluate")
        self.steering.evaluate(self._step)

    def checkpoint(self) -> None:
        """Save a checkpoint, when it is its turn."""
        self._done.add("checkpoint")
        self.steering.checkpoint(self._step)

    def call(self, node: str, method: str, rows: Sequence[Any], *, sizes: Sequence[int] = ()) -> list[Any]:
        """Call a registered method of a node that is a mesh of ranks (see `register`) on plain values.

        Returns:
            What its transfer protocol collects: a result per row in their order, or one per collected rank. []
            while the script's settings are read off, before there is a run.
        """
        values = self.steering.call(node, method, {"rows": list(rows), "sizes": list(sizes)})
        return next((one["results"] for one in values if "results" in one), [])

    def log(self, figures: Mapping[str, Any]) -> None:
        """Add figures to the step's line of `metrics.jsonl`."""
        self.steering.note({key: value for key, value in figures.items() if not isinstance(value, dict)})

    def _once(self, what: str) -> None:
        if self._step == 0 or what in self._done:
            where = "outside of run.steps()" if self._step == 0 else f"twice in step {self._step}"
            raise UsageError(what, got=f"a call {where}", expected="one in each step")
        self._done.add(what)


def _source(value: Any) -> str:
    """How the recipe names it: a path, a model, or a function of a file."""
    if inspect.isfunction(value):
        return spec_of(value, subject="run").removeprefix(f"{Path(sys.argv[0]).resolve().parent}/")
    with suppress(AttributeError):
        return str(value.name)
    return str(value)


def _flat(blocks: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested blocks as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in blocks.items():
        nested = isinstance(value, Mapping)
        found |= _flat(value, f"{before}{key}.") if nested else {f"{before}{key}": value}
    return found
