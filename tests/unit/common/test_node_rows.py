"""What a node's function sees, and what it may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlmq.common.errors import UsageError
from rlmq.common.node_rows import NodeRow, to_columns


def test_a_row_has_what_the_node_reads_and_nothing_else() -> None:
    row = NodeRow("safety", {"prompt_text": "p", "response_text": "r"})
    prompt, response = row
    assert (prompt, response, row["prompt_text"], row.response_text) == ("p", "r", "p", "r")
    for read in (lambda: row["reward"], lambda: row.reward):
        with pytest.raises(UsageError, match=r"node safety: got its function wants column 'reward'.*Add reward"):
            read()


def test_values_come_alone_or_by_column_and_from_arrays() -> None:
    assert to_columns([True, False], {"safe": "bool"}, 2, subject="n") == {"safe": [True, False]}
    assert to_columns(np.array([True, False]), {"safe": "bool"}, 2, subject="n") == {"safe": [True, False]}
    both = to_columns({"a": [1, 2.5], "b": [[1], []]}, {"a": "float", "b": "list[int]"}, 2, subject="n")
    assert both == {"a": [1.0, 2.5], "b": [[1], []]}


@pytest.mark.parametrize(
    ("returned", "kind", "message"),
    [
        ([True], "bool", "1 values for 2 rows"),
        ([True, 1], "bool", r"row 1: got 1 \(int\), expected bool"),
        ([1, True], "int", r"row 1: got True \(bool\), expected int"),
        ([1, 0.5], "int", "row 1: got 0.5"),
        ([1.0, float("nan")], "float", "expected a finite number"),
        ([None, True], "bool", "row 0: got None"),
        ("ab", "str", "got str, expected a list of 2 values"),
        ([[1], [[2]]], "list[int]", "row 1"),
        ({"y": [1, 2]}, "int", "columns y"),
        (None, "int", "NoneType"),
    ],
)
def test_another_form_is_refused_with_its_place(returned: Any, kind: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        to_columns(returned, {"x": kind}, 2, subject="node n")
