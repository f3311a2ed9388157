"""Steps in flight have tables of their own, and who works on rows as they come need not know."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from rlmq.buffer.slots import SlottedStore
from rlmq.buffer.store import Interest, Stage, Table
from rlmq.common.columns import Column
from rlmq.common.errors import UsageError
from rlmq.common.flow import flow_table, slot_of

pytestmark = pytest.mark.timeout(60)

COLUMNS = (Column("name", pa.string(), "source"),)
TABLES = tuple(Table(name, COLUMNS, (Stage("end", ("name",)),)) for name in ("train", "eval"))


def opened(url: str, slots: int) -> SlottedStore:
    store = SlottedStore(url, run_id="run-1", worker="w", slots=slots)
    store.open(TABLES)
    return store


@pytest.fixture
def store(redis_url: str) -> Iterator[SlottedStore]:
    """Three steps in flight."""
    made = opened(redis_url, 3)
    yield made
    made.close()


def put(store: SlottedStore, step: int) -> None:
    rows = pa.record_batch({"name": [f"of step {step}"]})
    store.put(slot_of(step, 3), rows, producer="p", sequence=step, group_size=1)


def test_a_claim_of_train_gets_rows_of_the_first_step_that_has_some(store: SlottedStore) -> None:
    # given rows of steps 5 and 6, whose slots come in another order
    put(store, 6)
    put(store, 5)
    store.first_step = 4
    # when they are claimed, then each claim has the rows of one step, and says where they are
    claims = [store.claim("train", "end", max_rows=9) for _ in range(3)]
    assert [claim and claim.rows["name"].to_pylist() for claim in claims] == [["of step 5"], ["of step 6"], None]
    assert [claim and claim.table for claim in claims] == ["train.2", "train.0", None]
    assert flow_table("train.2") == "train"
    # and what is done with a claim is done in its slot
    assert claims[0] is not None
    store.finish(claims[0], "trained", step=5)
    assert store.counts("train.2").ended == {"trained": 1}
    assert store.counts("train.0").live == 1


def test_counts_of_train_are_the_sums_and_versions_are_told_to_all(store: SlottedStore) -> None:
    put(store, 5)
    put(store, 6)
    store.set_version("train", 4)
    counts = store.counts("train")
    assert (counts.live, counts.ready["end"], counts.version) == (2, 2, 4)
    assert {store.counts(slot_of(step, 3)).version for step in range(3)} == {4}
    assert store.counts("eval").live == 0


def test_rows_of_any_slot_end_a_wait(store: SlottedStore) -> None:
    assert not store.wait([Interest("train", "end")], timeout_s=0.05)
    put(store, 8)
    assert store.wait([Interest("train", "end")], timeout_s=30)


def test_with_one_slot_there_is_one_table(redis_url: str) -> None:
    store = opened(redis_url, 1)
    assert store.counts("train").live == 0
    with pytest.raises(UsageError, match=r"train\.0"):
        store.counts("train.0")
    store.close()
