"""Plans carried out by four processes, and what each of them says when one is damaged, late or dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.common.layouts.exchange_rank import RANKS, plans
from unit.common.layouts.test_plan import pairs

from rlmq.common.errors import UsageError
from rlmq.common.layouts import rounds
from rlmq.common.layouts.layout import Layout
from rlmq.common.layouts.plan import plan
from rlmq.common.layouts.rounds import buffer_bytes, rounds_of

SCRIPT = Path(__file__).with_name("exchange_rank.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("exchange")
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[3]), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    started = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(folder), str(rank)], env=env) for rank in range(RANKS)
    ]
    try:
        codes = [process.wait(timeout=150) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, -9, 0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", list(plans()))
def test_every_rank_gets_its_shards(seen: list[dict[str, Any]], name: str) -> None:
    assert [one[name] for one in seen] == [True] * RANKS


def test_damaged_bytes_are_told_to_everybody(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        kind, text, _ = one["damaged"]
        assert kind == "IntegrityError"
        assert "damaged bytes in round 1 at rank 2" in text


def test_a_rank_that_does_not_come_is_named_by_all_at_the_deadline(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 1, 2):  # 0 waits for 1, who waits for 2, who waits for 3
        kind, text, seconds = seen[rank]["late"]
        assert kind == "DeadlineExceeded"
        assert "Look at rank 3" in text
        assert seconds > 1.9


def test_a_rank_that_dies_is_named_by_all(seen: list[dict[str, Any]]) -> None:
    for rank in (0, 2, 3):
        kind, text = seen[rank]["dying"]
        assert kind == "DeadlineExceeded"
        assert "Look at rank 1" in text


@settings(max_examples=80, deadline=None)
@given(pairs(), st.integers(48, 200))
def test_rounds_carry_each_move_once_within_the_buffers(pair: tuple[Layout, Layout], quarter: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "LARGE_BYTES", 64 if quarter % 2 else 1 << 20)
        check_rounds(pair, quarter)


def check_rounds(pair: tuple[Layout, Layout], quarter: int) -> None:
    made = plan(*pair)
    limit = buffer_bytes(4 * quarter)
    ranks = sorted({*made.sent_bytes, *made.received_bytes})
    carried: dict[int, int] = defaultdict(int)
    messages = defaultdict(list)
    for rank in ranks:
        for one in rounds_of(made, rank, 4 * quarter):
            for parcels in (one.sends, one.receives):
                assert sum(parcel.memory_bytes for parcel in parcels.values()) <= limit
            for peer, parcel in one.receives.items():
                carried[rank] += sum(size for *_, size in (*parcel.chunks, *parcel.large))
                messages[peer, rank, one.number].append((parcel.chunks, parcel.large))
            for peer, parcel in one.sends.items():
                messages[rank, peer, one.number].append((parcel.chunks, parcel.large))
    assert dict(carried) == dict(made.received_bytes)
    assert all(len(two) == 2 and two[0] == two[1] for two in messages.values()), "both ends expect the same message"


def test_a_bucket_that_holds_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="bucket"):
        buffer_bytes(100)
