"""What each transfer protocol deals to 8 ranks and takes back, written down by hand from HybridFlow's Table 3."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmq.common.errors import UsageError
from rlmq.common.layouts.layout import MeshShape
from rlmq.common.transfer import PROTOCOLS, Mesh, RankedCall, Transfer, register, shares, transfer_of

DP = Mesh(MeshShape(dp=8))
CUBE = Mesh(MeshShape(pp=2, tp=2, dp=2))  # ranks 0-3 and 4-7; stages (0 1) (2 3)
HYBRID = Mesh(MeshShape(pp=1, tp=4, dp=2), generation_tp=2)  # replicas [0 2] [1 3] [4 6] [5 7]
ALL = [0, 1, 2, 3, 4]
SIZES = [9, 1, 5, 4, 4]

GOLDEN: dict[str, tuple[Mesh, list[list[int]], list[int]]] = {
    "one_to_all": (CUBE, [ALL] * 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    "dp": (DP, [[0], [1], [2], [3], [4], [], [], []], [0, 1, 2, 3, 4, 5, 6, 7]),
    "dp_ragged": (DP, [[0], [2], [3], [4], [1], [], [], []], [0, 1, 2, 3, 4, 5, 6, 7]),
    "3d": (CUBE, [[0, 1, 2]] * 4 + [[3, 4]] * 4, [2, 6]),
    "3d_all_micro_dp": (HYBRID, [[0, 1], [2], [0, 1], [2], [3], [4], [3], [4]], [0, 1, 4, 5]),
    "3d_pp_only": (CUBE, [ALL] * 8, [0, 2]),
    "all_to_all": (CUBE, [[]] * 8, [0, 1, 2, 3, 4, 5, 6, 7]),
}


@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_what_is_dealt_and_taken_back(name: str) -> None:
    mesh, dealt, collected = GOLDEN[name]
    found = shares(PROTOCOLS[name], len(ALL), mesh, sizes=SIZES)

    assert [list(share.rows) for share in found] == dealt
    assert [rank for rank, share in enumerate(found) if share.gives_back] == collected


@given(st.sampled_from(["dp", "dp_ragged", "3d", "3d_all_micro_dp"]), st.lists(st.integers(1, 50), max_size=40))
def test_results_come_back_in_row_order_for_any_number_of_rows(name: str, sizes: list[int]) -> None:
    mesh = {"3d": CUBE, "3d_all_micro_dp": HYBRID}.get(name, Mesh(MeshShape(dp=3)))
    call = RankedCall(PROTOCOLS[name], mesh, [f"row {n}" for n in range(len(sizes))], sizes, most_rows=4)

    def method(rows: Sequence[str], micro_batches: int) -> list[str]:
        assert micro_batches >= max(1, -(-len(rows) // 4))
        counts.add(micro_batches)
        return [row.upper() for row in rows]

    counts: set[int] = set()
    results = [call.on_rank(method, rank) for rank in range(mesh.training.size)]

    assert call.collected(results) == [f"ROW {n}" for n in range(len(sizes))]
    assert len(counts) == 1, "all ranks go through equally many micro-batches"
    if name == "dp_ragged" and sizes:
        loads = [sum(sizes[row] for row in share.rows) for share in call.shares]
        assert max(loads) - min(loads) <= max(sizes)


def test_a_protocol_whose_collect_loses_rows_is_refused_with_the_numbers() -> None:
    def halves(rows: int, _: Sequence[int], mesh: Mesh) -> list[list[int]]:
        return [list(range(rows // 2)), list(range(rows // 2, rows))]

    two = Mesh(MeshShape(dp=2))
    with pytest.raises(
        UsageError, match=r"halves: got 2 results from ranks \[0\] for 5 rows: 3 lost, the first is 2"
    ):
        shares(Transfer("halves", halves, lambda _: [0]), 5, two)
    with pytest.raises(UsageError, match="7 results"):
        shares(Transfer("twice", halves, lambda _: [0, 1, 0]), 5, two)
    with pytest.raises(UsageError, match="rows for 2 ranks"):
        shares(Transfer("halves", halves, lambda _: [0, 1]), 5, DP)
    with pytest.raises(UsageError, match=r"mesh 2-2-2.*Use 3d"):
        shares(PROTOCOLS["dp"], 5, CUBE)
    with pytest.raises(UsageError, match="one of one_to_all, dp"):
        register(transfer="4d")
    with pytest.raises(UsageError, match="no transfer protocol"):
        transfer_of(len)
