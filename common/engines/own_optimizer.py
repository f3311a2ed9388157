"""The user's own optimizer: `train.optimizer: file.py:function`, and its state as named tensors.

The function gets the trained parameters by name and the `train` block, and gives a `torch.optim.Optimizer`. Each of
its groups keeps its learning rate as a share of `train.lr`, which the schedule moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlmq.common.engines.fully_sharded import like, whole
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.common.user_code import load_function

if TYPE_CHECKING:
    from rlmq.common.recipe.schema import TrainBlock

Build = Callable[[Mapping[str, torch.nn.Parameter], "TrainBlock"], torch.optim.Optimizer]


def own_optimizer(spec: str | None, folder: Path) -> Build | None:
    """The function, or None. Raises UsageError: no such file or function."""
    return None if spec is None else load_function(spec, folder, subject="train.optimizer")


def built(
    build: Build, names: Sequence[str], parameters: Sequence[torch.nn.Parameter], block: TrainBlock
) -> torch.optim.Optimizer:
    """Raises UsageError: the function gave no optimizer, or one that has not each parameter once."""
    made: Any = build(dict(zip(names, parameters, strict=True)), block)
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError("train.optimizer", got=f"a {type(made).__name__}", expected="a torch.optim.Optimizer")
    held = [id(one) for group in made.param_groups for one in group["params"]]
    if sorted(held) != sorted(map(id, parameters)):
        got = f"an optimizer of {len(held)} parameters"
        raise UsageError(
            "train.optimizer", got=got, expected=f"each of the {len(parameters)} that it was given, once"
        )
    return made


def named_state(
    optimizer: torch.optim.Optimizer, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """`KEY.NAME` of all that the optimizer keeps of a parameter; numbers as tensors without a dimension.

    Beside them `optimizer.CLASS`, an empty tensor: one optimizer cannot go on with what another kept.
    """
    return {_kind(optimizer): torch.zeros(0)} | {
        f"{key}.{name}": whole(value) if isinstance(value, torch.Tensor) else torch.tensor(float(value)).double()
        for name, parameter in zip(names, parameters, strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_named_state(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Restore `named_state`.

    Raises:
        IntegrityError: another optimizer's, or a parameter that this model has not, or of another shape.
    """
    if _kind(optimizer) not in state:
        raise IntegrityError(
            "optimizer state", got="another optimizer's", expected=f"that of {type(optimizer).__name__}"
        )
    by_name = dict(zip(names, parameters, strict=True))
    for full, value in state.items():
        if full == _kind(optimizer):
            continue
        name = next((one for one in by_name if full.endswith(f".{one}")), None)
        if name is None or (value.dim() and value.shape != by_name[name].shape):
            raise IntegrityError("optimizer state", got=full, expected="the names and shapes of this model")
        key, parameter = full.removesuffix(f".{name}"), by_name[name]
        number = value.dim() == 0 and value.dtype == torch.float64
        own = value.item() if number else like(parameter, value) if value.dim() else value.clone()
        optimizer.state.setdefault(parameter, {})[key] = own


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"optimizer.{type(optimizer).__name__}"
