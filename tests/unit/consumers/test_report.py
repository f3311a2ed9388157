"""The reward curve: a picture from whatever a run has written so far."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmq.common.run_folder import RunFolder
from rlmq.consumers.report import _running_mean, draw_reward_curve

PNG = b"\x89PNG\r\n\x1a\n"


def write(run: RunFolder, *lines: dict[str, Any], tail: str = "") -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def train(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "reward_mean": step / 10, "reward_std": 0.2, **more}


def evaluation(step: int, mean: float | None) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "reward_mean": mean, "sets": {"held_out": {"reward_mean": mean}}}


@pytest.mark.parametrize(
    "lines",
    [
        [train(1)],
        [train(step) for step in range(1, 60)],
        [evaluation(0, 0.5)],
        [train(1), train(2, reward_mean=None), evaluation(2, None)],
        [train(1, reward_std=None), evaluation(1, 0.3)],
    ],
    ids=["one step", "many steps", "only evaluation", "without verdicts", "without spread"],
)
def test_a_curve_is_drawn_from_what_is_there(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    run = RunFolder(tmp_path / "my_run-$1")
    write(run, *lines)

    assert draw_reward_curve(run)

    assert run.curve.read_bytes().startswith(PNG)
    assert run.curve.stat().st_size > 5000
    assert sorted(p.name for p in run.path.iterdir()) == ["metrics.jsonl", "reward.png"]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write(run, train(1), tail='{"kind": "tr')

    assert draw_reward_curve(run)


def test_without_figures_nothing_is_written(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)

    assert not draw_reward_curve(run)

    write(run)
    assert not draw_reward_curve(run)
    assert not run.curve.exists()


def test_the_running_mean_uses_fewer_values_at_the_beginning() -> None:
    assert _running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_matplotlib_is_imported_only_for_the_picture() -> None:
    program = "import sys, rlmq.consumers.report, rlmq.consumers.samples_view; print('matplotlib' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "False"
