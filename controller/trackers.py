"""Where metrics go: `metrics.jsonl` always, Weights & Biases and TensorBoard when the recipe asks for them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from rlmq.common.errors import DependencyError, UsageError
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder

# Package to import, and the extra of rlmq that installs it.
_PACKAGES = {"wandb": ("wandb", "wandb"), "tensorboard": ("tensorboard", "tensorboard")}
_MOST_WAITING = 1000  # lines
_CLOSE_S = 5.0


class Tracker(Protocol):
    """Takes the figures of steps."""

    def log(self, line: Mapping[str, Any]) -> None:
        """Store one line; its `kind` is train or eval, its `step` only grows within a kind, redone steps apart."""

    def close(self) -> None:
        """Send what is left."""


class Trackers:
    """All trackers of a run. `metrics.jsonl` is part of the run; the others may fail, or hang, without hurting it.

    They work on a thread of their own, one after the other. Lines that one which hangs has not taken are dropped
    beyond `_MOST_WAITING`, and told.

    Raises:
        UsageError: a tracker whose package is not installed.
        DependencyError: `metrics.jsonl` cannot be written.
    """

    def __init__(self, recipe: Recipe, run: RunFolder, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._lines = MetricLines(run.metrics)
        names = [name for name in dict.fromkeys(recipe.track) if name != "jsonl"]
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._dropped = 0
        for name in names:
            package, extra = _PACKAGES[name]
            if importlib.util.find_spec(package) is None:
                raise UsageError(
                    f"track: {name}",
                    got=f"no package {package}",
                    expected="it installed",
                    remedy=f"Install it (pip install 'rlmq[{extra}]'), or take {name} out of track",
                )
        self._thread: threading.Thread | None = None
        if names:
            self._thread = threading.Thread(target=self._serve, args=(names, recipe, run), daemon=True)
            self._thread.start()

    def log(self, line: Mapping[str, Any]) -> None:
        """Store one line everywhere. A step that is logged again replaces its line and all later ones."""
        self._lines.log(line)
        if self._thread is not None:
            try:
                self._waiting.put_nowait(dict(line))
            except queue.Full:
                self._dropped += 1

    def close(self, within_s: float = _CLOSE_S) -> None:
        """Close all; a tracker that fails, or does not end in time, is only named in the log."""
        if self._thread is None:
            return
        deadline = time.monotonic() + within_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=within_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._dropped or self._thread.is_alive():
            self._log.warning("tracker.behind", lines_dropped=self._dropped, ended=not self._thread.is_alive())
        self._thread = None

    def _serve(self, names: Sequence[str], recipe: Recipe, run: RunFolder) -> None:
        """On the thread of the trackers: make them, and hand them each line until the end."""
        trackers: dict[str, Tracker] = {}
        for name in names:
            with self._harmless(name):
                trackers[name] = (
                    WandbTracker(recipe, run) if name == "wandb" else TensorBoardTracker(run.path / "tensorboard")
                )
        while (line := self._waiting.get()) is not None:
            for name, tracker in trackers.items():
                with self._harmless(name):
                    tracker.log(line)
        for name, tracker in trackers.items():
            with self._harmless(name):
                tracker.close()

    @contextlib.contextmanager
    def _harmless(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a service that is down must not end a run
            self._log.warning("tracker.failed", tracker=name, error=f"{type(error).__name__}: {error}")


class MetricLines:
    """`metrics.jsonl`: one JSON object per line and (kind, step), whatever was redone after a crash.

    A line for a step that is there already replaces it, and drops later ones of the same kind: the run went back.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = read_metric_lines(path)
        whole = "".join(_encode(line) for line in self._lines)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.read_text(errors="replace") != whole:
                self._rewrite()  # a torn last line must not swallow the next one
            path.touch()

    def log(self, line: Mapping[str, Any]) -> None:
        """Append the line, or go back to its step."""
        kept = [k for k in self._lines if k["kind"] != line["kind"] or k["step"] < line["step"]]
        again = len(kept) < len(self._lines)
        self._lines = [*kept, dict(line)]
        with _writing(self._path):
            if again:
                self._rewrite()
            else:
                with self._path.open("a") as file:
                    file.write(_encode(line))

    def _rewrite(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text("".join(_encode(line) for line in self._lines))
        temporary.replace(self._path)


def read_metric_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a `metrics.jsonl`; a torn last line is left out."""
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and "kind" in line and "step" in line:
                lines.append(line)
    return lines


def flat_figures(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a line under names like `sets/one_digit/reward_mean`; other values are left out."""
    flat: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            flat.update(flat_figures(value, f"{prefix}{name}/"))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = float(value)
    return flat


class WandbTracker:
    """Weights & Biases; `WANDB_MODE=offline` writes into the run's folder only."""

    def __init__(self, recipe: Recipe, run: RunFolder) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rlmq"),
            name=run.run_id,
            id=_wandb_id(run.run_id),
            resume="allow",
            dir=str(run.path),
            config=recipe.model_dump(mode="json"),
            mode=os.environ.get("WANDB_MODE") or None,
        )
        # Own axes: W&B refuses a global step that goes back, and train and eval share step numbers.
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/step")
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")

    def log(self, line: Mapping[str, Any]) -> None:
        """Send one line."""
        self._run.log({f"{line['kind']}/{name}": value for name, value in flat_figures(line).items()})

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


class TensorBoardTracker:
    """Event files in `runs/<run_id>/tensorboard`, written without torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def log(self, line: Mapping[str, Any]) -> None:
        """Add one line's figures at its step."""
        for name, value in flat_figures(line).items():
            if name != "step":
                self._writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _wandb_id(run_id: str) -> str:
    """W&B allows 64 characters, none of `/\\#?%:`."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in run_id)[-64:]


def _encode(line: Mapping[str, Any]) -> str:
    """One line of JSON; NaN and infinities, which JSON has not, become null."""
    return json.dumps(_finite(line)) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DependencyError(
            f"metrics in {path}",
            got=error.strerror or str(error),
            expected="a writable file",
            remedy="Free disk space or correct its permissions, then give the same command again",
        ) from error
