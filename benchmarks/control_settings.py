"""What the processes of `rlmq bench control` share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlmq.common.recipe.schema import ControlBlock, Recipe

ROLE = "rollout"
HOST = "bench"


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement: where its run lies and how many workers it has."""

    run: Path
    redis_url: str
    address: str | None
    keys: str | None
    workers: int

    @property
    def control(self) -> ControlBlock:
        """How they talk."""
        return ControlBlock(address=self.address, keys=self.keys)

    @property
    def recipe(self) -> Recipe:
        """A recipe with all workers in one role; silence is not what is measured."""
        return Recipe.model_validate_json(
            json.dumps(
                {
                    "run": {"name": "bench"},
                    "model": "m",
                    "data": {"train": "t"},
                    "reward": [{"function": "r.py:f"}],
                    "train": {"steps": 1},
                    "placement": {"rollout": {"workers": self.workers}},
                    "deadlines": {"silence_s": 600.0, "step_s": 600.0},
                    "control": {"address": self.address, "keys": self.keys},
                }
            )
        )

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(
            {
                "run": str(self.run),
                "redis_url": self.redis_url,
                "address": self.address,
                "keys": self.keys,
                "workers": self.workers,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """From a command line."""
        values = json.loads(text)
        return cls(**{**values, "run": Path(values["run"])})
