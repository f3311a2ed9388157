"""What `rlmq up` shows, from the files of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rlmq.common.run_folder import RunFolder
from rlmq.controller.display import Display, GrowingLines, describe_line, duration, print_summary, run_panel

PROGRESS = {
    "phase": "run",
    "step": 3,
    "steps": 30,
    "activity": {"rollout-0": "generating", "actor-0": "idle"},
    "policy_version": 2,
    "buffer_rows": 48,
    "buffer_capacity": 64,
    "staleness": 0.0,
    "reward_mean": 0.4251,
    "tokens_per_s": 1234.5,
    "eta_s": 3723.0,
}
TRAIN_LINE = {
    "kind": "train",
    "step": 3,
    "reward_mean": 0.5,
    "reward_std": 0.25,
    "tokens_per_s": 99.6,
    "step_s": 2.5,
}
EVAL_LINE = {
    "kind": "eval",
    "step": 0,
    "sets": {"sums": {"reward_mean": 0.2}, "two [digits]": {"reward_mean": None}},
}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=120, color_system=None), out


def append(run: RunFolder, line: dict[str, object]) -> None:
    with run.metrics.open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_off_a_terminal_each_step_and_event_is_one_plain_line(run: RunFolder) -> None:
    screen, out = console(terminal=False)
    display = Display(run, screen)
    run.progress.write_text(json.dumps(PROGRESS))

    append(run, EVAL_LINE)
    append(run, TRAIN_LINE)
    display.tick()
    display.event("rollout-0 ended with signal 9 (SIGKILL); starting it again (1 of 5)")
    display.close()

    lines = [line.split(" ", 1)[1] for line in out.getvalue().splitlines()]
    assert lines == [
        "evaluation after step 0: sums 0.200, two [digits] -",
        "step 3/30: reward 0.500 ± 0.250, 100 tokens/s, 2.50 s",
        "rollout-0 ended with signal 9 (SIGKILL); starting it again (1 of 5)",
    ]
    assert "\x1b" not in out.getvalue()


def test_lines_of_an_earlier_start_are_not_shown_again(run: RunFolder) -> None:
    append(run, TRAIN_LINE)
    screen, out = console(terminal=False)

    display = Display(run, screen)
    display.close()

    assert out.getvalue() == ""


def test_on_a_terminal_a_panel_shows_what_the_run_does(run: RunFolder) -> None:
    screen, out = console(terminal=True)
    display = Display(run, screen)
    run.progress.write_text(json.dumps(PROGRESS))

    display.tick()
    display.close()

    for part in ("3/30", "0.425", "1234 tokens/s", "48/64", "generating", "version 2", "1:02:03 left"):
        assert part in out.getvalue()


def test_damaged_files_do_not_end_the_display(run: RunFolder) -> None:
    screen, _ = console(terminal=True)
    display = Display(run, screen)
    run.progress.write_text('{"phase": "ru')
    run.metrics.write_text('[1]\nnonsense\n{"kind": "train"')

    display.tick()
    run.progress.write_text(json.dumps({"phase": None, "step": None, "activity": 3}))
    display.tick()
    display.close()


def test_half_written_lines_are_read_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = GrowingLines(path)
    assert list(lines.new()) == []

    path.write_text('{"step": 1}\n{"st')
    first = list(lines.new())
    with path.open("a") as file:
        file.write('ep": 2}\n')

    assert first == [{"step": 1}]
    assert list(lines.new()) == [{"step": 2}]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"), (None, "-"), ("x", "-")]
)
def test_durations(seconds: object, words: str) -> None:
    assert duration(seconds) == words


def test_a_line_without_figures_is_still_a_line() -> None:
    assert describe_line({}) == "step ?: -"


def test_the_summary_shows_each_set_before_and_after(run: RunFolder) -> None:
    screen, out = console(terminal=False)
    summary = {
        "eval_before": {"sums": 0.2, "two_digits": 0.03},
        "eval_after": {"sums": 0.95},
        "steps": 30,
        "samples": 1920,
        "generated_tokens": 4000,
        "wall_s": 125.0,
        "checkpoint": "/x/step-000030",
    }

    print_summary(run, summary, screen)

    text = out.getvalue()
    [row] = [line for line in text.splitlines() if " sums " in line]
    assert row.index("0.200") < row.index("0.950")
    for part in ("30 steps, 1920 samples, 4000 tokens generated, 2:05", "/x/step-000030", str(run.path)):
        assert part in text


def test_a_summary_of_a_run_without_evaluation_has_no_table(run: RunFolder) -> None:
    screen, out = console(terminal=False)

    print_summary(run, {"eval_before": None, "eval_after": None}, screen)

    assert "evaluation" not in out.getvalue()


def test_the_progress_bar_and_the_figures_have_lines_of_their_own() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(run_panel("demo-1", {"phase": "run", "step": 3, "steps": 20}, [], 1.0))
    lines = console.export_text().splitlines()
    [bar] = [line for line in lines if "━" in line]
    [figures] = [line for line in lines if "phase run" in line]
    assert "phase" not in bar
    assert "step 3/20" in figures


def test_a_paused_run_says_how_it_goes_on() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(run_panel("demo-1", {"phase": "pause", "step": 3, "steps": 20}, [], 1.0))
    assert "paused (rlmq resume lets it go on)" in console.export_text()
