"""Case D12: long, spaced, non-ASCII paths, and recipes behind links."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(200)

ODD = "a ä ' % " + "x" * 142


@pytest.fixture
def odd(tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a long odd name that holds the tiny recipe, and a long TMPDIR."""
    folder = tmp_path / ODD
    folder.mkdir()
    for name in ("tiny.yaml", "tiny_model.py", "tiny_task.py"):
        shutil.copy(cli.root / "recipes" / name, folder / name)
    temporary = tmp_path / ("t" * 120)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    return folder


def test_a_run_works_in_it_and_leaves_no_temporary_file(odd: Path, tmp_path: Path, cli: Any) -> None:
    # given a recipe that is given by a link in another folder, and a name of 80 characters
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "recipe.yaml"
    link.symlink_to(odd / "tiny.yaml")
    # when it runs in the odd folder
    done = cli.run("up", link, "train.steps=1", f"run.name={'n' * 80}", cwd=odd)
    # then it ends well, and nothing is left in the temporary folder
    assert done.code == 0, done.text
    assert len(list(odd.glob("runs/*/summary.json"))) == 1
    assert list((tmp_path / ("t" * 120)).iterdir()) == []


def test_two_runs_whose_paths_begin_alike_do_not_meet(odd: Path, cli: Any) -> None:
    names = [f"run.name={'n' * 79}{letter}" for letter in "ab"]
    pair = [cli.start("up", odd / "tiny.yaml", "train.steps=1", name, cwd=odd) for name in names]
    for process in pair:
        out, err = process.communicate(timeout=150)
        assert process.returncode == 0, out[-2000:] + err[-2000:]
    assert len(list(odd.glob("runs/*/summary.json"))) == 2


def test_a_function_that_is_nowhere_names_the_places_tried(odd: Path, cli: Any) -> None:
    done = cli.run("up", odd / "tiny.yaml", "reward.0.function=nowhere.py:score", cwd=odd)
    assert done.code == 2
    assert str(odd / "nowhere.py") in done.text.replace("\n", "")
    assert "Traceback" not in done.text
