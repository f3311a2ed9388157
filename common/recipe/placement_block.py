"""Where roles run: processes, threads, and how the actor's model lies on its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from rlmq.common.layouts.layout import MeshShape
from rlmq.common.recipe.block import Block, PositiveFloat, PositiveInt

Device = Annotated[int, Field(ge=0)]


class PoolBlock(Block):
    """Devices under a name."""

    name: str = Field(description="What `placement.ROLE.pool` calls it.")
    devices: tuple[Device, ...] = Field(min_length=1, description="GPUs; without one, cores.")
    memory_gib: PositiveFloat | None = Field(
        default=None, description="Memory that may be used of each GPU; none: all that it has."
    )


class RolePlacement(Block):
    """How many processes a role has, where, and threads for each."""

    workers: PositiveInt = Field(default=1, description="Processes of this role; not given: one for each device.")
    devices: tuple[Device, ...] = Field(
        default=(),
        description="GPUs that its processes get in turn, one each (without a GPU, cores); none: they share all.",
    )
    pool: str | None = Field(default=None, description="Name of an item of placement.pools: its devices.")
    threads: PositiveInt | None = Field(default=None, description="Compute threads per process; none: all cores.")

    @model_validator(mode="before")
    @classmethod
    def _one_each(cls, given: Any) -> Any:
        """Devices without a number of workers."""
        if isinstance(given, Mapping) and given.get("devices") and "workers" not in given:
            return {**given, "workers": len(given["devices"])}
        return given

    @model_validator(mode="after")
    def _devices_once(self) -> RolePlacement:
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices: each once, not {list(self.devices)}")
        if len(self.devices) > self.workers:
            raise ValueError(f"workers: at least one for each of the {len(self.devices)} devices")
        return self


class GenerationPlacement(Block):
    """How the actor's model lies on its ranks while they generate."""

    pp: PositiveInt = Field(default=1, description="Pipeline stages, a divisor of the actor's.")
    tp: PositiveInt | None = Field(
        default=None, description="Tensor ranks of each stage, a divisor of the actor's; none: as many."
    )


class ActorPlacement(RolePlacement):
    """The trainer ranks of the policy: `pp · tp` of them hold the model together; the others are replicas."""

    strategy: str = Field(
        default="torch",
        description="Training engine. torch: each rank holds the whole model. fsdp: a slice of each weight, its "
        "gradient and its optimizer state. 3d: the model is cut over pp and tp. deepspeed: ZeRO. Or a name that an "
        "installed package registered, or file.py:Class.",
    )
    strategy_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of that engine alone, see docs/engines.md."
    )
    pp: PositiveInt = Field(default=1, description="Pipeline stages (3d).")
    tp: PositiveInt = Field(default=1, description="Tensor ranks of each stage (3d).")
    hybrid: bool = Field(
        default=False,
        description="The actor's ranks generate too, in place (3d); then there are no rollout workers.",
    )
    generation: GenerationPlacement = Field(default_factory=GenerationPlacement)

    @property
    def mesh(self) -> MeshShape:
        """The trainer ranks."""
        return MeshShape(self.pp, self.tp, self.workers // (self.pp * self.tp))

    @property
    def generation_sizes(self) -> tuple[int, int]:
        """`(pp, tp)` of a generation replica."""
        return self.generation.pp, self.generation.tp or self.tp

    @model_validator(mode="after")
    def _whole_replicas(self) -> ActorPlacement:
        if self.strategy != "3d" and (self.pp, self.tp) != (1, 1):
            raise ValueError(f"strategy: 3d with pp or tp, not {self.strategy}")
        if self.workers % (self.pp * self.tp):
            raise ValueError(
                f"workers: a multiple of pp · tp = {self.pp * self.tp}, not {self.workers}: all ranks are counted"
            )
        if self.hybrid and self.strategy != "3d":
            raise ValueError(f"strategy: 3d with hybrid, not {self.strategy}")
        pp, tp = self.generation_sizes
        if self.pp % pp or self.tp % tp:
            raise ValueError(f"generation: divisors of pp {self.pp} and tp {self.tp}, not {pp} and {tp}")
        return self
