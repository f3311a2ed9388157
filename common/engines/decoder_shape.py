"""A Llama-like decoder cut over stages and tensor ranks: which tensors there are, and who holds which rows.

Column-parallel matrices (`q k v gate up`, embedding and head) are cut in their first dimension, row-parallel ones
(`o down`) in their second; norms and the biases of row-parallel layers are whole on every rank of their stage.
Rank `r` of `t` has query heads `[r·H // t, (r+1)·H // t)`, and the key heads that these use: where key heads do
not divide, ranks share one, and both hold it. Stage `s` of `p` has layers `[s·L // p, (s+1)·L // p)`; the
embedding is on the first stage, the last norm and the head on the last one, a tied embedding on both.

Boundaries are `floor(r·n / t)`, so that the part of a coarser cut is exactly the union of the finer cut's parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rlmq.common.errors import UsageError
from rlmq.common.layouts.layout import Box, Layout, MeshShape
from rlmq.common.layouts.zero_redundancy import Grouping
from rlmq.common.weights import TensorSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Along = Literal["whole", "vocabulary", "queries", "keys", "intermediate"]
"""What a tensor is cut along."""

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_MODELS = ("llama", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Place:
    """Part `tp` of `tps` tensor ranks on stage `pp` of `pps`."""

    tp: int = 0
    tps: int = 1
    pp: int = 0
    pps: int = 1

    def of_rank(self, part: int) -> Place:
        """The place of another tensor rank of this stage."""
        return replace(self, tp=part)

    @property
    def first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.pp == 0

    @property
    def last(self) -> bool:
        """Whether this stage has the head."""
        return self.pp == self.pps - 1


@dataclass(frozen=True, slots=True)
class CutTensor:
    """A tensor of the model under its Hugging Face name.

    `dim` is the one it is cut in, `partial` says that each tensor rank has only a part of its gradient though all
    of it, `layer` is None outside the layers.
    """

    name: str
    shape: tuple[int, ...]
    along: Along = "whole"
    dim: int = 0
    partial: bool = False
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers that a decoder is made of; `biases` are the projections that have one."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    tied: bool
    biases: frozenset[str]
    head_norms: bool

    @classmethod
    def of(cls, config: PretrainedConfig) -> DecoderShape:
        """The shape of a transformers model.

        Raises:
            UsageError: a model that is not of this kind.
        """
        told: Any = config
        kind = getattr(told, "model_type", "")
        kinds = set(getattr(told, "layer_types", None) or ["full_attention"])
        rope = (getattr(told, "rope_parameters", None) or {}).get("rope_type", "default")
        window = getattr(told, "sliding_window", None) and getattr(told, "use_sliding_window", True)
        known = kind in _MODELS and told.hidden_act == "silu" and rope in _ROPES
        if not known or window or kinds != {"full_attention"}:
            raise UsageError(
                "strategy 3d",
                got=f"a {kind} model ({told.hidden_act}, {rope} positions, {', '.join(sorted(kinds))})",
                expected=f"{', '.join(_MODELS)} with silu, {' or '.join(_ROPES)} positions and full attention",
                remedy="Use another strategy",
            )
        attention, mlp = bool(getattr(told, "attention_bias", False)), bool(getattr(told, "mlp_bias", False))
        biases = {"q", "k", "v"} if attention or kind == "qwen2" else set()
        biases |= ({"o"} if attention else set()) | ({"gate", "up", "down"} if mlp else set())
        return cls(
            vocabulary=told.vocab_size,
            hidden=told.hidden_size,
            intermediate=told.intermediate_size,
            layers=told.num_hidden_layers,
            heads=told.num_attention_heads,
            kv_heads=told.num_key_value_heads,
            head_dim=getattr(told, "head_dim", None) or told.hidden_size // told.num_attention_heads,
            epsilon=told.rms_norm_eps,
            tied=bool(told.tie_word_embeddings),
            biases=frozenset(biases),
            head_norms=kind == "qwen3",
        )

    def check(self, mesh: MeshShape, subject: str) -> None:
        """Refuse a mesh that leaves a rank without heads, or a stage without layers.

        Raises:
            UsageError: names both numbers.
        """
        for what, whole, parts in (("query heads", self.heads, mesh.tp), ("layers", self.layers, mesh.pp)):
            if parts > whole:
                raise UsageError(subject, got=f"{whole} {what} over {parts} ranks", expected="at least one each")

    def tensors(self) -> Iterator[CutTensor]:
        """Every tensor without aliases, in the order of transformers' `state_dict`."""
        yield CutTensor(EMBEDDING, (self.vocabulary, self.hidden), "vocabulary")
        for layer in range(self.layers):
            yield from self._of_layer(layer)
        yield CutTensor(LAST_NORM, (self.hidden,))
        if not self.tied:
            yield CutTensor(HEAD, (self.vocabulary, self.hidden), "vocabulary")

    def _of_layer(self, layer: int) -> Iterator[CutTensor]:
        prefix = f"model.layers.{layer}"
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        columns: tuple[tuple[str, str, int, Along], ...] = (
            ("self_attn", "q", queries, "queries"),
            ("self_attn", "k", keys, "keys"),
            ("self_attn", "v", keys, "keys"),
            ("mlp", "gate", self.intermediate, "intermediate"),
            ("mlp", "up", self.intermediate, "intermediate"),
        )
        for module, name, rows, along in columns:
            yield CutTensor(f"{prefix}.{module}.{name}_proj.weight", (rows, self.hidden), along, layer=layer)
            if name in self.biases:
                yield CutTensor(f"{prefix}.{module}.{name}_proj.bias", (rows,), along, layer=layer)
        rows_of: tuple[tuple[str, str, int, Along], ...] = (
            ("self_attn", "o", queries, "queries"),
            ("mlp", "down", self.intermediate, "intermediate"),
        )
        for module, name, columns_in, along in rows_of:
            yield CutTensor(
                f"{prefix}.{module}.{name}_proj.weight", (self.hidden, columns_in), along, dim=1, layer=layer
            )
            if name in self.biases:
                yield CutTensor(f"{prefix}.{module}.{name}_proj.bias", (self.hidden,), layer=layer)
        for name in ("q_norm", "k_norm") if self.head_norms else ():
            yield CutTensor(f"{prefix}.self_attn.{name}.weight", (self.head_dim,), partial=True, layer=layer)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield CutTensor(f"{prefix}.{name}.weight", (self.hidden,), layer=layer)

    def layers_at(self, place: Place) -> range:
        """Layers of a stage."""
        return range(*_part(self.layers, place.pp, place.pps))

    def heads_at(self, place: Place) -> range:
        """Query heads of a tensor rank."""
        return range(*_part(self.heads, place.tp, place.tps))

    def kv_heads_at(self, place: Place) -> range:
        """Key heads that a tensor rank's query heads use."""
        queries, group = self.heads_at(place), self.heads // self.kv_heads
        return range(queries.start // group, (queries.stop - 1) // group + 1)

    def box(self, tensor: CutTensor, place: Place) -> Box | None:
        """What the rank at a place holds of a tensor; None when another stage has it."""
        here = tensor.layer in self.layers_at(place) if tensor.layer is not None else self._at_end(tensor, place)
        if not here:
            return None
        start, stop = [0] * len(tensor.shape), list(tensor.shape)
        if tensor.along != "whole":
            start[tensor.dim], stop[tensor.dim] = self._span(tensor.along, place)
        return Box(tuple(start), tuple(stop))

    def _at_end(self, tensor: CutTensor, place: Place) -> bool:
        if tensor.name == EMBEDDING:
            return place.first or (place.last and self.tied)
        return place.last

    def _span(self, along: Along, place: Place) -> tuple[int, int]:
        if along == "vocabulary":
            return _part(self.vocabulary, place.tp, place.tps)
        if along == "intermediate":
            return _part(self.intermediate, place.tp, place.tps)
        heads = self.heads_at(place) if along == "queries" else self.kv_heads_at(place)
        return heads.start * self.head_dim, heads.stop * self.head_dim

    def vocabulary_at(self, place: Place) -> range:
        """Token ids whose rows a tensor rank has."""
        return range(*self._span("vocabulary", place))

    def layout(self, places: list[Place], dtype: str) -> Layout:
        """The layout of ranks 0, 1, … at these places; `dtype` as safetensors spells it."""
        tensors, held = {}, {}
        for tensor in self.tensors():
            tensors[tensor.name] = TensorSpec(tensor.name, tensor.shape, dtype)
            boxes = {rank: self.box(tensor, place) for rank, place in enumerate(places)}
            held[tensor.name] = {rank: (box,) for rank, box in boxes.items() if box is not None}
        return Layout(tensors, held, {HEAD: EMBEDDING} if self.tied else {})


def places_of_mesh(mesh: MeshShape) -> list[Place]:
    """Where each rank of a mesh is."""
    found = []
    for rank in range(mesh.size):
        stage, part, _ = mesh.place(rank)
        found.append(Place(part, mesh.tp, stage, mesh.pp))
    return found


def generation_places(grouping: Grouping) -> list[Place]:
    """What each rank of a training mesh generates with; it contains what the rank trains."""
    found = []
    for rank in range(grouping.training.size):
        stage, part, _, _ = grouping.place(rank)
        found.append(Place(part, grouping.tp, stage, grouping.pp))
    return found


def _part(whole: int, part: int, parts: int) -> tuple[int, int]:
    return part * whole // parts, (part + 1) * whole // parts
