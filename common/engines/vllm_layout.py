"""How a Llama-like decoder lies on vLLM's ranks: layout under Hugging Face names, and its boxes in vLLM's tensors.

The rules are vLLM's (`model_executor/layers/linear.py`, `vocab_parallel_embedding.py`, `distributed/utils.py`):

    qkv_proj       query heads evenly; key heads evenly, or each of them on `tp / kv_heads` ranks; q, k, v in a row
    gate_up_proj   an even part of gate, then one of up
    embedding      rows padded to a multiple of 64, then evenly: the last ranks may have fewer rows, or none
    layers         evenly over stages; what is left goes to stages before the last one, from the last but one on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from rlmq.common.engines.decoder_shape import EMBEDDING, HEAD, LAST_NORM, DecoderShape
from rlmq.common.errors import UsageError
from rlmq.common.layouts.build import Cut, Interval, sharded
from rlmq.common.layouts.layout import Layout, MeshShape
from rlmq.common.layouts.views import Shards
from rlmq.common.weights import TensorSpec

if TYPE_CHECKING:
    import torch

_PADDED_TO = 64
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def vllm_layout(shape: DecoderShape, mesh: MeshShape, dtype: str, *, ranks: Sequence[int] | None = None) -> Layout:
    """What each of vLLM's ranks holds.

    Args:
        mesh: pipeline and tensor ranks of vLLM, and its replicas.
        dtype: as in safetensors.
        ranks: the rank at each place, where they are not 0, 1, 2, …

    Raises:
        UsageError: numbers that vLLM refuses: heads, rows of the feed-forward block or the padded vocabulary by tp.
    """
    tp = mesh.tp
    _divides("query heads", shape.heads, tp)
    _divides("rows of gate_up_proj", shape.intermediate, tp)
    padded = -(-shape.vocabulary // _PADDED_TO) * _PADDED_TO
    _divides("rows of the padded vocabulary", padded, tp)
    if tp < shape.kv_heads:
        _divides("key heads", shape.kv_heads, tp)
    else:
        _divides("tensor ranks over key heads", tp, shape.kv_heads)
    keys = [(rank * shape.kv_heads // tp, max(1, shape.kv_heads // tp)) for rank in range(tp)]
    spans: dict[str, list[Interval]] = {
        "queries": [_even(shape.heads * shape.head_dim, tp, rank) for rank in range(tp)],
        "keys": [(first * shape.head_dim, (first + count) * shape.head_dim) for first, count in keys],
        "intermediate": [_even(shape.intermediate, tp, rank) for rank in range(tp)],
        "vocabulary": [
            (min(low, shape.vocabulary), min(high, shape.vocabulary))
            for low, high in (_even(padded, tp, rank) for rank in range(tp))
        ],
    }
    tensors = list(shape.tensors())
    cuts = {
        one.name: Cut(one.dim, tuple((span,) for span in spans[one.along]))
        for one in tensors
        if one.along != "whole"
    }
    last = mesh.pp - 1
    stage = {
        layer: at for at, (low, high) in enumerate(_stages(shape.layers, mesh.pp)) for layer in range(low, high)
    }
    on: dict[str, tuple[int, ...]] = {one.name: (stage[one.layer],) for one in tensors if one.layer is not None}
    on |= {EMBEDDING: tuple({0, last} if shape.tied else {0}), LAST_NORM: (last,), HEAD: (last,)}
    specs = [TensorSpec(one.name, one.shape, dtype) for one in tensors]
    return sharded(specs, mesh, cuts, on, ranks=ranks, aliases={HEAD: EMBEDDING} if shape.tied else None)


def vllm_shards(layout: Layout, rank: int, named: Mapping[str, torch.Tensor]) -> Shards:
    """The boxes of a rank as views into its vLLM model's parameters (`dict(model.named_parameters())`).

    Raises:
        UsageError: a parameter that is not there, or has another shape.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for name, by_rank in layout.held.items():
        for box in by_rank.get(rank, ()):
            own, first = _inside(layout, rank, name)
            if own not in named:
                raise UsageError(f"tensor {name}", got=f"no parameter {own}", expected="one of vLLM's model")
            found[name] = [named[own][first : first + box.shape[0]]]
    return Shards(layout, rank, found)


def _inside(layout: Layout, rank: int, name: str) -> tuple[str, int]:
    """vLLM's parameter, and the row at which the tensor begins in it."""
    for fused, parts in _FUSED.items():
        for number, part in enumerate(parts):
            if f".{part}." in name:
                before = (name.replace(part, other) for other in parts[:number])
                rows = sum(box.shape[0] for other in before for box in layout.held[other][rank])
                return name.replace(part, fused), rows
    return name, 0


def _even(size: int, parts: int, index: int) -> Interval:
    return index * (size // parts), (index + 1) * (size // parts)


def _divides(what: str, size: int, parts: int) -> None:
    if size % parts:
        raise UsageError(f"vLLM's layout, {what}", got=f"{size} over {parts}", expected="a multiple")


def _stages(layers: int, pp: int) -> list[Interval]:
    if layers < pp:
        raise UsageError("vLLM's layout, layers", got=f"{layers} over {pp} stages", expected="at least one each")
    counts = [layers // pp] * pp
    for place in range(2, layers % pp + 2):
        counts[-place] += 1
    return list(pairwise((0, *accumulate(counts))))
