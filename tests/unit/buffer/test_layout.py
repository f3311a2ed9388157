"""Columns keep their names, in whatever order a batch has them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rlmq.buffer.store import Stage, Table
from rlmq.common.columns import Column

pytestmark = pytest.mark.timeout(60)


def test_columns_of_one_type_that_are_written_in_another_order_keep_their_names(bench):
    columns = [Column(name, pa.int64(), writer) for name, writer in (("x", "p"), ("a", "w"), ("b", "w"))]
    store = bench.store(Table("train", tuple(columns), (Stage("one", ("x",)), Stage("two", ("a", "b")))))
    store.put("train", pa.record_batch({"x": [1, 2]}), producer="p", sequence=0, group_size=1)
    claim = bench.take(store, "one", 2)
    store.write(claim, pa.record_batch({"b": [10, 20], "a": [1, 2]}), ack=True)
    claim = bench.take(store, "two", 2, ["b", "x", "a"])
    assert claim.rows.to_pydict() == {"b": [10, 20], "x": [1, 2], "a": [1, 2]}
