"""The recipe: every key that a user can write, with its unit and default.

Unknown keys are refused. `rlmq check RECIPE` validates a file; `--dry-run` prints what each process reads.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rlmq.common.columns import LEARNED
from rlmq.common.recipe.algorithm_block import AlgorithmBlock
from rlmq.common.recipe.block import Beta, Block, PositiveFloat, PositiveInt
from rlmq.common.recipe.critic_block import CriticBlock, OwnCriticBlock, RewardModelBlock
from rlmq.common.recipe.data_block import DataBlock
from rlmq.common.recipe.lora_block import LoraBlock
from rlmq.common.recipe.loss_block import NO_POLICY, LossBlock
from rlmq.common.recipe.node_block import NodeBlock
from rlmq.common.recipe.placement_block import ActorPlacement, PoolBlock, RolePlacement
from rlmq.common.recipe.record_block import RecordBlock
from rlmq.common.recipe.reward_block import RewardBlock
from rlmq.common.recipe.schedule_block import ScheduleBlock
from rlmq.common.recipe.stage_block import StageBlock


class RunBlock(Block):
    """Which run this is."""

    name: str = Field(description="Name of the run; the same name continues an unfinished run.")
    seed: int = Field(default=0, ge=0, description="The one seed of data order, sampling and initialisation.")
    folder: str = Field(
        default="runs", description="Folder that holds the runs, relative to the working directory."
    )

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        """The name becomes part of a folder's name, which the kernel limits to 255 bytes."""
        if not name.strip() or name.startswith(".") or not name.isprintable() or "/" in name:
            raise ValueError("a name for a folder: not empty, without '/', not beginning with '.'")
        if len(name.encode()) > 200:
            raise ValueError("at most 200 bytes")
        return name


class RolloutBlock(Block):
    """Generation."""

    engine: str = Field(
        default="hf", description="hf, vllm, http, a name that an installed package registered, or file.py:Class."
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of that engine alone, see docs/engines.md."
    )
    max_response_tokens: PositiveInt = Field(default=128, description="Longest response in tokens.")
    truncated: Literal["train", "mask", "penalise"] = Field(
        default="train",
        description="What happens to responses that the limit cut: train on them, mask them, or penalise.",
    )
    truncation_penalty: float = Field(
        default=0.0, ge=0, description="Subtracted from the reward of a cut response."
    )
    temperature: float = Field(
        default=1.0, gt=1.0e-6, description="Sampling temperature in training; greedy is refused."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus of the sampling distribution.")
    top_k: int = Field(default=0, ge=0, description="Most likely tokens kept; 0 keeps all.")
    stop: tuple[str, ...] = Field(default=(), description="Texts that end a response, which they are the end of.")
    mismatch_alert: PositiveFloat | None = Field(
        default=None,
        description="Warn when the mean difference of log-probs between rollout and trainer is above this; "
        "none: never.",
    )
    environment: str | None = Field(
        default=None,
        description="file.py:Class that answers each turn of the policy; none: responses have one turn.",
    )
    max_turns: PositiveInt = Field(default=8, description="Most turns of the policy in one response.")
    weight_sync: Literal["full", "delta"] = Field(
        default="full",
        description="delta: only what changed moves, where that is less (bfloat16); the trainer keeps a copy.",
    )
    batch_size_per_device: PositiveInt = Field(default=64, description="Most samples generated at once per worker.")
    chunk_rows: PositiveInt | None = Field(
        default=None,
        description="Most samples that a worker claims and writes together (whole groups); "
        "none: batch_size_per_device. Fewer are dealt more evenly, and scored sooner.",
    )

    @property
    def claimed(self) -> int:
        """Most samples of one claim."""
        return self.chunk_rows or self.batch_size_per_device

    @model_validator(mode="after")
    def _penalty_given(self) -> RolloutBlock:
        if self.truncated == "penalise" and self.truncation_penalty == 0:
            raise ValueError("truncation_penalty above 0 with truncated: penalise")
        if self.truncated != "penalise" and self.truncation_penalty > 0:
            raise ValueError("truncated: penalise with a truncation_penalty")
        return self


class TrainBlock(Block):
    """Optimisation."""

    steps: PositiveInt = Field(description="Training steps (batches), counted from the run's beginning.")
    lr: float = Field(default=1.0e-6, ge=0, description="Peak learning rate of AdamW.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Shape after the warm-up; linear and cosine fall to 0 at lr_steps."
    )
    lr_steps: PositiveInt | None = Field(default=None, description="Steps of the schedule; none: train.steps.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up from 0.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    optimizer: str | None = Field(
        default=None,
        description="file.py:function from the policy's trained parameters by name and this block to a "
        "torch.optim.Optimizer (strategy torch or fsdp); none: AdamW.",
    )
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="AdamW's betas.")
    adam_epsilon: PositiveFloat = Field(default=1.0e-8, description="AdamW's epsilon.")
    grad_clip: float = Field(default=1.0, ge=0, description="Greatest gradient norm; 0: none.")
    micro_batch_tokens: PositiveInt = Field(
        default=16384, description="Most tokens (padding included) per forward."
    )
    mini_batches: PositiveInt = Field(default=1, description="Optimizer steps per pass over a batch.")
    epochs: PositiveInt = Field(default=1, description="Passes over each batch.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Type of compute and of served weights."
    )
    activation_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass.")
    lora: LoraBlock = Field(default_factory=LoraBlock, description="Adapters beside a frozen model.")


