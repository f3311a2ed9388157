"""Deterministic mode goes on only where it computes the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from rlmq.common import determinism
from rlmq.common.determinism import Environment, require_same_environment
from rlmq.common.errors import UsageError
from rlmq.common.run_folder import RunFolder

pytestmark = pytest.mark.timeout(120)


@dataclass
class Recipe:
    deterministic: bool


@dataclass
class Context:
    recipe: Recipe
    run: RunFolder
    role: str = "rollout"


def begin(folder: Path, *, deterministic: bool = True) -> Any:
    context = cast("Any", Context(Recipe(deterministic), RunFolder(folder)))
    require_same_environment(context)
    return context


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"torch": "1.0"}, "torch"), ({"threads": 77}, "threads"), ({"instruction_set": "z"}, "set")],
)
def test_another_environment_is_refused_by_name(
    changed: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = begin(tmp_path)
    require_same_environment(context)  # the same: nothing to say
    other = msgspec.structs.replace(Environment.here(), **changed)
    monkeypatch.setattr(determinism.Environment, "here", classmethod(lambda _: other))
    with pytest.raises(UsageError, match=f"{name} of rollout.*as when the run began"):
        require_same_environment(context)


def test_other_roles_and_other_processors_are_their_own_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = begin(tmp_path)
    other = msgspec.structs.replace(Environment.here(), processor="another")
    monkeypatch.setattr(determinism.Environment, "here", classmethod(lambda _: other))
    require_same_environment(context)
    context.role = "actor"
    require_same_environment(context)
    assert {path.name for path in (tmp_path / "environment").iterdir()} == {"rollout.json", "actor.json"}


def test_outside_deterministic_mode_nothing_is_recorded(tmp_path: Path) -> None:
    begin(tmp_path, deterministic=False)
    assert not list(tmp_path.iterdir())
