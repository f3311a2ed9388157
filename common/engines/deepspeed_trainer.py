"""The `deepspeed` training engine: ZeRO 1, 2 or 3 below the same surface.

DeepSpeed averages gradients over ranks and knows no global denominators: both are one loss scale at the step. Its
checkpoints are not used (its loader unpickles): optimizer state goes in and out as named tensors.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from rlmq.common.engines.engine_options import DeepSpeedOptions
from rlmq.common.engines.learning_rate import learning_rate
from rlmq.common.engines.shared_prompts import sharing_cost
from rlmq.common.engines.torch_trainer import TorchEngine, require_same_tensors
from rlmq.common.engines.training import LossTerms, StepStats, TrainingSettings
from rlmq.common.errors import IntegrityError, RestartRequired, UsageError
from rlmq.common.layouts.part import WeightPart, own_part
from rlmq.common.models import load_model

_MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedEngine(TorchEngine):
    """See `TrainingEngine`; all ranks make as many passes, and `shards`, `part` and `state` at once."""

    sharded = True
    even_passes = True

    def __init__(self, settings: TrainingSettings) -> None:
        deepspeed = loaded()
        block, self._stage = settings.block, (settings.options or DeepSpeedOptions()).stage
        if block.dtype == "bfloat16" and self._stage == 1:  # its optimizer for that takes no scale
            raise UsageError(
                "strategy_options.stage", got="1 with train.dtype bfloat16", expected="2 or 3 with bfloat16"
            )
        self._block, self._temperature, self._group, self.adapters = block, settings.temperature, None, None
        self._ranks, self._updates, self._manifest = settings.mesh.size, 0, None
        self._low_precision, self._served = False, None
        if not dist.is_initialized():  # one rank alone has no group
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        model = load_model(settings.model, torch.float32)
        if block.dtype == "bfloat16":
            self._served = torch.bfloat16
        self._whole: Any = model
        model.eval()
        if block.activation_checkpointing:
            self.model = model
            self._checkpoint_activations()
        self._takes_places = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._sharing = sharing_cost(model, self._served)
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=block.lr,
            betas=block.betas,
            eps=block.adam_epsilon,
            weight_decay=block.weight_decay,
        )
        self._deep: Any
        self._zero: Any
        self._deep, self._zero, _, _ = deepspeed.initialize(
            model=model,
            optimizer=self._optimizer,
            config=_config(settings),
            dist_init_required=False,
        )
        self.model = self._deep
        self._zero.override_loss_scale(1.0)
        self._parameters = dict(model.named_parameters())
        self._names = list(self._parameters)

    # -- passes --------------------------------------------------------------------------------------------

    def idle(self, *, backward: bool) -> None:
        """A pass that adds nothing."""
        with torch.set_grad_enabled(backward):
            nothing = 0.0 * self.model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits.sum()
        if backward:
            self._deep.backward(nothing)

    def _backward(self, terms: LossTerms) -> dict[str, float]:
        if terms.loss_sum.requires_grad:
            self._deep.backward(terms.loss_sum)
        return {name: float(value) for name, value in terms.metric_sums.items()}

    def step(self, denominators: tuple[float, ...]) -> StepStats:
        """See `TorchEngine.step`."""
        scale = 1.0 / self._ranks
        for denominator in denominators:
            scale *= denominator
        lr = learning_rate(self._updates / (self._block.mini_batches * self._block.epochs), self._block)
        for parameters in self._zero.param_groups:
            parameters["lr"] = lr
        self._zero.override_loss_scale(scale)
        try:
            self._deep.step()
        except RuntimeError as error:
            raise RestartRequired("ZeRO step", got=str(error).splitlines()[0]) from error
        finally:
            self._zero.override_loss_scale(1.0)
        norm = float(self._deep.get_global_grad_norm() or 0.0)
        if not 0 <= norm < float("inf"):
            raise IntegrityError(
                f"gradient norm of optimizer step {self._updates + 1}",
                got=norm,
                expected="a finite number",
                remedy="Look at the rewards and log-probs of this step, or lower train.lr",
            )
        self._updates += 1
        return StepStats(grad_norm=norm, lr=lr)

    # -- names ---------------------------------------------------------------------------------------------

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights by name, tied aliases included; gathered one after the other, by all ranks at once."""
        from deepspeed import zero

        owners = {id(weight): name for name, weight in self._parameters.items()}
        kept: dict[str, torch.Tensor] = {}
        for name, weight in self._whole.state_dict(keep_vars=True).items():
            owner = owners.get(id(weight), name)
            if owner not in kept:
                with zero.GatheredParameters([weight], enabled=self._stage == 3):
                    kept[owner] = weight.detach().clone() if self._stage == 3 else weight.detach()
            yield name, kept[owner]

    def part(self) -> WeightPart:
        """The whole weights, on every rank; slices of flattened tensors are no boxes."""
        return own_part(self.shards())

    def state(self) -> dict[str, torch.Tensor]:
        """As `TorchEngine.state`, of the whole model, on every rank."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        named = {"step": torch.tensor(self._updates, dtype=torch.int64)}
        for name, weight in self._parameters.items():
            for moment in _MOMENTS:
                found = safe_get_full_optimizer_state(weight, moment) if self._updates else None
                named[f"{moment}.{name}"] = torch.zeros(_shape(weight)) if found is None else found
            if self._served is not None:
                named[f"master.{name}"] = safe_get_full_fp32_param(weight)
        return named

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's slice of a whole state, which may come from another engine or number of ranks.

        Raises:
            IntegrityError: names or shapes are those of another model or dtype; nothing was changed.
        """
        wanted = {f"{moment}.{name}": one for name, one in self._parameters.items() for moment in _MOMENTS}
        if self._served is not None:
            wanted |= {f"master.{name}": one for name, one in self._parameters.items()}
        shapes = {name: torch.empty(_shape(one), device="meta") for name, one in wanted.items()}
        require_same_tensors({"step": state["step"], **shapes}, state)
        self._updates = int(state["step"])
        for flat in self._flat():
            self._zero.optimizer.state[flat] = {
                "step": torch.tensor(float(self._updates)),
                **{moment: torch.zeros_like(flat) for moment in _MOMENTS},
            }
        if self._stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()
        for name, weight in self._parameters.items():
            for moment in _MOMENTS:
                self._put(weight, state[f"{moment}.{name}"], moment)
            if self._served is not None:
                self._put(weight, state[f"master.{name}"], None)

    def _flat(self) -> Iterable[torch.Tensor]:
        """The flattened fp32 weights of this rank."""
        own: Iterable[torch.Tensor] = (
            self._zero.fp32_partitioned_groups_flat
            if self._stage == 3
            else self._zero.single_partition_of_fp32_groups
        )
        return own

    def _put(self, weight: Any, value: torch.Tensor, moment: str | None) -> None:
        from deepspeed import utils

        if self._stage < 3:
            whole = (weight, value) if moment is None else (weight, value, moment)
            (utils.safe_set_full_fp32_param if moment is None else utils.safe_set_full_optimizer_state)(*whole)
            return
        size = weight.ds_tensor.ds_numel if hasattr(weight.ds_tensor, "ds_numel") else weight.ds_tensor.numel()
        flat = functional.pad(value.flatten().float(), (0, size * self._ranks - value.numel()))
        own = flat[size * dist.get_rank() :][:size]
        local = (weight, own) if moment is None else (weight, own, moment)
        (utils.safe_set_local_fp32_param if moment is None else utils.safe_set_local_optimizer_state)(*local)


def _shape(weight: Any) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))


def loaded() -> Any:
    """DeepSpeed, told that there is no GPU where there is none."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # a process sees its own devices alone
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.utils import logger

    __compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at the first use, under a lock
    logger.setLevel("WARNING")
    return deepspeed


def _config(settings: TrainingSettings) -> dict[str, Any]:
    block, options = settings.block, settings.options or DeepSpeedOptions()
    zero: dict[str, Any] = {"stage": options.stage, "overlap_comm": False, "contiguous_gradients": False}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # the caller says when to step
        "gradient_clipping": block.grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": block.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "wall_clock_breakdown": False,
    }


make_engine = DeepSpeedEngine