class PlacementBlock(Block):
    """Processes per role."""

    pools: tuple[PoolBlock, ...] = ()
    actor: ActorPlacement = Field(default_factory=ActorPlacement, description="Trainer ranks.")
    rollout: RolePlacement = Field(default_factory=RolePlacement, description="Generation workers.")
    reward: RolePlacement = Field(default_factory=RolePlacement, description="Reward workers.")
    reference: RolePlacement = Field(default_factory=RolePlacement, description="Reference workers, if any.")
    critic: RolePlacement = Field(default_factory=RolePlacement, description="Critic ranks, if any.")
    reward_model: RolePlacement = Field(default_factory=RolePlacement, description="Reward model ranks, if any.")

    @model_validator(mode="before")
    @classmethod
    def _of_pools(cls, given: Any) -> Any:
        """A role in a pool has its devices."""
        if not isinstance(given, Mapping):
            return given
        pools = {pool["name"]: pool["devices"] for pool in given.get("pools", ()) if isinstance(pool, Mapping)}
        found = dict(given)
        for role, own in given.items():
            if isinstance(own, Mapping) and own.get("pool") in pools and not own.get("devices"):
                found[role] = {**own, "devices": pools[own["pool"]]}
        return found

    @model_validator(mode="after")
    def _pools_known(self) -> PlacementBlock:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError("pools: each name once")
        for role in type(self).model_fields:
            pool = getattr(getattr(self, role), "pool", None)
            if pool is not None and pool not in names:
                raise ValueError(f"{role}.pool: the name of an item of placement.pools, not {pool!r}")
        return self


class EvaluateBlock(Block):
    """Held-out evaluation, in a table of its own, never trained on."""

    every_steps: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only before and after.")
    samples: PositiveInt = Field(
        default=1, description="Samples per evaluation prompt; their rewards are averaged."
    )
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature of evaluation; 0 is greedy.")

    @model_validator(mode="after")
    def _greedy_once(self) -> EvaluateBlock:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("samples: 1 at temperature 0 (greedy samples are all equal), or a temperature above 0")
        return self


class CheckpointBlock(Block):
    """Checkpoints in the Hugging Face layout; the last trained step always has one."""

    every_steps: int = Field(default=0, ge=0, description="Steps between checkpoints; 0: only the last step.")
    keep: PositiveInt = Field(default=2, description="Checkpoints kept beside the best one.")


class StagesBlock(Block):
    """The stages that score samples."""

    reward: StageBlock = Field(default_factory=StageBlock)
    reference: StageBlock = Field(default_factory=StageBlock)


class RedisBlock(Block):
    """The server that holds the experience."""

    url: str | None = Field(default=None, description="redis:// or unix:// URL; none: rlmq starts one for the run.")


