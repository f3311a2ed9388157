"""Transfer protocols: how the rows of one call are dealt to the ranks of a mesh, and how the results come back.

A protocol is a pair. `distribute` says which rows each rank gets, `collect` which ranks give back results. Both are
pure functions of the number of rows and the mesh, so the caller and every rank compute the same by themselves, and
nothing but row ids travels.

| protocol | distribute | collect |
|---|---|---|
| one_to_all | all rows to every rank | every rank's own result |
| dp | split over all ranks | all ranks |
| dp_ragged | the same by the rows' sizes, so that ranks have about equal loads | all ranks |
| 3d | split over replicas, the same to all ranks of one | last stage, first tensor rank of each replica |
| 3d_all_micro_dp | split over generation replicas, the same to all ranks of one | first rank of each |
| 3d_pp_only | all rows to every rank | first tensor rank of the first replica on every stage: its own result |
| all_to_all | nothing: every rank knows what it works on | every rank's own result |

The first six are those of HybridFlow (arXiv 2409.19256, Table 3), `dp_ragged` apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rlmq.common.errors import UsageError
from rlmq.common.layouts.build import intervals
from rlmq.common.layouts.layout import MeshShape
from rlmq.common.layouts.zero_redundancy import Grouping

Rows = list[list[int]]
"""For each rank the numbers of its rows, in order."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a role: how they train and, where they generate too, how they do that."""

    training: MeshShape
    generation_pp: int = 1
    generation_tp: int = 1

    @property
    def grouping(self) -> Grouping:
        """Generation places."""
        return Grouping(self.training, self.generation_pp, self.generation_tp)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A protocol; a user's own is made like the presets.

    Args:
        name: in messages.
        distribute: rows of each rank from the number of rows, their sizes (tokens; empty: all alike) and the mesh.
        collect: the ranks that give back results.
        gives: `rows`: one result per row, put together in row order; `ranks`: one result per collected rank.

    Example:
        >>> halves = Transfer("halves", lambda rows, sizes, mesh: [[*range(rows // 2)], [*range(rows // 2, rows)]],
        ...                   lambda mesh: [0, 1])
    """

    name: str
    distribute: Callable[[int, Sequence[int], Mesh], Rows]
    collect: Callable[[Mesh], Sequence[int]]
    gives: Literal["rows", "ranks"] = "rows"


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank works on.

    Args:
        rows: numbers of its rows, in order.
        gives_back: whether its result is collected.
        micro_batches: how many all ranks go through; those with fewer rows go through empty ones, so that every
            collective is met by all.
    """

    rows: tuple[int, ...]
    gives_back: bool
    micro_batches: int = 1


def shares(
    transfer: Transfer, rows: int, mesh: Mesh, *, sizes: Sequence[int] = (), most_rows: int = 0
) -> list[Share]:
    """What each rank works on.

    Args:
        sizes: of the rows, for `dp_ragged`.
        most_rows: in one micro-batch; 0: any number.

    Raises:
        UsageError: the protocol deals rows to other ranks than the mesh has, deals a row that does not exist, or
            its collect would lose rows or return some twice; with the numbers.
    """
    dealt = transfer.distribute(rows, sizes, mesh)
    collected = list(transfer.collect(mesh))
    size = mesh.training.size
    if len(dealt) != size or any(not 0 <= rank < size for rank in collected):
        raise UsageError(
            f"transfer protocol {transfer.name}",
            got=f"rows for {len(dealt)} ranks, results from ranks {collected}",
            expected=f"the {size} ranks of mesh {mesh.training}",
        )
    if transfer.gives == "rows":
        _check_rows(transfer.name, rows, [dealt[rank] for rank in collected], collected)
    longest = max((len(one) for one in dealt), default=0)
    micro_batches = max(1, -(-longest // most_rows)) if most_rows else 1
    return [Share(tuple(one), rank in collected, micro_batches) for rank, one in enumerate(dealt)]


def _check_rows(name: str, rows: int, returned: Rows, ranks: Sequence[int]) -> None:
    numbers = sorted(number for one in returned for number in one)
    if numbers == list(range(rows)):
        return
    lost = sorted(set(range(rows)) - set(numbers))
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    wrong = (
        f"{len(lost)} lost, the first is {lost[0]}" if lost else f"rows that are not there, or {twice[:1]} twice"
    )
    raise UsageError(
        f"transfer protocol {name}",
        got=f"{len(numbers)} results from ranks {list(ranks)} for {rows} rows: {wrong}",
        expected="each row once",
        remedy="Correct the protocol's collect",
    )


def together(transfer: Transfer, given: Sequence[Share], results: Mapping[int, Any]) -> list[Any]:
    """Results by rank as the caller gets them: in row order, or in the order of the collected ranks.

    Raises:
        UsageError: a rank gave back another number of results than it has rows.
    """
    ranks = [rank for rank, share in enumerate(given) if share.gives_back]
    if transfer.gives == "ranks":
        return [results[rank] for rank in ranks]
    found: dict[int, Any] = {}
    for rank in ranks:
        if len(results[rank]) != len(given[rank].rows):
            raise UsageError(
                f"transfer protocol {transfer.name}",
                got=f"{len(results[rank])} results from rank {rank}",
                expected=f"one for each of its {len(given[rank].rows)} rows",
            )
        found.update(zip(given[rank].rows, results[rank], strict=True))
    return [found[number] for number in sorted(found)]


# -- the presets --------------------------------------------------------------------------------------------


def _everything(rows: int, _: Sequence[int], mesh: Mesh) -> Rows:
    return [list(range(rows)) for _ in range(mesh.training.size)]


def _nothing(_: int, __: Sequence[int], mesh: Mesh) -> Rows:
    return [[] for _ in range(mesh.training.size)]


def _dealt(rows: int, groups: Sequence[Sequence[int]], size: int) -> Rows:
    """Consecutive rows to each group; all its ranks get the same."""
    dealt: Rows = [[] for _ in range(size)]
    for (low, high), group in zip(intervals(rows, len(groups)), groups, strict=True):
        for rank in group:
            dealt[rank] = list(range(low, high))
    return dealt


def _replicas(mesh: MeshShape) -> list[range]:
    each = mesh.pp * mesh.tp
    return [range(replica * each, (replica + 1) * each) for replica in range(mesh.dp)]


def _over_ranks(rows: int, _: Sequence[int], mesh: Mesh) -> Rows:
    size = _only_dp(mesh)
    return _dealt(rows, [[rank] for rank in range(size)], size)


def _by_size(rows: int, sizes: Sequence[int], mesh: Mesh) -> Rows:
    """The largest row first, each to the rank with the least so far."""
    if len(sizes) != rows:
        raise UsageError(
            "transfer protocol dp_ragged", got=f"{len(sizes)} sizes", expected=f"one for each of {rows}"
        )
    dealt: Rows = [[] for _ in range(_only_dp(mesh))]
    loads = [0] * len(dealt)
    for number in sorted(range(rows), key=lambda one: (-sizes[one], one)):
        rank = min(range(len(dealt)), key=lambda one: (loads[one], len(dealt[one]), one))
        dealt[rank].append(number)
        loads[rank] += sizes[number]
    return [sorted(one) for one in dealt]


def _only_dp(mesh: Mesh) -> int:
    if mesh.training.pp * mesh.training.tp != 1:
        raise UsageError(
            "transfer protocol dp",
            got=f"mesh {mesh.training}",
            expected="data-parallel ranks alone",
            remedy="Use 3d, whose ranks of one replica get the same rows",
        )
    return mesh.training.dp


PROTOCOLS: Mapping[str, Transfer] = {
    one.name: one
    for one in (
        Transfer("one_to_all", _everything, lambda mesh: range(mesh.training.size), "ranks"),
        Transfer("dp", _over_ranks, lambda mesh: range(mesh.training.size)),
        Transfer("dp_ragged", _by_size, lambda mesh: range(mesh.training.size)),
        Transfer(
            "3d",
            lambda rows, _, mesh: _dealt(rows, _replicas(mesh.training), mesh.training.size),
            lambda mesh: [mesh.training.rank(mesh.training.pp - 1, 0, d) for d in range(mesh.training.dp)],
        ),
        Transfer(
            "3d_all_micro_dp",
            lambda rows, _, mesh: _dealt(rows, mesh.grouping.replicas, mesh.training.size),
            lambda mesh: [ranks[0] for ranks in mesh.grouping.replicas],
        ),
        Transfer(
            "3d_pp_only",
            _everything,
            lambda mesh: [mesh.training.rank(stage, 0, 0) for stage in range(mesh.training.pp)],
            "ranks",
        ),
        Transfer("all_to_all", _nothing, lambda mesh: range(mesh.training.size), "ranks"),
    )
}


# -- on a worker's method ------------------------------------------------------------------------------------

Method = TypeVar("Method", bound=Callable[..., Any])
ATTRIBUTE = "rlmq_transfer"
"""Of a registered method: its protocol."""


def register(*, transfer: str | Transfer) -> Callable[[Method], Method]:
    """Say how calls of a method are dealt to its ranks.

    The method is written for one rank: it takes the rows that this rank shall work on, and returns one result per
    row (or, with protocols that collect from ranks, anything).

    In a recipe, a node whose `method` is such a method is a mesh of ranks: the controller has it called on rows.

    Example:
        >>> class Scorer:
        ...     def __init__(self, mesh): self.rank = mesh.rank
        ...     @register(transfer="dp")
        ...     def score(self, rows, micro_batches): return [len(row) for row in rows]

    Raises:
        UsageError: no such protocol.
    """
    if isinstance(transfer, str) and transfer not in PROTOCOLS:
        raise UsageError("transfer", got=repr(transfer), expected=f"one of {', '.join(PROTOCOLS)}, or a Transfer")
    found = PROTOCOLS[transfer] if isinstance(transfer, str) else transfer

    def attach(method: Method) -> Method:
        setattr(method, ATTRIBUTE, found)
        return method

    return attach


def transfer_of(method: Callable[..., Any]) -> Transfer:
    """The protocol that a method is registered with.

    Raises:
        UsageError: with none.
    """
    found = getattr(method, ATTRIBUTE, None)
    if not isinstance(found, Transfer):
        raise UsageError(
            f"method {getattr(method, '__qualname__', method)}",
            got="no transfer protocol",
            expected="@rlmq.register(transfer=...) on it",
        )
    return found


@dataclass(frozen=True)
class RankedCall:
    """One call of a registered method over all ranks of a mesh.

    Caller and ranks make it from the same arguments. The caller sends `rows`, has `on_rank` run everywhere by what
    carries its calls, and gives the results to `collected`.
    """

    transfer: Transfer
    mesh: Mesh
    rows: Sequence[Any]
    sizes: Sequence[int] = ()
    most_rows: int = 0

    @functools.cached_property
    def shares(self) -> list[Share]:
        """See `shares`."""
        return shares(self.transfer, len(self.rows), self.mesh, sizes=self.sizes, most_rows=self.most_rows)

    def on_rank(self, method: Callable[..., Any], rank: int) -> Any:
        """The method's result for this rank's rows; None where it is not collected."""
        share = self.shares[rank]
        result = method([self.rows[number] for number in share.rows], micro_batches=share.micro_batches)
        return result if share.gives_back else None

    def collected(self, results: Sequence[Any]) -> list[Any]:
        """What the caller gets, from the results by rank."""
        return together(self.transfer, self.shares, dict(enumerate(results)))
