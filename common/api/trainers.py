"""Whole trainers, one `step()` at a time: the script that calls them is the control loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmq.common import script
from rlmq.run import Run


class _Trainer:
    """A run whose loop is the algorithm's, driven from outside.

    The first `step()` of a script that was started by hand does what `rlmq up` does, and the process ends with it;
    in the controller of that run the script is run again, and `step()` makes the run's next step. What the script
    prints is in the controller's log.
    """

    _algorithm = ""

    def __init__(self, model: Any, reward: Any, config: Mapping[str, Any], critic: Any = None) -> None:
        """See the class that is built."""
        given = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
        run = dict(given.pop("run", {}))
        rewards = [reward] if isinstance(reward, str) or not isinstance(reward, Sequence) else reward
        name = run.pop("name", Path(sys.argv[0]).stem or self._algorithm)
        self._run = Run(name, seed=run.pop("seed", 0), run=run, **given)
        self._run.settle({"algorithm.name": self._algorithm})
        self._actor = self._run.actor(model)
        self._run.reward(rewards)
        self._critic = None if critic is None else self._run.critic(critic)
        self._taken = 0
        self._steps: Iterator[int] | None = None

    def step(self) -> dict[str, Any]:
        """Make the next step; returns its metrics. A step that was made before a crash is not made again.

        Raises:
            SystemExit: there are no more steps: `train.steps`, or the data, have ended.
        """
        if script.steering() is None:
            self._run.begin(lambda: None, "step()")
        run = self._run
        if self._steps is None:
            run.bind(script.steering())
            self._steps = run.all_steps()
        self._taken += 1
        if self._taken < run.steering.open_step:
            return run.steering.figures(self._taken)
        if next(self._steps, None) is None:
            raise SystemExit(0)
        batch = run.admit()
        updates = [one.update(batch) for one in (self._critic, self._actor) if one is not None]
        metrics = {key: value for update in updates for key, value in update.wait().items()}
        self._actor.publish()
        if self._taken >= run.steering.total_steps:
            next(self._steps, None)
        return metrics


class GRPOTrainer(_Trainer):
    """GRPO.

    Args:
        model: the policy: a Hugging Face folder or hub id, `rlmq.load_hf_model(...)`, or `"file.py:function"`.
        reward: reward functions, as `rlmq.Run.reward` takes them; or one of them.
        config: blocks of the recipe: `{"data": {"train": …}, "train": {"steps": 100}, …}`.
    """

    _algorithm = "grpo"

    def __init__(self, model: Any, reward: Any, config: Mapping[str, Any]) -> None:
        super().__init__(model, reward, config)


class PPOTrainer(_Trainer):
    """PPO.

    Args:
        actor: the policy, as `GRPOTrainer` takes it.
        critic: the critic's model.
        reward_model: reward functions, as `rlmq.Run.reward` takes them; or one of them.
        config: blocks of the recipe.
    """

    _algorithm = "ppo"

    def __init__(self, actor: Any, critic: Any, reward_model: Any, config: Mapping[str, Any]) -> None:
        super().__init__(actor, reward_model, config, critic)
