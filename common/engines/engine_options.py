"""What a recipe may say to one engine beside what all engines understand (`rollout.engine_options`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlmq.common.recipe.block import Block, PositiveFloat, PositiveInt

Share = Annotated[float, Field(gt=0, le=1)]


class NoOptions(Block):
    """An engine without options."""


class VllmOptions(Block):
    """Options of `vllm`."""

    tensor_parallel: PositiveInt = Field(default=1, description="Ranks that hold one model together.")
    kv_cache_gib: PositiveInt = Field(default=1, description="Keys and values, on the CPU.")
    gpu_memory_share: Share = Field(default=0.5, description="Of the GPU's memory, for weights, keys and values.")
    compile: bool = Field(default=False, description="Compile the model: a slow start, faster steps.")
    prefix_cache: bool = Field(default=True, description="Keep keys and values of equal beginnings.")
    sleep: bool = Field(default=True, description="Give the GPU's memory back while training runs.")


class HttpOptions(Block):
    """Options of `http`."""

    url: str = Field(pattern=r"^https?://", description="The server's address, up to and without /v1.")
    model: str | None = Field(default=None, description="Name of the model there; none: the first that it lists.")
    key_variable: str | None = Field(default=None, description="Environment variable that holds the API key.")
    update: Literal["none", "vllm"] = Field(
        default="none",
        description="How new weights get there: not at all, or vLLM's reload_weights from weights_folder.",
    )
    weights_folder: str | None = Field(default=None, description="Folder that this process and the server share.")
    timeout_s: PositiveFloat = Field(default=120.0, description="Longest silence of the server.")

    @property
    def takes_weights(self) -> bool:
        """Whether a policy that is trained can be served."""
        return self.update != "none"

    @model_validator(mode="after")
    def _where(self) -> HttpOptions:
        if self.takes_weights and self.weights_folder is None:
            raise ValueError("weights_folder with update: vllm")
        return self


class DeepSpeedOptions(Block):
    """Options of `deepspeed`."""

    stage: Literal[1, 2, 3] = Field(
        default=2, description="What a rank holds a slice of: 1 optimizer state, 2 gradients too, 3 weights too."
    )
    offload: bool = Field(default=False, description="Optimizer state in the memory of the CPU.")


class EmulatedOptions(Block):
    """Options of `emulated`, for generation."""

    lengths: str = Field(description="JSON list of response lengths in tokens, or FILE#NAME of one in an object.")
    prompts: PositiveInt = Field(description="Of a step (data.prompts_per_step): steps take the lengths in turn.")
    members: PositiveInt = Field(description="Of a group (algorithm.group_size).")
    iteration_s: PositiveFloat = Field(default=0.02, description="Seconds of a decoding iteration, by itself.")
    active_s: float = Field(default=0.0001, ge=0, description="Seconds more for each active response.")
    time_scale: PositiveFloat = Field(default=1.0, description="Real seconds for each emulated one.")


class EmulatedTrainingOptions(Block):
    """Options of `emulated`, for training."""

    token_s: PositiveFloat = Field(default=0.00034, description="Device-seconds of training on a response token.")
    devices: PositiveInt = Field(default=1, description="Devices that train.")
    time_scale: PositiveFloat = Field(default=1.0, description="Real seconds for each emulated one.")
