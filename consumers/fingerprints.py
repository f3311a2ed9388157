"""What a step made of gradients and weights, in 16 digits a tensor: by these a replay is compared with the run.

The first line names the tensors; a step's line has a fingerprint of each in that order::

    {"names": ["model.embed_tokens.weight", …]}
    {"step": 12, "loss": …, "grad_norm": …, "gradient": "8f0c… …", "weights": "03ab… …"}

A step that is redone has several lines; the last one counts. In bfloat16 the weights are the float32 masters. Of a
sharded model, they are those of rank 0's part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Kind = Literal["gradient", "weights"]
_BLOCK = 1 << 15


@dataclass(frozen=True, slots=True)
class StepPrint:
    """A step's fingerprints by tensor. Several updates of a step are chained into one of `gradient`."""

    step: int
    loss: float
    grad_norm: float
    gradient: Mapping[str, str]
    weights: Mapping[str, str]

    def whole(self, kind: Kind) -> str:
        """One fingerprint of all tensors."""
        prints = self.gradient if kind == "gradient" else self.weights
        return hashlib.sha256(" ".join(prints.values()).encode()).hexdigest()[:16]

    def differs_from(self, other: StepPrint) -> str:
        """What differs first: `gradient of NAME`, `weights of NAME`, `loss`; empty: nothing, to the bit."""
        for kind, own, others in (
            ("gradient", self.gradient, other.gradient),
            ("weights", self.weights, other.weights),
        ):
            for name in dict.fromkeys([*own, *others]):
                if own.get(name) != others.get(name):
                    return f"{kind} of {name}"
        figures = (("loss", self.loss, other.loss), ("grad_norm", self.grad_norm, other.grad_norm))
        return next((name for name, own, theirs in figures if own != theirs), "")


class Fingerprints:
    """Takes the fingerprints of one step after the other; `watch` is the engine's to call.

    Args:
        path: where they are kept; None: nowhere.

    Attributes:
        last: those of the newest step.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[Kind, dict[str, str]] = {"gradient": {}, "weights": {}}
        self._named: tuple[str, ...] = ()
        self.last: StepPrint | None = None

    def watch(self, kind: Kind, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Called in each update with the gradients as the optimizer gets them, and with the weights after it."""
        before = self._found[kind] if kind == "gradient" else {}
        for name, tensor in tensors:
            digest = fingerprint(_bytes(tensor))
            if name in before:
                digest = hashlib.sha256(f"{before[name]} {digest}".encode()).hexdigest()[:16]
            self._found[kind][name] = digest

    def take(self, step: int, figures: Mapping[str, float]) -> None:
        """End the step, and keep its line."""
        found = self._found
        self._found = {"gradient": {}, "weights": {}}
        figure = {name: float(figures.get(name, float("nan"))) for name in ("loss", "grad_norm")}
        made = StepPrint(step, figure["loss"], figure["grad_norm"], found["gradient"], found["weights"])
        if self._path is not None:
            self._write(made)
        self.last = made

    def _write(self, made: StepPrint) -> None:
        assert self._path is not None
        names = tuple(made.weights or made.gradient)
        lines: list[dict[str, object]] = []
        if names != self._named:
            self._named = names
            lines.append({"names": names})
        prints = {"gradient": " ".join(made.gradient.values()), "weights": " ".join(made.weights.values())}
        lines.append({"step": made.step, "loss": made.loss, "grad_norm": made.grad_norm, **prints})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with self._path.open("a+b") as file:
            if file.tell() and file.seek(-1, 2) and file.read(1) != b"\n":  # a line that a crash has cut
                text = "\n" + text
            file.write(text.encode())


def read_fingerprints(path: Path) -> dict[int, StepPrint]:
    """The steps of a run's file; {} where there is none."""
    found: dict[int, StepPrint] = {}
    names: list[str] = []
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        names = line.get("names", names)
        if "step" in line:
            gradient, weights = (
                dict(zip(names, line[kind].split(), strict=False)) for kind in ("gradient", "weights")
            )
            found[line["step"]] = StepPrint(line["step"], line["loss"], line["grad_norm"], gradient, weights)
    return found


def fingerprint(content: NDArray[np.uint8]) -> str:
    """16 hex digits of bytes. Any change within eight neighbours of them is seen for certain, others but for 2^-64.

    Words of 64 bits are multiplied by odd numbers of their places and summed, block by block, modulo 2^64; the
    sums are hashed. That reads memory four times as fast as SHA-256 does.
    """
    whole = len(content) // 8 * 8
    words = content[:whole].view(np.uint64)
    blocks = len(words) // _BLOCK * _BLOCK
    factors = _factors()
    sums = words[:blocks].reshape(-1, _BLOCK) @ factors
    rest = words[blocks:] @ factors[: len(words) - blocks]
    digest = hashlib.sha256(str(len(content)).encode())
    for part in (sums.tobytes(), rest.tobytes(), content[whole:].tobytes()):
        digest.update(part)
    return digest.hexdigest()[:16]


@cache
def _factors() -> NDArray[np.uint64]:
    return np.random.default_rng(1).integers(0, 1 << 63, _BLOCK, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    import torch

    local = getattr(tensor, "to_local", lambda: tensor)()
    flat = local.detach().contiguous().cpu().reshape(-1)
    found: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found
