"""The recipe's `algorithm` block."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlmq.common.recipe.block import Block, ClipWidth, PositiveFloat, PositiveInt


class AlgorithmBlock(Block):
    """The algorithm and its knobs. Each algorithm has its own defaults, and reads the keys that its page names."""

    name: str = Field(default="grpo", description="Algorithm: one of those that `rlmq algorithms` lists.")
    group_size: PositiveInt = Field(default=8, description="Samples per prompt.")
    clip: tuple[ClipWidth, ClipWidth] = Field(
        default=(0.2, 0.2), description="Clip range of the ratio below and above 1."
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="Ratio of each token, or one of the whole response (its length's root; GSPO)."
    )
    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the KL to the reference; 0 starts no reference."
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Where that KL counts: in the loss, or taken off each token's reward."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", description="How that KL is estimated.")
    kl_target: PositiveFloat | None = Field(
        default=None, description="KL per token that kl_coef is steered to from step to step; none: it is fixed."
    )
    kl_horizon: PositiveFloat = Field(
        default=10000.0, description="Samples over which kl_coef moves; less is faster."
    )
    loss_agg: Literal["token_mean", "sequence_mean", "sequence_sum"] = Field(
        default="token_mean",
        description="token_mean: one mean over all tokens; sequence_mean: mean over tokens, then over samples; "
        "sequence_sum: sum over tokens divided by max_response_tokens, then mean over samples.",
    )
    std_normalisation: bool = Field(
        default=True, description="Divide advantages by the group's standard deviation."
    )
    std_epsilon: PositiveFloat = Field(default=1.0e-6, description="Added to that standard deviation.")
    whiten: bool = Field(
        default=False, description="Shift and scale the advantages of all tokens of a batch to mean 0, variance 1."
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the policy's entropy, which is rewarded.")
    old_logprobs: Literal["trainer", "rollout"] = Field(
        default="trainer", description="Whose log-probs are the denominator of the ratio."
    )
    importance: Literal["none", "full", "truncated", "masked"] = Field(
        default="none",
        description="Correction of what the rollout's log-probs differ from the trainer's: weights as they are, "
        "cut at importance_cap, or tokens beyond it left out.",
    )
    importance_cap: PositiveFloat = Field(default=2.0, description="Greatest such weight.")
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount per token.")
    lam: float = Field(default=1.0, ge=0, le=1, description="GAE's lambda of the advantages.")
    value_clip: PositiveFloat | None = Field(
        default=0.2, description="Furthest that a value may move from its old one within a batch; none: freely."
    )
    overlong_tokens: int = Field(
        default=0, ge=0, description="Last tokens before max_response_tokens in which a penalty rises to 1 (DAPO)."
    )
    dynamic_sampling: bool = Field(
        default=False, description="Groups whose rewards are all equal are dropped, and other prompts come instead."
    )
    most_refills: PositiveInt = Field(default=4, description="Times that prompts are added to one step for that.")
    cost_limit: float = Field(default=0.0, description="Mean cost that the policy may have (Safe-RLHF).")
    multiplier: PositiveFloat = Field(default=1.0, description="First weight of the cost.")
    multiplier_lr: PositiveFloat = Field(default=0.1, description="Step of that weight's logarithm.")
    beta: PositiveFloat = Field(default=0.1, description="How closely DPO keeps to the reference.")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of preferences that are taken to be the wrong way round."
    )
    advantage: str | None = Field(
        default=None, description="Your own advantage, file.py:function(batch) -> one number a row or a token."
    )
    loss: str | None = Field(
        default=None, description="Your own loss, file.py:function(output, batch) -> one number a token."
    )
    loop: str | None = Field(default=None, description="Your own control loop, file.py:function(run).")

    @property
    def online(self) -> bool:
        """Whether it learns from samples that the policy generates; else from rows that the data bring."""
        from rlmq.common.algorithms import ALGORITHMS

        return ALGORITHMS[self.name].online

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        """The algorithm's own defaults, for what is not given."""
        from rlmq.common.algorithms import ALGORITHMS

        if not isinstance(given, dict):
            return given
        spec = ALGORITHMS.get(given.get("name", "grpo"))
        return {**spec.preset, **given} if spec is not None else given

    @model_validator(mode="after")
    def _known(self) -> AlgorithmBlock:
        """The algorithm is there, and reads what was given."""
        from rlmq.common.algorithms import ALGORITHMS

        spec = ALGORITHMS.get(self.name)
        if spec is None:
            raise ValueError(f"algorithm.name: one of {', '.join(ALGORITHMS)}")
        plain = {key: field.default for key, field in type(self).model_fields.items()} | dict(spec.preset)
        unread = [
            key
            for key, default in plain.items()
            if key not in spec.keys | {"name", "advantage", "loss", "loop"} and getattr(self, key) != default
        ]
        if unread:
            raise ValueError(f"only keys that {self.name} reads ({', '.join(sorted(spec.keys))}), not {unread[0]}")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmBlock:
        """No key is given that another one leaves without effect."""
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_coef above 0 where kl_target is given: it is what is steered")
        if self.importance != "none" and self.old_logprobs == "rollout":
            raise ValueError("old_logprobs: trainer with importance: else the ratio itself is to the rollout")
        return self

    @model_validator(mode="after")
    def _compares(self) -> AlgorithmBlock:
        """A row that is compared with others of its group has others. The user's own advantage may not compare."""
        from rlmq.common.algorithms import ALGORITHMS

        compares = "dynamic_sampling" in ALGORITHMS[self.name].keys and self.advantage is None
        if self.group_size < 2 and (compares or self.dynamic_sampling):
            raise ValueError(
                f"group_size of at least 2 for {self.name}, which compares the samples of a prompt; reinforce_pp, "
                "remax and ppo can do with 1"
            )
        return self
