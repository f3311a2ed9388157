"""Trackers: `metrics.jsonl` over crashes and redone steps, and services that fail."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmq.common.errors import DependencyError
from rlmq.common.logs import configure
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.trackers import Trackers, flat_figures


def recipe(*track: str) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "t"},
            "model": "./m",
            "data": {"train": "t.jsonl"},
            "reward": ({"function": "r.py:f"},),
            "train": {"steps": 3},
            "track": track or ("jsonl",),
        }
    )


def open_trackers(folder: Path, *track: str, stream: io.StringIO | None = None) -> Trackers:
    return Trackers(recipe(*track), RunFolder(folder), configure("controller", 0, stream=stream or io.StringIO()))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]


def keys(folder: Path) -> list[tuple[str, int, float]]:
    return [(line["kind"], line["step"], line["x"]) for line in lines(folder)]


def line(kind: str, step: int, x: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "step": step, "x": x}


def test_each_line_is_one_json_object_in_order(tmp_path: Path) -> None:
    trackers = open_trackers(tmp_path)

    for step in (1, 2):
        trackers.log({**line("train", step), "time_shares": {"training": 0.5}})
    trackers.log(line("eval", 2))

    assert [(k["kind"], k["step"]) for k in lines(tmp_path)] == [("train", 1), ("train", 2), ("eval", 2)]
    assert lines(tmp_path)[0]["time_shares"] == {"training": 0.5}


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    first = open_trackers(tmp_path)
    first.log(line("train", 1))
    first.close()

    open_trackers(tmp_path).log(line("train", 2))

    assert keys(tmp_path) == [("train", 1, 0.0), ("train", 2, 0.0)]


def test_a_redone_step_replaces_its_line_and_drops_what_came_after(tmp_path: Path) -> None:
    first = open_trackers(tmp_path)
    for entry in (line("eval", 0), line("train", 1), line("train", 2), line("eval", 2), line("train", 3)):
        first.log(entry)

    open_trackers(tmp_path).log(line("train", 2, x=7.0))

    assert keys(tmp_path) == [("eval", 0, 0.0), ("train", 1, 0.0), ("eval", 2, 0.0), ("train", 2, 7.0)]


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    open_trackers(tmp_path).log(line("train", 1))
    with RunFolder(tmp_path).metrics.open("a") as file:
        file.write('{"kind": "train", "step": 2, "x"')

    open_trackers(tmp_path).log(line("train", 2))

    assert keys(tmp_path) == [("train", 1, 0.0), ("train", 2, 0.0)]


def test_nan_and_infinities_become_null(tmp_path: Path) -> None:
    open_trackers(tmp_path).log({**line("train", 1), "kl": float("nan"), "deep": [{"y": float("inf")}]})

    text = RunFolder(tmp_path).metrics.read_text()
    assert json.loads(text, parse_constant=pytest.fail)["deep"] == [{"y": None}]


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")

    with pytest.raises(DependencyError, match=r"metrics in .*run.*expected a writable file"):
        open_trackers(tmp_path / "run")


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_a_usage_error_with_the_remedy(tmp_path: Path, name: str) -> None:
    program = (
        "import importlib.util, io, pathlib, sys\n"
        "from rlmq.common.errors import UsageError\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda n, *a: None if n == {name!r} else found(n, *a)\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_trackers import open_trackers\n"
        f"try: open_trackers(pathlib.Path({str(tmp_path)!r}), {name!r})\n"
        "except UsageError as error: print(error)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert f"track: {name}: got no package {name}" in done.stdout
    assert f"pip install 'rlmq[{name}]'" in done.stdout


def test_a_tracker_that_fails_is_logged_and_the_run_goes_on(tmp_path: Path) -> None:
    """A package `tensorboard` whose writer fails is put first on the path."""
    package = tmp_path / "site" / "tensorboard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "summary.py").write_text(
        "class Writer:\n"
        "    def __init__(self, path): pass\n"
        "    def add_scalar(self, *a): raise ConnectionError('no service')\n"
        "    def close(self): raise ConnectionError('no service')\n"
    )
    program = (
        "import io, pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_trackers import line, lines, open_trackers\n"
        f"folder, stream = pathlib.Path({str(tmp_path)!r}), io.StringIO()\n"
        "trackers = open_trackers(folder, 'jsonl', 'tensorboard', stream=stream)\n"
        "trackers.log(line('train', 1)); trackers.log(line('train', 2)); trackers.close()\n"
        "print(len(lines(folder)), stream.getvalue().count('ConnectionError: no service'))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
    )

    assert done.stdout.split() == ["2", "3"]


def test_nested_numbers_get_flat_names() -> None:
    flat = flat_figures({"kind": "eval", "step": 3, "reward_mean": None, "sets": {"a": {"reward_mean": 0.5}}})

    assert flat == {"step": 3.0, "sets/a/reward_mean": 0.5}


def test_a_tracker_that_hangs_holds_nobody_up_and_is_named(tmp_path: Path) -> None:
    """Fault 34: a package `tensorboard` whose writer never returns is put first on the path."""
    package = tmp_path / "site" / "tensorboard"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "summary.py").write_text("import threading\ndef Writer(path): threading.Event().wait()\n")
    program = (
        "import io, pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_trackers import line, lines, open_trackers\n"
        f"folder, stream = pathlib.Path({str(tmp_path)!r}), io.StringIO()\n"
        "trackers = open_trackers(folder, 'jsonl', 'tensorboard', stream=stream)\n"
        "for step in range(1200): trackers.log(line('train', step))\n"
        "trackers.close(within_s=0.5)\n"
        "print(len(lines(folder)), stream.getvalue().count('tracker.behind'))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
    )

    assert done.stdout.split() == ["1200", "1"]
