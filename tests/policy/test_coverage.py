"""docs/coverage.md and tests/README.md name tests that exist; `require_all` checks that they ran."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def shown_by() -> list[str]:
    text = "".join((ROOT / page).read_text() for page in ("docs/coverage.md", "tests/README.md"))
    return re.findall(r"^\|.*\| `([^`]+)` \|$", text, flags=re.MULTILINE)


def test_every_line_names_a_test_or_benchmark_that_exists() -> None:
    names = shown_by()
    assert len(names) > 10
    for name in names:
        if name.startswith("rlmq bench "):
            assert (ROOT / "benchmarks" / f"{name.split()[-1]}.py").is_file(), name
            continue
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
