"""What `rlmq up` shows: a live panel on a terminal, else one plain line per step and event.

Sources are files of the run folder, so that anything else can show the same: `progress.json`, which the
controller rewrites, and the lines that `metrics.jsonl` gains.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlmq.common.run_folder import RunFolder

_NEWEST_STEPS = 8


class GrowingLines:
    """JSON lines that a file gains after now, or from its start; half-written and damaged ones are left out."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._at_byte = path.stat().st_size if path.exists() and not from_start else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at_byte)
                data = file.read()
        except OSError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        self._at_byte += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


class Display:
    """Shows one run on the console. All methods are called from one thread.

    Args:
        run: the run's folder.
        console: where to; a terminal gets the live panel.
    """

    def __init__(self, run: RunFolder, console: Console) -> None:
        self._run = run
        self._console = console
        self._metrics = GrowingLines(run.metrics)
        self._progress: dict[str, Any] = {}
        self._progress_stamp = 0
        self._began = time.monotonic()
        self._newest: list[dict[str, Any]] = []
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(self._panel(), console=console, auto_refresh=False, transient=True)
            self._live.start()
        run.progress.unlink(missing_ok=True)

    def event(self, text: str) -> None:
        """Show one line that stays."""
        stamp = time.strftime("%H:%M:%S")
        self._console.print(f"{stamp} {text}", markup=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Show what is new; called a few times a second."""
        self._read_progress()
        for line in self._metrics.new():
            self._newest = [*self._newest, line][-_NEWEST_STEPS:]
            if self._live is None or line.get("kind") == "eval":
                self.event(describe_line(line, self._progress.get("steps")))
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)

    def close(self) -> None:
        """Show the last lines and give the terminal back."""
        self.tick()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _read_progress(self) -> None:
        try:
            stamp = self._run.progress.stat().st_mtime_ns
            if stamp == self._progress_stamp:
                return
            found = json.loads(self._run.progress.read_text())
        except (OSError, ValueError):
            return
        if isinstance(found, dict):
            self._progress, self._progress_stamp = found, stamp

    def _panel(self) -> RenderableType:
        return run_panel(self._run.run_id, self._progress, self._newest, time.monotonic() - self._began)


def run_panel(
    run_id: str, progress: Mapping[str, Any], newest: list[dict[str, Any]], elapsed_s: float
) -> RenderableType:
    """The live panel: phase and step, figures, activity per process, newest steps."""
    step, steps = _count(progress.get("step")), _count(progress.get("steps"))
    figures = Table.grid(padding=(0, 2))
    figures.add_row(
        f"phase {_phase(str(progress.get('phase', 'starting')))}",
        f"step [bold]{step}/{steps or '?'}[/]",
        f"reward [bold]{number(progress.get('reward_mean'))}[/]",
        f"{number(progress.get('tokens_per_s'), 0)} tokens/s",
    )
    figures.add_row(
        f"policy version {progress.get('policy_version', '-')}",
        f"staleness {number(progress.get('staleness'), 1)}",
        f"buffer {progress.get('buffer_rows', '-')}/{progress.get('buffer_capacity', '-')} rows",
        f"{duration(elapsed_s)} + {duration(progress.get('eta_s'))} left",
    )
    activity = progress.get("activity")
    doing = activity if isinstance(activity, dict) else {}
    roles = "   ".join(f"[cyan]{escape(str(name))}[/] {escape(str(what))}" for name, what in doing.items())
    bar = Table.grid(expand=True)  # a bar alone ends no line
    bar.add_row(ProgressBar(total=max(steps, 1), completed=step))
    parts: list[RenderableType] = [bar, figures]
    if roles:
        parts.append(roles)
    for line in newest:
        if line.get("kind") != "eval":
            parts.append(Text(describe_line(line, steps or None), no_wrap=True, overflow="ellipsis"))
    return Panel(Group(*parts), title=escape(run_id), title_align="left")


def _phase(phase: str) -> str:
    """What an operator wants stands out, with how to take it back."""
    if phase == "pause":
        return "[bold yellow]paused[/] (rlmq resume lets it go on)"
    return f"[bold]{escape(phase)}[/]"


def describe_line(line: Mapping[str, Any], steps: object = None) -> str:
    """One line of `metrics.jsonl` in words."""
    step = line.get("step", "?")
    if line.get("kind") == "eval":
        sets = line.get("sets")
        parts = sets.items() if isinstance(sets, dict) else ()
        told = ", ".join(f"{name} {number(value.get('reward_mean'))}" for name, value in parts)
        return f"evaluation after step {step}: {told}"
    of = f"/{steps}" if steps else ""
    figures = []
    if "reward_mean" in line:
        figures.append(f"reward {number(line['reward_mean'])} ± {number(line.get('reward_std'))}")
    for key, words, digits in (
        ("loss", "loss {}", 4),
        ("accuracy", "{} of the pairs right", 3),
        ("response_tokens_mean", "{} tokens each", 1),
        ("multiplier", "multiplier {}", 3),
        ("refills", "{} refills", 0),
        ("tokens_per_s", "{} tokens/s", 0),
        ("step_s", "{} s", 2),
    ):
        if line.get(key) is not None:
            figures.append(words.format(number(line[key], digits)))
    return f"step {step}{of}: {', '.join(figures) or '-'}"


def print_summary(run: RunFolder, summary: Mapping[str, Any], console: Console) -> None:
    """The run's end as a table: evaluation before and after by set, totals, where everything lies."""
    before, after = (summary.get(key) or {} for key in ("eval_before", "eval_after"))
    if before or after:
        table = Table(title=f"{run.run_id}: evaluation", title_justify="left")
        for title in ("set", "before", "after"):
            table.add_column(title, justify="left" if title == "set" else "right")
        for name in dict.fromkeys([*before, *after]):
            table.add_row(escape(str(name)), number(before.get(name)), number(after.get(name)))
        console.print(table)
    end = " (the data's passes end here)" if summary.get("steps_end") == "data" else ""
    console.print(
        f"{summary.get('steps', 0)} steps{end}, {summary.get('samples', 0)} samples, "
        f"{summary.get('generated_tokens', 0)} tokens generated, {duration(summary.get('wall_s'))}",
        markup=False,
        highlight=False,
    )
    if summary.get("checkpoint"):
        console.print(f"checkpoint: {summary['checkpoint']}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"everything: {run.path}", markup=False, highlight=False, soft_wrap=True)


def number(value: object, digits: int = 3) -> str:
    """A figure, or `-` where there is none."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def duration(seconds: object) -> str:
    """Seconds as `1:02:03`, or `-`."""
    if not isinstance(seconds, int | float):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
