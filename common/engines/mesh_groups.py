"""The process groups of one rank of a `pp x tp x dp` mesh; a group of one rank is None."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmq.common.engines.decoder_shape import Place
from rlmq.common.layouts.layout import MeshShape
from rlmq.common.layouts.zero_redundancy import Grouping

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MakeGroup = Callable[[str, Sequence[int]], "ProcessGroup | None"]
"""From a name and ranks in order, this rank among them, to their group."""


@dataclass(frozen=True, slots=True)
class MeshGroups:
    """Groups of this rank: all ranks; its tensor ranks; its pipeline stages; its replicas; all ranks of its
    replica;
    the first and the last stage, where this rank is on one of them and they are two."""

    mesh: MeshShape
    rank: int
    everyone: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    replica: ProcessGroup | None = None
    ends: ProcessGroup | None = None

    @property
    def place(self) -> Place:
        """What of the model this rank trains."""
        stage, part, _ = self.mesh.place(self.rank)
        return Place(part, self.mesh.tp, stage, self.mesh.pp)


def training_groups(mesh: MeshShape, rank: int, make: MakeGroup) -> MeshGroups:
    """The groups that training needs; every rank of the mesh calls."""
    stage, part, replica = mesh.place(rank)
    last = mesh.pp - 1
    at_end = last > 0 and stage in (0, last)
    return MeshGroups(
        mesh,
        rank,
        everyone=make("everyone", range(mesh.size)),
        tp=make("tp", [mesh.rank(stage, i, replica) for i in range(mesh.tp)]),
        pp=make("pp", [mesh.rank(i, part, replica) for i in range(mesh.pp)]),
        dp=make("dp", [mesh.rank(stage, part, i) for i in range(mesh.dp)]),
        replica=make("replica", range(replica * mesh.pp * mesh.tp, (replica + 1) * mesh.pp * mesh.tp)),
        ends=make("ends", [mesh.rank(i, part, replica) for i in (0, last)]) if at_end else None,
    )


def generation_groups(grouping: Grouping, rank: int, make: MakeGroup) -> MeshGroups:
    """The groups of this rank's generation replica: `tp`, `pp` and `replica` of a mesh of one replica."""
    members = next(ranks for ranks in grouping.replicas if rank in ranks)
    mesh = MeshShape(grouping.pp, grouping.tp, 1)
    own = members.index(rank)
    stage, part, _ = mesh.place(own)
    return MeshGroups(
        mesh,
        own,
        tp=make("generation tp", [members[mesh.rank(stage, i, 0)] for i in range(mesh.tp)]),
        pp=make("generation pp", [members[mesh.rank(i, part, 0)] for i in range(mesh.pp)]),
        replica=make("generation", members),
    )
