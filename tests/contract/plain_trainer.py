"""A training engine as a third party would write it: Adam by hand, in float64, every row a forward of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from transformers import AutoModelForCausalLM

from rlmq.common.dtypes import manifest_of
from rlmq.common.engines.training import LossFunction, MicroBatch, PolicyOutput, StepStats, TrainingSettings
from rlmq.common.layouts.part import WeightPart, own_part
from rlmq.common.recipe.block import Block
from rlmq.common.weights import WeightManifest


class PlainTrainer:
    """See `TrainingEngine`."""

    sharded = even_passes = False
    deterministic = True

    class Options(Block):
        momentum: bool = True

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings, self._steps = settings, 0
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float64)
        self._weights = dict(self._model.named_parameters())
        self._mean = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}
        self._square = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}

    def layout(self) -> WeightManifest:
        return manifest_of(self.shards())

    def shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        served: dict[int, torch.Tensor] = {}
        for name, weight in self._model.state_dict().items():
            yield name, served.setdefault(weight.data_ptr(), weight.float())

    def part(self) -> WeightPart:
        return own_part(self.shards())

    def idle(self, *, backward: bool) -> None:
        raise AssertionError("passes need not be even")

    def logprobs(self, batch: MicroBatch) -> PolicyOutput:
        with torch.no_grad():
            return self._forward(batch)

    def _forward(self, batch: MicroBatch) -> PolicyOutput:
        logprobs, entropy = (torch.zeros_like(batch.response_mask, dtype=torch.float64) for _ in range(2))
        prompt = batch.input_ids.shape[1] - batch.response_length
        for row, mask in enumerate(batch.attention_mask.bool()):
            tokens, begin = batch.input_ids[row][mask], int(mask[:prompt].sum())
            logits = self._model(tokens[None]).logits[0, begin - 1 : -1] / self._settings.temperature
            every = torch.log_softmax(logits, dim=-1)
            chosen = every.gather(1, tokens[begin:, None])[:, 0]
            logprobs[row, : len(chosen)] = chosen
            entropy[row, : len(chosen)] = -(every.exp() * every).sum(-1)
        return PolicyOutput(logprobs, entropy)

    def accumulate(self, batch: MicroBatch, loss: LossFunction) -> dict[str, float]:
        terms = loss(self._forward(batch), batch)
        terms.loss_sum.backward()
        return {name: float(value) for name, value in terms.metric_sums.items()}

    @torch.no_grad()
    def step(self, denominators: tuple[float, ...]) -> StepStats:
        block, group = self._settings.block, self._settings.group
        gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in self._weights.items()}
        for gradient in gradients.values():
            if group is not None:
                group.allreduce([gradient]).wait()
            for denominator in denominators:
                gradient.div_(denominator)
        norm = float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())
        scale = min(1.0, block.grad_clip / norm) if block.grad_clip else 1.0
        self._steps += 1
        for name, weight in self._weights.items():
            mean, square, gradient = self._mean[name], self._square[name], gradients[name] * scale
            mean += (1 - block.betas[0]) * (gradient - mean)
            square += (1 - block.betas[1]) * (gradient.square() - square)
            rate = (square / (1 - block.betas[1] ** self._steps)).sqrt() + block.adam_epsilon
            weight.sub_(block.lr * (mean / (1 - block.betas[0] ** self._steps) / rate))
            weight.grad = None
        return StepStats(norm, block.lr)

    def state(self) -> dict[str, torch.Tensor]:
        named = {"step": torch.tensor(self._steps)}
        for name, weight in self._weights.items():
            named |= {f"exp_avg.{name}": self._mean[name], f"exp_avg_sq.{name}": self._square[name]}
            named |= {f"master.{name}": weight.detach()}
        return named

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._steps = int(state["step"])
        for name, weight in self._weights.items():
            self._mean[name].copy_(state[f"exp_avg.{name}"])
            self._square[name].copy_(state[f"exp_avg_sq.{name}"])
            weight.copy_(state[f"master.{name}"])
