"""The training engine on plain torch: one process per rank, gradients summed over ranks at the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rlmq.common.dtypes import manifest_of
from rlmq.common.engines.adapters import Adapters, short
from rlmq.common.engines.fully_sharded import as_it_is, like, shard_fully, whole, whole_by_name
from rlmq.common.engines.learning_rate import learning_rate
from rlmq.common.engines.own_optimizer import Build, built, load_named_state, named_state, own_optimizer
from rlmq.common.engines.shared_prompts import Places, places_of, sharing_cost
from rlmq.common.engines.token_logprobs import token_logprobs
from rlmq.common.engines.training import (
    LossFunction,
    LossTerms,
    MicroBatch,
    PolicyOutput,
    StepStats,
    TrainingSettings,
)
from rlmq.common.errors import IntegrityError, RestartRequired
from rlmq.common.layouts.part import WeightPart, own_part
from rlmq.common.models import load_model
from rlmq.common.weights import WeightManifest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlmq.common.recipe.schema import TrainBlock

_REDUCE_BUCKET_BYTES = 64 << 20


class TorchEngine:
    """A causal language model, its AdamW and its gradient on this rank.

    With `dtype: bfloat16` the model computes and is served in bf16, while gradients are accumulated and the
    update is made on fp32 master weights. Dropout is off: the ratio of a sample to itself is 1.

    Args:
        model: a transformers causal language model, loaded in float32 whatever `dtype` says.
        block: optimizer, schedule, type.
        temperature: of the sampling distribution that log-probs refer to.
        group: process group over which gradients are summed; None for one rank.
        sharded: each rank holds its slice of everything (`fully_sharded`): then `shards`, `state`, `load_state` and
            every pass are made by all ranks at once.
        adapters: of the model, which are trained instead of its own weights. The state has them as `master.NAME`:
            what is served is the sum.
        build: makes another optimizer than AdamW; its state is all that it keeps.

    Attributes:
        watch: is shown this rank's gradients as they are when the optimizer gets them, and its weights after that.
    """

    _own = False
    _rates: Sequence[float] = (1.0,)
    watch: Callable[[Literal["gradient", "weights"], Iterator[tuple[str, torch.Tensor]]], None] | None = None

    adapters: Adapters | None = None
    keep: Callable[[torch.Tensor], torch.Tensor] = staticmethod(as_it_is)
    """What becomes of each whole tensor that `shards` and `state` of a sharded engine gather."""

    def __init__(
        self,
        model: nn.Module,
        block: TrainBlock,
        *,
        temperature: float = 1.0,
        group: ProcessGroup | None = None,
        sharded: bool = False,
        adapters: Adapters | None = None,
        build: Build | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self._block = block
        self._temperature = temperature
        self._group = group
        self._updates = 0
        self.sharded = sharded and group is not None
        self._low_precision = block.dtype == "bfloat16" and not self.sharded
        self.even_passes = self.sharded
        self._served = torch.bfloat16 if block.dtype == "bfloat16" and self.sharded else None
        self._manifest: WeightManifest | None = None
        if self.sharded:
            assert group is not None
            shard_fully(model, group, low_precision=block.dtype == "bfloat16")
        self._names, self._weights, self._masters = self._split_masters()
        self._own = build is not None
        self._optimizer: torch.optim.Optimizer = (
            built(build, self._names, self._masters, block) if build is not None else _adamw(self._masters, block)
        )
        self._rates = [group["lr"] / block.lr if block.lr else 1.0 for group in self._optimizer.param_groups]
        model.eval()
        if adapters is None:
            model.requires_grad_(True)
        if block.activation_checkpointing:
            self._checkpoint_activations()
        self._takes_places = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._sharing = sharing_cost(model, self._served)

    def _split_masters(self) -> tuple[list[str], list[nn.Parameter], list[nn.Parameter]]:
        """Of what is trained: names, computing weights and fp32 weights; the latter two are the same in float32.

        Only parameters change type: rotary frequencies are buffers and lose positions in bf16.
        """
        names, weights, masters = [], [], []
        for name, weight in self.model.named_parameters():
            weight.data = weight.data.float()
            master = weight
            if self._low_precision:
                master = nn.Parameter(weight.data.clone()) if weight.requires_grad else weight
                weight.data = weight.data.bfloat16()
            if self.adapters is not None and not weight.requires_grad:
                continue
            names.append(short(name))
            weights.append(weight)
            masters.append(master)
        return names, weights, masters

    def _checkpoint_activations(self) -> None:
        # transformers recomputes only in layers that are in training mode; their dropout children stay in eval.
        model: Any = self.model
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True

    def layout(self) -> WeightManifest:
        """Names, shapes and dtypes of the weights as `shards` yields them."""
        if self._manifest is None:
            self._manifest = manifest_of(self.shards())
        return self._manifest

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by name, tied aliases included, in the order of `layout`; references unless sharded."""
        yield from whole_by_name(self._as_served(), self._served, self.keep)

    def _as_served(self) -> Iterable[tuple[str, torch.Tensor]]:
        own = self.model.state_dict().items()
        return own if self.adapters is None else self.adapters.merged(own)

    def part(self) -> WeightPart:
        """This rank's own part of the weights, as they are served; references where it is stored so.

        With `lora.sync: adapters`, of those alone.
        """
        if self.adapters is not None and self._block.lora.sync == "adapters":
            return own_part(self.adapters.alone(self.model.state_dict().items()), dtype=self._served)
        return own_part(self._as_served(), dtype=self._served)

    def logprobs(self, batch: MicroBatch) -> PolicyOutput:
        """Log-probs and entropy of all real response tokens, without gradient."""
        with torch.no_grad():
            return self._forward(batch)

    def reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probs [rows, R] of the model without its adapters."""
        assert self.adapters is not None
        with self.adapters.off():
            return self.logprobs(batch).logprobs

    def accumulate(self, batch: MicroBatch, loss: LossFunction) -> dict[str, float]:
        """Forward and backward; adds the gradient of `loss_sum`, returns the metric sums of this micro-batch."""
        return self._backward(loss(self._forward(batch), batch))

    def idle(self, *, backward: bool) -> None:
        """A pass that adds nothing: when sharded, for a rank that has fewer micro-batches than another."""
        if not self.sharded:
            return
        with torch.set_grad_enabled(backward):
            nothing = 0.0 * self.model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits.sum()
        if backward:
            nothing.backward()

    def _backward(self, terms: LossTerms) -> dict[str, float]:
        if terms.loss_sum.requires_grad:
            terms.loss_sum.backward()
            if self._low_precision:
                self._drain_gradients()
        return {name: float(value) for name, value in terms.metric_sums.items()}

    def _drain_gradients(self) -> None:
        """bf16 gradients of one micro-batch move into the fp32 sum: 8 bits of mantissa hold no long sum."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad.add_(weight.grad)
            weight.grad = None

    def _forward(self, batch: MicroBatch) -> PolicyOutput:
        prompt = batch.input_ids.shape[1] - batch.response_length
        real = batch.attention_mask[:, prompt:].bool()
        nothing = torch.zeros(real.shape, device=real.device)
        if not bool(real.any()):
            self.idle(backward=torch.is_grad_enabled())
            return PolicyOutput(nothing, nothing)
        places = places_of(batch, self._sharing)
        tokens = batch.input_ids[:, prompt:][real]
        logprobs, entropy = token_logprobs(
            self._logits(places).flatten(0, 1), places.source, tokens, self._temperature
        )
        return PolicyOutput(nothing.masked_scatter(real, logprobs), nothing.masked_scatter(real, entropy))

    def _logits(self, places: Places) -> torch.Tensor:
        """Logits [packed, K, vocabulary] of the places that predict a response token."""
        extra = {"logits_to_keep": places.keep} if self._takes_places else {}
        logits: torch.Tensor = self.model(
            input_ids=places.input_ids,
            attention_mask=places.attention_mask,
            position_ids=places.position_ids,
            use_cache=False,
            **extra,
        ).logits
        return logits if self._takes_places else logits[:, places.keep]

    def step(self, denominators: tuple[float, ...]) -> StepStats:
        """Sum the gradient over ranks, divide it by the product of the *global* denominators, clip, update.

        Raises:
            RestartRequired: another rank of the group died or did not answer in time.
            IntegrityError: the gradient is not finite; the weights are as before.
        """
        scale = 1.0
        for denominator in denominators:
            scale /= denominator
        for master in self._masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        gradients = [m.grad for m in self._masters if m.grad is not None]
        self._sum_gradients(gradients)
        norm = self._scale_and_clip(gradients, scale)
        if self.watch is not None:
            self.watch("gradient", zip(self._names, gradients, strict=True))
        lr = learning_rate(self._updates / (self._block.mini_batches * self._block.epochs), self._block)
        for parameters, share in zip(self._optimizer.param_groups, self._rates, strict=True):
            parameters["lr"] = lr * share
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        self._serve_masters()
        if self.watch is not None:
            self.watch("weights", zip(self._names, self._masters, strict=True))
        return StepStats(grad_norm=norm, lr=lr)

    def _sum_gradients(self, gradients: list[torch.Tensor]) -> None:
        if self._group is not None and not self.sharded:
            sum_over_ranks(gradients, self._group)

    def _total_norm(self, gradients: list[torch.Tensor]) -> float:
        return float(whole(torch.nn.utils.get_total_norm(gradients)))

    def _scale_and_clip(self, gradients: list[torch.Tensor], scale: float) -> float:
        """Norm of the divided gradient; dividing and clipping are one multiplication."""
        norm = self._total_norm(gradients) * scale
        if not norm < float("inf"):
            self._optimizer.zero_grad(set_to_none=True)
            raise IntegrityError(
                f"gradient norm of optimizer step {self._updates + 1}",
                got=norm,
                expected="a finite number",
                remedy="Look at the rewards and log-probs of this step, or lower train.lr",
            )
        if self._block.grad_clip > 0:
            scale *= min(1.0, self._block.grad_clip / (norm + 1e-6))
        torch._foreach_mul_(gradients, scale)
        return norm

    @torch.no_grad()
    def _serve_masters(self) -> None:
        if self._low_precision:
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)

    def state(self) -> dict[str, torch.Tensor]:
        """Optimizer state by name: `exp_avg.NAME`, `exp_avg_sq.NAME`, `step`, and in bf16 `master.NAME`."""
        named = {"step": torch.tensor(self._updates, dtype=torch.int64)}
        if self._own:
            named |= named_state(self._optimizer, self._names, self._masters)
        for name, master in zip(self._names, self._masters, strict=True):
            own = self._optimizer.state.get(master, {})
            for moment in () if self._own else ("exp_avg", "exp_avg_sq"):
                found = whole(own[moment] if moment in own else torch.zeros_like(master))
                named[f"{moment}.{name}"] = self.keep(found)
            # What is served has lost their last bits, or has adapters in a sum.
            if self._served is not None or self._low_precision or self.adapters is not None:
                named[f"master.{name}"] = self.keep(whole(master.detach()))
        return named

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state`; float32 weights come with the model.

        Raises:
            IntegrityError: names or shapes are those of another model or dtype; nothing was changed.
        """
        if self._own:
            kept = {name: one for name, one in state.items() if name != "step" and not name.startswith("master.")}
            load_named_state(self._optimizer, self._names, self._masters, kept)
        else:
            require_same_tensors(self.state(), state)
        self._updates = int(state["step"])
        for name, master in zip(self._names, self._masters, strict=True):
            if not self._own:
                self._optimizer.state[master] = {
                    "step": torch.tensor(float(self._updates)),
                    "exp_avg": like(master, state[f"exp_avg.{name}"]),
                    "exp_avg_sq": like(master, state[f"exp_avg_sq.{name}"]),
                }
            if f"master.{name}" in state:
                master.copy_(like(master, state[f"master.{name}"]))
        self._serve_masters()


def _adamw(masters: list[nn.Parameter], block: TrainBlock) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        masters,
        lr=block.lr,
        betas=block.betas,
        eps=block.adam_epsilon,
        weight_decay=block.weight_decay,
        fused=True,
    )


def make_engine(settings: TrainingSettings, *, sharded: bool = False) -> TorchEngine:
    """The engine `torch`: each rank holds everything."""
    model, lora = load_model(settings.model, torch.float32), settings.block.lora
    return TorchEngine(
        model,
        settings.block,
        temperature=settings.temperature,
        group=settings.group,
        sharded=sharded,
        adapters=Adapters(model, lora, settings.seed) if lora.r is not None else None,
        build=own_optimizer(settings.block.optimizer, settings.folder),
    )


def make_sharded_engine(settings: TrainingSettings) -> TorchEngine:
    """The engine `fsdp`: each rank holds its slice of everything."""
    return make_engine(settings, sharded=True)


def require_same_tensors(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Raises IntegrityError: other names or shapes."""
    differing = sorted(
        name
        for name in own.keys() | given.keys()
        if name not in own or name not in given or own[name].shape != given[name].shape
    )
    if differing:
        raise IntegrityError(
            "optimizer state",
            got=f"{len(differing)} tensors that do not match, the first is {differing[0]}",
            expected="the names and shapes of this model, train.dtype and train.lora",
        )


def sum_over_ranks(gradients: list[torch.Tensor], group: ProcessGroup) -> None:
    """Sum in place over the group, in flat buckets: one collective per tensor would be latency only."""
    buckets: list[list[torch.Tensor]] = [[]]
    size_bytes = 0
    for gradient in gradients:
        if buckets[-1] and size_bytes + gradient.nbytes > _REDUCE_BUCKET_BYTES:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(gradient)
        size_bytes += gradient.nbytes
    try:
        for bucket in buckets:
            flat = torch.cat([g.reshape(-1) for g in bucket])
            group.allreduce([flat]).wait()
            parts = flat.split([g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(parts, bucket, strict=True)])
    except RuntimeError as error:
        raise RestartRequired("gradient sum over trainer ranks", got=str(error).splitlines()[0]) from error
