"""LoRA through peft: the base's weights stay, what is trained are two thin matrices beside some of them.

`y = W x + (alpha / r) B A x`, A [r, in] drawn from the seed, B [out, r] zero at first (Hu et al. 2021, 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlmq.common.engines.fully_sharded import like, whole
from rlmq.common.errors import UsageError

if TYPE_CHECKING:
    from rlmq.common.recipe.lora_block import LoraBlock

_ONE = "default"
"""peft's name of the only adapter."""


class Adapters:
    """The adapters of a model, which are put into it here; all else of it is frozen.

    Args:
        model: a causal language model of transformers.
        block: rank, scale and places.
        seed: of A; all ranks draw the same.

    Raises:
        UsageError: no such places, or what is there is no linear layer, or is tied to the embedding.
    """

    def __init__(self, model: nn.Module, block: LoraBlock, seed: int) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer

        targets = "all-linear" if block.targets == ("all-linear",) else list(block.targets)
        alpha: Any = block.alpha  # peft's annotation wants a whole number, its arithmetic does not
        self._config: Any = LoraConfig(
            r=block.r or 1, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", inference_mode=False
        )
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                inject_adapter_in_model(self._config, model)
        except ValueError as error:
            raise UsageError("train.lora.targets", got=list(block.targets), expected=str(error)) from error
        self._layers: dict[str, Any] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)
        }
        tied = _tied(model)
        wrong = [name for name, layer in self._layers.items() if not isinstance(layer, Linear) or name in tied]
        if wrong:
            raise UsageError(
                "train.lora.targets", got=wrong[0], expected="linear layers that are not tied to the embedding"
            )

    def config(self) -> dict[str, Any]:
        """What peft's `adapter_config.json` says."""
        told: dict[str, Any] = self._config.to_dict()
        targets = told["target_modules"]
        return {**told, "target_modules": sorted(targets) if isinstance(targets, (set, list)) else targets}

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base alone, which is the reference policy."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def merged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """A state dict as one of a model without adapters: names and shapes of the base, their product added."""
        for name, weight in weights:
            layer = self._layers.get(name.removesuffix(".base_layer.weight"))
            if layer is not None and name.endswith(".base_layer.weight"):
                a, b = (whole(getattr(layer, f"lora_{one}")[_ONE].weight.detach()) for one in "AB")
                product = like(weight, _product(a, b, layer.scaling[_ONE], layer.fan_in_fan_out))
                weight = (weight.detach().float() + product).to(weight.dtype)  # noqa: PLW2901
            if f".{_ONE}." not in name:
                yield name.replace(".base_layer.", "."), weight

    def alone(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of a state dict the adapters, as peft's files call them, without the name of the adapter."""
        return ((short(name), weight) for name, weight in weights if f".{_ONE}." in name)

    def scales(self) -> dict[str, tuple[float, bool]]:
        """By layer: `alpha / r`, and whether its weight lies as [in, out]."""
        return {name: (one.scaling[_ONE], one.fan_in_fan_out) for name, one in self._layers.items()}


def short(name: str) -> str:
    """A parameter's name without the name of the adapter."""
    return name.replace(f".{_ONE}.", ".")


def with_product(
    weight: torch.Tensor, adapters: Mapping[str, torch.Tensor], layer: str, scale: tuple[float, bool]
) -> torch.Tensor:
    """A base weight [out, in] with the adapters of its layer, rounded once: what `merged` gives."""
    a, b = (adapters[f"{layer}.lora_{one}.weight"] for one in "AB")
    return (weight.float() + _product(a, b, *scale)).to(weight.dtype)


def _product(a: torch.Tensor, b: torch.Tensor, scale: float, transposed: bool) -> torch.Tensor:
    product = scale * (b.float() @ a.float())
    return product.T.contiguous() if transposed else product


def _tied(model: Any) -> set[str]:
    """Names of modules that share the embedding's memory."""
    embedding = model.get_input_embeddings()
    return {
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is embedding.weight
    }
