"""The `3d` training engine: a decoder over pipeline stages, tensor ranks and data-parallel replicas.

::

    accumulate   forward; the last stage has the loss. One forward, one backward: see `pipeline`
    step         owed backward passes; sums of what ranks have only a part of: shared key heads and head norms over
                 tp, a tied embedding over the first and last stage, everything over dp; then norm, clip, AdamW

Each rank holds its shard of weights, gradients and optimizer state, and reads no more of a folder than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from msgspec.structs import replace
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from rlmq.common.engines.decoder_shape import EMBEDDING, HEAD, CutTensor, DecoderShape, Place, places_of_mesh
from rlmq.common.engines.mesh_groups import MeshGroups, training_groups
from rlmq.common.engines.parallel_decoder import ParallelDecoder, visible
from rlmq.common.engines.pipeline import Pipeline
from rlmq.common.engines.shard_files import read_boxes
from rlmq.common.engines.shard_gradients import ShardGradients
from rlmq.common.engines.shard_memory import ShardMemory, named
from rlmq.common.engines.shared_prompts import Places, SharingCost, places_of
from rlmq.common.engines.tensor_parallel import lost
from rlmq.common.engines.token_logprobs import VocabularyPart, token_logprobs
from rlmq.common.engines.torch_trainer import TorchEngine
from rlmq.common.engines.training import (
    LossFunction,
    LossTerms,
    MicroBatch,
    PolicyOutput,
    StepStats,
    TrainingSettings,
)
from rlmq.common.errors import IntegrityError
from rlmq.common.layouts.layout import Box, Layout
from rlmq.common.layouts.part import WeightPart, part_of
from rlmq.common.layouts.views import Shards
from rlmq.common.weights import TensorSpec, WeightManifest

if TYPE_CHECKING:
    from rlmq.common.recipe.schema import TrainBlock


class ParallelEngine(TorchEngine):
    """A `TrainingEngine` on this rank's part of a decoder.

    All ranks of a replica go through the same micro-batches. `logprobs` and the loss are of the last stage
    (elsewhere zeros, and no loss); metric sums are given by its first tensor rank alone. `shards`, `state` and
    `step` are called by all ranks at once.

    Args:
        folder: of the model, Hugging Face's layout.
        block: optimizer, schedule, type.
        groups: of this rank.
        temperature: of the sampling distribution that log-probs refer to.
        generation: what every rank generates with, where it does (see `hybrid`); none: what it trains.

    Raises:
        UsageError: a model of another kind, or a mesh that cannot hold it.
    """

    def __init__(
        self,
        folder: str | Path,
        block: TrainBlock,
        groups: MeshGroups,
        *,
        temperature: float = 1.0,
        generation: list[Place] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.shape = DecoderShape.of(self.config)
        self.shape.check(groups.mesh, "placement.actor")
        self.groups = groups
        self.sharded, self.even_passes = True, False
        self._place = groups.place
        self._block, self._temperature, self._group = block, temperature, None
        self._updates = 0
        self._low_precision = block.dtype == "bfloat16"
        self._tensors = {tensor.name: tensor for tensor in self.shape.tensors()}
        dtype = torch.bfloat16 if self._low_precision else torch.float32
        self.layouts = {
            "training": self.shape.layout(places_of_mesh(groups.mesh), "BF16" if self._low_precision else "F32"),
            "generation": self.shape.layout(
                generation or places_of_mesh(groups.mesh), "BF16" if self._low_precision else "F32"
            ),
        }
        own, serving = (_boxes(self.layouts[kind], groups.rank) for kind in ("training", "generation"))
        self.memory = ShardMemory(list(self._tensors.values()), own, serving, dtype, torch.device(device))
        self._names = list(self.memory.training)
        self._weights, self._masters = self._load(Path(folder))
        self._gradients = ShardGradients(self.shape, groups, dict(zip(self._names, self._masters, strict=True)))
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=block.lr,
            betas=block.betas,
            eps=block.adam_epsilon,
            weight_decay=block.weight_decay,
            fused=True,
        )
        self.decoder = ParallelDecoder(
            self.config, self._place, dict(zip(self._names, self._weights, strict=True)), groups.tp
        )
        self.decoder.recompute = block.activation_checkpointing
        self._pipeline = Pipeline(groups.pp, self._place.pp, self._place.pps)
        self._vocabulary = (
            VocabularyPart(self.shape.vocabulary_at(self._place), groups.tp) if groups.tp is not None else None
        )
        self._sharing = self._cost(dtype)

    def _load(self, folder: Path) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Computing weights, views of the memory, and fp32 ones; the same objects in float32."""
        found = dict(read_boxes(folder, self.memory.boxes["training"], "model"))
        weights, masters = [], []
        for name in self._names:
            value = named(self._tensors[name], found.pop(name).float()).contiguous()
            view = self.memory.training[name]
            view.copy_(value)
            weights.append(nn.Parameter(view))
            masters.append(nn.Parameter(value) if self._low_precision else weights[-1])
        return weights, masters

    def _cost(self, dtype: torch.dtype) -> SharingCost:
        """See `sharing_cost`; of the whole model, so that all ranks decide alike."""
        values = sum(
            tensor.shape[0] * tensor.shape[1]
            for tensor in self._tensors.values()
            if len(tensor.shape) == 2 and tensor.layer is not None
        )
        return SharingCost(2 * self.shape.hidden * self.shape.layers / values, dtype)

    # -- passes --------------------------------------------------------------------------------------------

    def accumulate(self, batch: MicroBatch, loss: LossFunction) -> dict[str, float]:
        """Forward, and the oldest owed backward pass.

        Returns:
            The metric sums of this micro-batch on the last stage's first tensor rank; elsewhere nothing.
        """
        places = self._places(batch)
        received = hidden = None
        if places is not None:
            received, hidden = self._hidden(places)
        if not self._place.last:
            if hidden is not None:
                self._pipeline.send(hidden)
                self._pipeline.keep(received, hidden)
                self._drain()
            return {}
        terms = loss(self._output(batch, places, hidden), batch)
        figures = self._backward(terms)
        self._pipeline.send_gradient(received)
        return figures if self._place.tp == 0 else {}

    def _backward(self, terms: LossTerms) -> dict[str, float]:
        if terms.loss_sum.requires_grad:
            terms.loss_sum.backward()
        self._drain()
        return {name: float(value) for name, value in terms.metric_sums.items()}

    def _drain(self) -> None:
        if self._low_precision:
            self._drain_gradients()

    def _forward(self, batch: MicroBatch) -> PolicyOutput:
        places = self._places(batch)
        hidden = None
        if places is not None:
            _, hidden = self._hidden(places)
            if not self._place.last:
                self._pipeline.send(hidden)
                hidden = None
        return self._output(batch, places, hidden)

    def _places(self, batch: MicroBatch) -> Places | None:
        """None where there is no response token: no stage has anything to do."""
        prompt = batch.input_ids.shape[1] - batch.response_length
        return places_of(batch, self._sharing) if bool(batch.attention_mask[:, prompt:].any()) else None

    def _hidden(self, places: Places) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What came from the stage before (None on the first), and hidden states after this one's layers."""
        rows, length = places.input_ids.shape
        received = None
        if self._place.first:
            hidden = self.decoder.embedded(places.input_ids)
        else:
            shape = (rows, length, self.shape.hidden)
            hidden = received = self._pipeline.receive(shape, self.decoder.dtype, self.decoder.device)
            received.requires_grad_(torch.is_grad_enabled())
        mask = places.attention_mask
        if mask.ndim == 2:
            mask = visible(mask, length)
        return received, self.decoder.layers(hidden, mask, places.position_ids)

    def _output(self, batch: MicroBatch, places: Places | None, hidden: torch.Tensor | None) -> PolicyOutput:
        prompt = batch.input_ids.shape[1] - batch.response_length
        real = batch.attention_mask[:, prompt:].bool()
        nothing = torch.zeros(real.shape, device=real.device)
        if places is None or hidden is None:
            return PolicyOutput(nothing, nothing)
        logits = self.decoder.logits(hidden[:, places.keep])
        tokens = batch.input_ids[:, prompt:][real]
        logprobs, entropy = token_logprobs(
            logits.flatten(0, 1), places.source, tokens, self._temperature, self._vocabulary
        )
        return PolicyOutput(nothing.masked_scatter(real, logprobs), nothing.masked_scatter(real, entropy))

    def idle(self, *, backward: bool) -> None:
        """Nothing to do: ranks of other replicas are met at the step only."""

    # -- the step ------------------------------------------------------------------------------------------

    def step(self, denominators: tuple[float, ...]) -> StepStats:
        """As `TorchEngine.step`, after the backward passes that are owed."""
        self._pipeline.finish()
        self._drain()
        return super().step(denominators)

    def _sum_gradients(self, gradients: list[torch.Tensor]) -> None:
        self._gradients.sum_over_ranks()

    def _total_norm(self, gradients: list[torch.Tensor]) -> float:
        return self._gradients.norm()

    def named_shards(self, kind: Literal["training", "generation"]) -> Shards:
        """Views of this rank's shards in Hugging Face's orientation, as `layouts[kind]` has them."""
        tensors = self.memory.training if kind == "training" else self.memory.generation
        shards = {name: [named(self._tensors[name], value)] for name, value in tensors.items()}
        return Shards(self.layouts[kind], self.groups.rank, shards)

    def part(self) -> WeightPart:
        """See `TorchEngine.part`."""
        tied = {HEAD: EMBEDDING} if self.shape.tied else {}
        note = part_of(self.layouts["training"], self.groups.rank)
        return WeightPart(replace(note, aliases=tied), self.named_shards("training"))

    # -- names ---------------------------------------------------------------------------------------------

    def layout(self) -> WeightManifest:
        """Names, shapes and dtypes of the whole weights as `shards` yields them, tied aliases included."""
        specs = list(self.layouts["training"].tensors.values())
        if self.shape.tied:
            specs.append(TensorSpec(HEAD, specs[0].shape, specs[0].dtype))
        return WeightManifest(tuple(specs))

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole weights on rank 0, in the order of `layout`; nothing elsewhere.

        Raises:
            RestartRequired: another rank died or did not answer in time.
        """
        for name, whole in self._gathered(dict(zip(self._names, self._weights, strict=True))):
            yield name, whole
            if name == EMBEDDING:
                embedding = whole
        if self.shape.tied and self.groups.rank == 0:
            yield HEAD, embedding

    def state(self) -> dict[str, torch.Tensor]:
        """As `TorchEngine.state`, of the whole model, on rank 0; elsewhere `step` alone."""
        found = {"step": torch.tensor(self._updates, dtype=torch.int64)}
        for moment in ("exp_avg", "exp_avg_sq"):
            own = {
                name: self._optimizer.state.get(master, {}).get(moment, torch.zeros_like(master))
                for name, master in zip(self._names, self._masters, strict=True)
            }
            found |= {f"{moment}.{name}": whole for name, whole in self._gathered(own)}
        if self._low_precision:
            masters = dict(zip(self._names, self._masters, strict=True))
            found |= {f"master.{name}": whole for name, whole in self._gathered(masters)}
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of a whole state, which may come from another mesh.

        Raises:
            IntegrityError: names or shapes are those of another model or dtype; nothing was changed.
        """
        kinds = ("exp_avg", "exp_avg_sq", *(("master",) if self._low_precision else ()))
        wanted = {f"{kind}.{name}": tensor.shape for kind in kinds for name, tensor in self._tensors.items()}
        found = {name: tuple(value.shape) for name, value in state.items() if name != "step"}
        if differing := sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n)):
            raise IntegrityError(
                "optimizer state",
                got=f"{len(differing)} tensors that do not match, the first is {differing[0]}",
                expected="the names and shapes of this model and train.dtype",
            )
        self._updates = int(state["step"])
        for name, master in zip(self._names, self._masters, strict=True):
            self._optimizer.state[master] = {
                "step": torch.tensor(float(self._updates)),
                "exp_avg": self._own_part(name, state[f"exp_avg.{name}"]),
                "exp_avg_sq": self._own_part(name, state[f"exp_avg_sq.{name}"]),
            }
            if self._low_precision:
                master.copy_(self._own_part(name, state[f"master.{name}"]))
        self._serve_masters()

    def _own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        box = self.memory.boxes["training"][name]
        part = whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        return named(self._tensors[name], part).to(self.decoder.device).clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def _gathered(self, own: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors in Hugging Face's orientation, one after the other, on rank 0.

        From each box's lowest rank, point to point; the memory is rank 0's own where it holds all of a tensor.
        """
        for name, tensor in self._tensors.items():
            held = self.layouts["training"].held[name]
            whole: torch.Tensor | None = None
            if self.groups.rank == 0:
                whole = self._begin_whole(tensor, held, own)
            for box, sender in _senders(held):
                self._move(tensor, box, sender, own, whole)
            if whole is not None:
                yield name, self.keep(whole)

    def _begin_whole(
        self, tensor: CutTensor, held: Mapping[int, tuple[Box, ...]], own: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        mine = held.get(0, ())
        if mine and mine[0] == Box.whole(tensor.shape):
            return named(tensor, own[tensor.name].detach())
        dtype = next(iter(own.values())).dtype
        whole = torch.empty(tensor.shape, dtype=dtype)
        if mine:
            _in(whole, mine[0]).copy_(named(tensor, own[tensor.name]))
        return whole

    def _move(
        self, tensor: CutTensor, box: Box, sender: int, own: Mapping[str, torch.Tensor], whole: torch.Tensor | None
    ) -> None:
        group = self.groups.everyone
        assert group is not None
        try:
            if self.groups.rank == sender:
                group.send([named(tensor, own[tensor.name].detach()).contiguous()], 0, 0).wait()
            elif whole is not None:
                part = torch.empty(box.shape, dtype=whole.dtype)
                group.recv([part], sender, 0).wait()
                _in(whole, box).copy_(part)
        except RuntimeError as error:
            raise lost(error) from error


def make_engine(settings: TrainingSettings) -> ParallelEngine:
    """The engine `3d`."""
    return ParallelEngine(
        settings.model,
        settings.block,
        training_groups(settings.mesh, settings.rank, settings.part),
        temperature=settings.temperature,
        generation=settings.generation,
    )


def _boxes(layout: Layout, rank: int) -> dict[str, Box]:
    return dict(layout.boxes(rank))


def _senders(held: Mapping[int, tuple[Box, ...]]) -> list[tuple[Box, int]]:
    """Boxes that rank 0 lacks, each with the lowest rank that has it."""
    known = set(held.get(0, ()))
    found = []
    for rank in sorted(held):
        for box in held[rank]:
            if box not in known:
                known.add(box)
                found.append((box, rank))
    return found


def _in(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
