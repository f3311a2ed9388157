"""The public surface changes only together with its frozen list."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("frozen_surfaces", Path(__file__).with_name("frozen.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
frozen = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(frozen)


@pytest.mark.parametrize("surface", list(frozen.SURFACES))
def test_the_surface_is_the_frozen_one(surface: str) -> None:
    before = frozen.frozen_file(surface).read_text("utf-8")

    now = frozen.current(surface)

    changes = list(difflib.unified_diff(before.splitlines(), now.splitlines(), "frozen", "now", lineterm="", n=0))
    assert not changes, "\n".join([*changes, "", "If this change is wanted: make freeze, and commit the diff."])


def test_every_frozen_list_has_its_surface() -> None:
    lists = {path.stem for path in frozen.FOLDER.glob("*.txt")}

    assert lists == set(frozen.SURFACES)
