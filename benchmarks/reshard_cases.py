"""The cases of `rlmq bench reshard`: models, meshes, and which of the three strategies brings what to whom."""

from __future__ import annotations

from dataclasses import dataclass

from rlmq.common.engines.decoder_shape import DecoderShape, places_of_mesh
from rlmq.common.layouts.build import even, sharded, stages
from rlmq.common.layouts.layout import Layout, MeshShape
from rlmq.common.layouts.zero_redundancy import Grouping
from rlmq.common.weights import TensorSpec

_LAYERS, _WIDTH, _EACH = 8, 512, 6  # of the uniform model: 24 MiB in bf16

LLAMA_135M = DecoderShape(49152, 768, 2048, 16, 12, 4, 64, 1e-5, True, frozenset(), False)
SMOLLM2 = DecoderShape(49152, 576, 1536, 30, 9, 3, 64, 1e-5, True, frozenset(), False)


@dataclass(frozen=True, slots=True)
class Case:
    """One switch: a model, its training mesh, and generation's pp and tp."""

    model: str
    training: MeshShape
    pp: int
    tp: int

    @property
    def grouping(self) -> Grouping:
        """Generation places."""
        return Grouping(self.training, self.pp, self.tp)

    @property
    def layout(self) -> Layout:
        """The training layout."""
        if self.model == "uniform":
            return uniform(self.training)
        shape = LLAMA_135M if self.model == "llama-135m" else SMOLLM2
        shape.check(self.training, self.model)
        return shape.layout(places_of_mesh(self.training), "BF16")


def uniform(mesh: MeshShape) -> Layout:
    """A model that every dimension divides: the closed forms hold for it exactly."""
    specs, cuts, on = [], {}, {}
    for stage, (low, high) in enumerate(stages(_LAYERS, mesh.pp)):
        for layer in range(low, high):
            for part in range(_EACH):
                name = f"{layer}.{part}"
                specs.append(TensorSpec(name, (_WIDTH, _WIDTH), "BF16"))
                cuts[name], on[name] = even(part % 2, _WIDTH, mesh.tp), [stage]
    return sharded(specs, mesh, cuts, on)


CASES = (
    Case("uniform", MeshShape(1, 4, 2), 1, 2),
    Case("uniform", MeshShape(1, 8, 1), 1, 2),
    Case("uniform", MeshShape(1, 8, 1), 1, 4),
    Case("uniform", MeshShape(2, 4, 1), 1, 2),
    Case("uniform", MeshShape(2, 2, 2), 1, 2),
    Case("uniform", MeshShape(1, 4, 2), 1, 4),
    Case("uniform", MeshShape(1, 4, 2), 1, 1),
    Case("llama-135m", MeshShape(1, 4, 2), 1, 2),
    Case("uniform", MeshShape(1, 8, 16), 1, 2),
    Case("uniform", MeshShape(4, 8, 1), 1, 8),
    Case("uniform", MeshShape(8, 8, 1), 1, 8),
    Case("smollm2-135m", MeshShape(1, 4, 2), 1, 2),
)
