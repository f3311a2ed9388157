"""The recipe's `data` block."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from rlmq.common.recipe.block import Block, PositiveInt


class DifficultyBlock(Block):
    """Prompts by how many of their samples passed, when they were last trained on."""

    window: tuple[float, float] | None = Field(
        default=None, description="Least and greatest pass rate of the prompts that are taken; none: all are."
    )
    pass_reward: float = Field(default=1.0, description="Least reward of a sample that passes.")
    outside: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Part of the other prompts that are taken all the same, to be measured.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> DifficultyBlock:
        if self.window is not None and not 0 <= self.window[0] <= self.window[1] <= 1:
            raise ValueError("window: [least, greatest], both from 0 to 1")
        return self


class MixtureBlock(Block):
    """How the training sets are mixed from a step on."""

    from_step: PositiveInt = Field(default=1, description="First step of these weights.")
    weights: dict[str, float] = Field(
        description="Weight of each training set by name; sets without one are left out."
    )

    @field_validator("weights")
    @classmethod
    def _some_weight(cls, weights: dict[str, float]) -> dict[str, float]:
        if not weights or min(weights.values()) < 0 or sum(weights.values()) == 0:
            raise ValueError("weights of 0 or more, at least one above 0")
        return weights


class DataBlock(Block):
    """Prompts: files or functions, and how long a prompt may be."""

    train: str | dict[str, str] = Field(
        description="Prompts: .jsonl, .parquet, or file.py:function returning a list of rows; where they bring "
        "their responses, also a recording: the folder of a run's samples, or its URL. Or a mapping of names to "
        "such sets, see mixture."
    )
    recorded: Literal["groups", "steps"] | None = Field(
        default=None,
        description="Train on the recordings in data.train and generate nothing: groups in the order of the data, "
        "or in each step the rows that the recorded run had in it.",
    )
    best_of_group: bool = Field(
        default=False, description="Of each recorded group only the response with the most reward (sft: best of n)."
    )
    mixture: tuple[MixtureBlock, ...] = Field(
        default=(), description="Weights of the training sets by step (a curriculum); none: all prompts alike."
    )
    difficulty: DifficultyBlock = Field(default_factory=DifficultyBlock)
    eval: str | dict[str, str] | None = Field(
        default=None, description="Evaluation sets: one source, or a mapping of names to sources."
    )
    min_reward: float | None = Field(
        default=None, description="Recorded rows with less reward are not trained on (sft, dpo, reward_model)."
    )
    max_prompt_tokens: PositiveInt = Field(default=512, description="Longest prompt in tokens, template included.")
    long_prompts: Literal["refuse", "skip", "cut_left"] = Field(
        default="refuse", description="What happens to longer prompts; skipped and cut ones are counted."
    )
    prompts_per_step: PositiveInt = Field(
        default=8, description="Prompts per training step; each gets group_size samples."
    )
    passes: PositiveInt | None = Field(
        default=None, description="Passes over the data after which the run ends; none: train.steps alone decides."
    )
    shuffle: bool = Field(default=True, description="A new seeded order in each pass; false: file order.")

    @field_validator("eval")
    @classmethod
    def _some_sets(cls, sets: str | dict[str, str] | None) -> str | dict[str, str] | None:
        if sets == {}:
            raise ValueError("at least one set, or none at all")
        return sets

    @model_validator(mode="after")
    def _recorded_alone(self) -> DataBlock:
        if self.recorded is not None and (self.eval is not None or self.difficulty.window is not None):
            raise ValueError("recorded: no eval and no difficulty.window, since nothing is generated")
        return self

    @model_validator(mode="after")
    def _mixture_of_sets(self) -> DataBlock:
        names = list(self.train) if isinstance(self.train, dict) else []
        if isinstance(self.train, dict) and not names:
            raise ValueError("train: at least one set")
        unknown = [name for one in self.mixture for name in one.weights if name not in names]
        if unknown:
            raise ValueError(
                f"mixture: names of data.train ({', '.join(names) or 'which is one set'}), not {unknown[0]}"
            )
        if self.mixture and (self.mixture[0].from_step != 1 or self.passes is not None):
            raise ValueError("mixture: from_step 1 first, and no passes (a mixture has no end)")
        if self.difficulty.window is not None and (self.mixture or self.passes is not None):
            raise ValueError("difficulty: no mixture and no passes with a window, which passes prompts over")
        if [one.from_step for one in self.mixture] != sorted({one.from_step for one in self.mixture}):
            raise ValueError("mixture: each from_step greater than the one before")
        return self
