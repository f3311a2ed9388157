"""From a training layout to a generation layout on the same ranks, so that a rank's shard stays of use.

Training is `p-t-d`. Generation is `p_g-t_g-d_g-d`: each training replica becomes `d_g = p t / (p_g t_g)` micro data
parallel replicas. Generation groups take ranks at intervals `t / t_g` and `p / p_g`; the ranks in between form a
micro-DP group, which together holds the generation shard of each of its ranks (HybridFlow, arXiv 2409.19256, 5.3).
With t = 4, t_g = 2, p = 1 a replica's ranks form generation TP groups [0 2] [1 3] and micro-DP groups [0 1] [2 3].

Three strategies, by what each rank receives of a model of M bytes (its Table 2)::

    all_gather        (t p d - 1) / (t p d)         from flat shards over all ranks, everything
    tp_pp_gather      (t p - 1) / (t p)             everything, from the ranks of the own replica
    zero_redundancy   (d_g - 1) / (t p)             only what the own shard lacks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from rlmq.common.errors import UsageError
from rlmq.common.layouts.build import flat_sharded, replicated
from rlmq.common.layouts.layout import Box, Layout, MeshShape
from rlmq.common.layouts.plan import Plan, plan

Strategy = Literal["all_gather", "tp_pp_gather", "zero_redundancy"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class Grouping:
    """Generation places of the ranks of a training mesh.

    Args:
        training: the mesh `p-t-d`.
        pp: p_g, divides p.
        tp: t_g, divides t.

    Raises:
        UsageError: they do not divide.
    """

    training: MeshShape
    pp: int
    tp: int

    def __post_init__(self) -> None:
        if self.pp < 1 or self.tp < 1 or self.training.pp % self.pp or self.training.tp % self.tp:
            raise UsageError(
                f"generation layout {self.pp}-{self.tp} of training layout {self.training}",
                expected=f"pp a divisor of {self.training.pp}, and tp of {self.training.tp}",
            )

    @property
    def micro_dp(self) -> int:
        """d_g: generation replicas in a training replica."""
        return self.training.pp * self.training.tp // (self.pp * self.tp)

    @property
    def replica_mesh(self) -> MeshShape:
        """Generation sizes, with dp = d_g d replicas."""
        return MeshShape(self.pp, self.tp, self.micro_dp * self.training.dp)

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """`(pp_index, tp_index, micro_dp_index, dp_index)` of a rank in generation."""
        stage, part, replica = self.training.place(rank)
        every_stage, every_part = self.training.pp // self.pp, self.training.tp // self.tp
        micro = stage % every_stage * every_part + part % every_part
        return stage // every_stage, part // every_part, micro, replica

    def _groups(self, same: tuple[int, ...]) -> list[list[int]]:
        """Ranks that agree in these entries of their place."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.training.size):
            place = self.place(rank)
            groups.setdefault(tuple(place[index] for index in reversed(same)), []).append(rank)
        return [groups[key] for key in sorted(groups)]

    @property
    def tp_groups(self) -> list[list[int]]:
        """Generation TP groups, each in order of its tp index."""
        return self._groups((0, 2, 3))

    @property
    def pp_groups(self) -> list[list[int]]:
        """Generation PP groups, each in order of its stages."""
        return self._groups((1, 2, 3))

    @property
    def micro_dp_groups(self) -> list[list[int]]:
        """Ranks that hold the same generation shard, replica by replica."""
        return self._groups((0, 1, 3))

    @property
    def replicas(self) -> list[list[int]]:
        """Ranks of each generation replica, in the order of a mesh: tp fastest, then pp."""
        return self._groups((2, 3))

    def __str__(self) -> str:
        return f"{self.training} -> {self.pp}-{self.tp}-{self.micro_dp}-{self.training.dp}"


def generation_layout(training: Layout, grouping: Grouping) -> Layout:
    """Every rank holds what its micro-DP group holds in training: the least that contains its own shard."""
    merged: dict[tuple[tuple[Box, ...], ...], tuple[Box, ...]] = {}
    held: dict[str, dict[int, tuple[Box, ...]]] = {}
    for name, by_rank in training.held.items():
        held[name] = {}
        for group in grouping.micro_dp_groups:
            parts = tuple(by_rank[rank] for rank in group if rank in by_rank)
            if parts:
                if parts not in merged:
                    merged[parts] = union(sorted({box for boxes in parts for box in boxes}))
                held[name].update(dict.fromkeys(group, merged[parts]))
    return Layout(training.tensors, held, training.aliases)


def union(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Few disjoint boxes that cover the same elements; neighbours and overlapping ones along one dimension join."""
    joined = list(boxes)
    index = 0
    while index < len(joined):
        for other in range(index + 1, len(joined)):
            both = _joined(joined[index], joined[other])
            if both is not None:
                joined[index] = both
                del joined[other]
                index = -1
                break
        index += 1
    return tuple(joined)


def _joined(one: Box, other: Box) -> Box | None:
    """Their union where that is a box."""
    differ = [d for d in range(len(one.start)) if (one.start[d], one.stop[d]) != (other.start[d], other.stop[d])]
    if not differ:
        return one
    dim = differ[0]
    if len(differ) > 1 or one.stop[dim] < other.start[dim] or other.stop[dim] < one.start[dim]:
        return None
    start, stop = list(one.start), list(one.stop)
    start[dim] = min(one.start[dim], other.start[dim])
    stop[dim] = max(one.stop[dim], other.stop[dim])
    return Box(tuple(start), tuple(stop))


def switch_plan(strategy: Strategy, training: Layout, grouping: Grouping) -> Plan:
    """The moves of a strategy; those that gather everything keep their part of it afterwards."""
    if strategy == "zero_redundancy":
        return plan(training, generation_layout(training, grouping))
    everywhere = replicated(training.tensors.values(), training.ranks, aliases=training.aliases)
    if strategy == "all_gather":
        flat = flat_sharded(training.tensors.values(), training.ranks, rule="elements", aliases=training.aliases)
        return plan(flat, everywhere)
    return plan(training, everywhere)


@dataclass(frozen=True, slots=True)
class Volume:
    """Of a model's bytes, for each rank: received, most memory for weights, memory that serves nothing."""

    received: Fraction
    peak: Fraction
    redundant: Fraction


def closed_form(strategy: Strategy, grouping: Grouping) -> Volume:
    """The columns of HybridFlow's Table 2, for a model that every dimension divides."""
    replica = grouping.training.pp * grouping.training.tp
    if strategy == "zero_redundancy":
        held = Fraction(1, grouping.pp * grouping.tp)
        return Volume(Fraction(grouping.micro_dp - 1, replica), held, Fraction(0))
    ranks = replica * (grouping.training.dp if strategy == "all_gather" else 1)
    return Volume(Fraction(ranks - 1, ranks), Fraction(1), Fraction(1, ranks))