class DeadlineBlock(Block):
    """How long waits may take before they end with the name of who was waited for."""

    start_s: PositiveFloat = Field(default=180.0, description="Until every worker has joined.")
    step_s: PositiveFloat = Field(default=600.0, description="Without any progress inside a step.")
    sync_s: PositiveFloat = Field(default=120.0, description="Without any progress of a weight transfer.")
    silence_s: PositiveFloat = Field(
        default=30.0, description="Without a heartbeat, a worker is ended and started again after this time."
    )
    drain_s: PositiveFloat = Field(
        default=8.0, description="For finishing what is in hand after SIGTERM, before everything is ended."
    )


class ControlBlock(Block):
    """How controller and workers talk."""

    address: str | None = Field(
        default=None,
        description="tcp://HOST:PORT of the controller (it takes the next port too); none: this machine's sockets.",
    )
    keys: str | None = Field(
        default=None,
        description="Folder of CURVE keys (`rlmq keys`, or $CREDENTIALS_DIRECTORY); needed off this machine.",
    )

    @model_validator(mode="after")
    def _guarded(self) -> ControlBlock:
        """What others reach needs keys. A name is not looked up: all but `localhost` count as reached by others."""
        if self.address is None:
            return self
        host, port = self.place
        if not self.address.startswith("tcp://") or not host or not 0 < port < 65535:
            raise ValueError("address: tcp://HOST:PORT with a port from 1 to 65534")
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            loopback = False
        if self.keys is None and not loopback:
            raise ValueError(f"keys (of `rlmq keys`) with {self.address}, which other machines reach")
        return self

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of `address`, where there is one."""
        host, _, port = (self.address or "").removeprefix("tcp://").rpartition(":")
        return host, int(port) if port.isdecimal() else 0


class Recipe(Block):
    """A whole run. See `recipes/demo.yaml` for a commented example."""

    run: RunBlock
    model: str = Field(description="Hugging Face folder or hub id, or file.py:function returning a folder.")
    algorithm: AlgorithmBlock = Field(default_factory=AlgorithmBlock)
    data: DataBlock
    losses: tuple[LossBlock, ...] = ()
    rollout: RolloutBlock = Field(default_factory=RolloutBlock)
    reward: tuple[RewardBlock, ...] = Field(default=(), validate_default=True)
    nodes: tuple[NodeBlock, ...] = ()
    reward_controller: str | None = Field(
        default=None, description="file.py:function from a step to {reward's name: weight} of that step's rows."
    )
    train: TrainBlock
    schedule: ScheduleBlock = Field(default_factory=ScheduleBlock)
    critic: CriticBlock = Field(default_factory=CriticBlock)
    critics: tuple[OwnCriticBlock, ...] = ()
    reward_model: RewardModelBlock = Field(default_factory=RewardModelBlock)
    placement: PlacementBlock = Field(default_factory=PlacementBlock)
    evaluate: EvaluateBlock = Field(default_factory=EvaluateBlock)
    checkpoint: CheckpointBlock = Field(default_factory=CheckpointBlock)
    record: RecordBlock = Field(default_factory=RecordBlock)
    stages: StagesBlock = Field(default_factory=StagesBlock)
    redis: RedisBlock = Field(default_factory=RedisBlock)
    deadlines: DeadlineBlock = Field(default_factory=DeadlineBlock)
    control: ControlBlock = Field(default_factory=ControlBlock)
    track: tuple[Literal["jsonl", "wandb", "tensorboard"], ...] = Field(
        default=("jsonl",), description="Where metrics go; jsonl always."
    )
    deterministic: bool = Field(
        default=False, description="Results independent of timing, restarts and the number of rollout workers."
    )

    @field_validator("data", "rollout")
    @classmethod
    def _generated(cls, block: Block, given: ValidationInfo) -> Block:
        """Where nothing is generated, nothing is evaluated, and there is no temperature."""
        algorithm = given.data.get("algorithm")
        if algorithm is not None and not algorithm.online:
            if isinstance(block, DataBlock) and block.eval is not None:
                raise ValueError(f"no eval: {algorithm.name} generates nothing that could be scored")
            if isinstance(block, DataBlock) and block.difficulty.window is not None:
                raise ValueError(f"no difficulty: {algorithm.name} has no rewards")
            if isinstance(block, RolloutBlock) and block.temperature != 1.0:
                raise ValueError(f"temperature 1: {algorithm.name} learns the model's own distribution")
        measured = isinstance(block, DataBlock) and block.difficulty.window is not None
        if measured and algorithm is not None and algorithm.dynamic_sampling:
            raise ValueError("no difficulty with dynamic_sampling: dropped groups would not be measured")
        return block

    @field_validator("reward")
    @classmethod
    def _rewarded(cls, reward: tuple[RewardBlock, ...], given: ValidationInfo) -> tuple[RewardBlock, ...]:
        """What a policy generates is rewarded; what the data bring is not."""
        algorithm = given.data.get("algorithm")
        if algorithm is not None and algorithm.online and not reward:
            raise ValueError(f"at least 1 item: {algorithm.name} learns from rewards")
        if algorithm is not None and not algorithm.online and reward:
            raise ValueError(f"no reward: {algorithm.name} learns from the responses of the data")
        wanted = {"reward", "cost"} if algorithm is not None and algorithm.name == "safe_rlhf" else {"reward"}
        if reward and {block.objective for block in reward} != wanted:
            raise ValueError(f"items with objective {' and '.join(sorted(wanted))}, and no others")
        return reward

    @model_validator(mode="after")
    def _penalty_fits(self) -> Recipe:
        """The penalty of long responses begins within a response."""
        overlong = self.algorithm.overlong_tokens
        if overlong > self.rollout.max_response_tokens:
            raise ValueError(f"rollout.max_response_tokens of at least algorithm.overlong_tokens ({overlong})")
        return self

    @model_validator(mode="after")
    def _losses_fit(self) -> Recipe:
        """All losses of an update are of one model and of one distribution."""
        from rlmq.common.algorithms import algorithm_of

        names = [block.name for block in self.losses]
        if len(set(names)) < len(names):
            raise ValueError("losses: a name for each")
        if self.losses and self.algorithm.name in NO_POLICY:
            raise ValueError(f"no losses: {self.algorithm.name} trains no policy")
        if with_critic := [name for name, own in self.tables.items() if algorithm_of(own).critics]:
            raise ValueError(
                f"losses: an algorithm without a critic for {with_critic[0]}: values are of one policy"
            )
        if self.losses and self.rollout.temperature != 1.0:
            raise ValueError("rollout.temperature 1 with losses: they learn the model's own distribution")
        return self

    @model_validator(mode="after")
    def _columns_rewarded(self) -> Recipe:
        """Rewards that are columns have a writer, and the reward model has something to learn and is of use."""
        written = {name for node in self.nodes for name in node.writes}
        learned = {LEARNED} if self.reward_model.learns is not None else set()
        asked = [block.column for block in self.reward if block.column is not None]
        unknown = [name for name in asked if name not in written | learned]
        if unknown:
            known = ", ".join(sorted(written | learned)) or "which there is none of"
            raise ValueError(f"reward: a column of a node or the reward model ({known}), not {unknown[0]!r}")
        if learned:
            truths = [n for n, b in zip(self.reward_names, self.reward, strict=True) if b.column != LEARNED]
            if self.reward_model.learns not in truths:
                raise ValueError(f"reward_model.learns: the name of a reward that it does not give ({truths})")
            if LEARNED not in asked:
                raise ValueError(f"reward: an item `column: {LEARNED}`, since reward_model.learns is given")
        return self

    @model_validator(mode="after")
    def _policy_on_a_mesh(self) -> Recipe:
        strategy = self.placement.actor.strategy
        if strategy != "torch" and self.algorithm.name == "reward_model":
            raise ValueError(
                f"placement.actor.strategy torch with algorithm reward_model: {strategy} trains language models"
            )
        if self.train.optimizer is not None and strategy not in ("torch", "fsdp"):
            raise ValueError(f"placement.actor.strategy torch or fsdp with train.optimizer, not {strategy}")
        if self.train.lora.r is not None and (
            strategy not in ("torch", "fsdp") or self.algorithm.name == "reward_model"
        ):
            raise ValueError("placement.actor.strategy torch or fsdp, and a policy, with train.lora")
        hybrid, engine = self.placement.actor.hybrid, self.rollout.engine
        if hybrid and (engine != "hf" or not self.algorithm.online):
            raise ValueError("rollout.engine hf, and an algorithm that generates, with placement.actor.hybrid")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Recipe:
        """What a step's rows depend on beside the weights is known when they are admitted."""
        if self.schedule.staleness == 0:
            return self
        measured = self.data.difficulty.window is not None
        beside = {"critic", "reward_model", *(one.name for one in self.critics)} & set(self.workers())
        for given, what in (
            (self.algorithm.dynamic_sampling, "algorithm.dynamic_sampling: refills are of the step that trains"),
            (measured, "data.difficulty: pass rates are those of the steps before"),
            (bool(self.losses), "losses: their rows have one table for all steps"),
            (self.placement.actor.hybrid, "placement.actor.hybrid: its ranks generate or train"),
            (self.deterministic and bool(beside), "deterministic with a critic or a reward model"),
        ):
            if given:
                raise ValueError(f"schedule.kind sync with {what}")
        return self

    @property
    def slots(self) -> int:
        """Steps that may be in flight: one that trains, and those that are generated ahead of it."""
        return self.schedule.staleness + 1

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The tables of the steps in flight: `train`, or its slots."""
        return tuple(self.table_of(step) for step in range(self.slots))

    def table_of(self, step: int) -> str:
        """The table that has the step's rows."""
        from rlmq.common.flow import slot_of

        return slot_of(step, self.slots)

    @property
    def tables(self) -> dict[str, Recipe]:
        """The tables of `losses`, and for each the recipe that would train on it alone."""
        return {block.name: self._alone(block) for block in self.losses}

    def _alone(self, block: LossBlock) -> Recipe:
        data = {"train": block.data, "min_reward": block.min_reward, "prompts_per_step": block.prompts_per_step}
        recorded = "groups" if block.algorithm.online else None
        update = {"mixture": (), "eval": None, "passes": None, "recorded": recorded, **data}
        own = {"algorithm": block.algorithm, "data": self.data.model_copy(update=update)}
        no_learner = {"critics": (), "reward_model": RewardModelBlock()}
        return self.model_copy(update={**own, "losses": (), "reward": (), "nodes": (), **no_learner})

    @property
    def own_reference(self) -> bool:
        """Whether the actor is its own reference: with its adapters off, where one rank can do that alone."""
        return self.train.lora.r is not None and self.placement.actor.strategy == "torch"

    @property
    def has_cost(self) -> bool:
        """Whether an item of `reward` is a cost."""
        return any(block.objective == "cost" for block in self.reward)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Column names of the reward functions, unique, in order."""
        names: list[str] = []
        for block in self.reward:
            base = block.label
            name, n = base, 2
            while name in names:
                name, n = f"{base}_{n}", n + 1
            names.append(name)
        return tuple(names)

    @property
    def training_sets(self) -> dict[str, str]:
        """Sources of the training sets by name; a single one is called `train`."""
        sets = self.data.train
        return {"train": sets} if isinstance(sets, str) else dict(sets)

    @property
    def evaluation_sets(self) -> dict[str, str]:
        """Sources of the evaluation sets by name; a single one is called `eval`."""
        sets = self.data.eval
        return {"eval": sets} if isinstance(sets, str) else dict(sets or {})

    def workers(self) -> dict[str, int]:
        """Processes per role, in starting order: the roles of the flow."""
        from rlmq.common.flow import flows_of

        roles = dict.fromkeys(node.role for flow in flows_of(self) for node in flow)
        return {role: getattr(self.place_of(role), "workers", 1) for role in roles}

    @property
    def mesh_nodes(self) -> dict[str, NodeBlock]:
        """Nodes whose workers are the ranks of one mesh."""
        return {node.name: node for node in self.nodes if node.method is not None}

    def place_of(self, role: str) -> RolePlacement | NodeBlock | OwnCriticBlock | None:
        """How many workers and threads a role was given; None: one worker, placed by nobody."""
        node = next((node for node in self.nodes if node.name == role), None)
        return node or self.own_critic(role) or getattr(self.placement, role, None)

    def own_critic(self, role: str) -> OwnCriticBlock | None:
        """The item of `critics` with this name, its model given."""
        block = next((one for one in self.critics if one.name == role), None)
        return block and block.model_copy(update={"model": block.model or self.critic.model or self.model})
