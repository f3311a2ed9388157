"""Which run a command means: run ids, resuming, finished runs, and the lock of a name.

A run's id is `<stem>-<ordinal>` in `run.folder`. The stem is the recipe's `run.name` where that can be a
file name as it is; else a readable form of it with a hash, so that two names never share runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from rlmq.common.errors import DependencyError, RlmqError, SecondController, UsageError
from rlmq.common.recipe.diff import Change, changes, harmless
from rlmq.common.recipe.load import dump_recipe, load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder

_STEM_BYTES = 100  # a file name has at most 255, and others append to it
_STATES = Literal["new", "continued", "finished"]


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run chosen for a command.

    `state` is `finished` when there is nothing left to do; then nothing was written. `changes` are the
    harmless differences between the stored recipe and this one.
    """

    run: RunFolder
    state: _STATES
    changes: tuple[Change, ...] = ()


def run_stem(name: str) -> str:
    """The part of run ids that stands for `run.name`: letters, digits, `.`, `_` and `-` (it is part of keys).

    Example:
        >>> run_stem("sums-grpo")
        'sums-grpo'
        >>> run_stem("my run").startswith("my_run-")
        True
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", plain).lstrip("._-") or "run"
    if readable == name and len(name.encode()) <= _STEM_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{readable[: _STEM_BYTES - 9]}-{digest}"


def runs_of(folder: Path, stem: str) -> list[RunFolder]:
    """The runs of one stem, oldest first; runs without a recipe were never begun and do not count."""
    form = re.compile(rf"{re.escape(stem)}-([0-9]+)")
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            match = form.fullmatch(path.name)
            if match and (path / "recipe.yaml").is_file():
                found.append((int(match.group(1)), path))
    return [RunFolder(path) for _, path in sorted(found)]


def find_run(folder: Path, run: str | None = None) -> RunFolder:
    """The run that a reading command means: an id, a path, a name, or (None) the newest of all.

    Raises:
        UsageError: there is no such run; the newest ones are named.
    """
    candidates = [path.parent for path in folder.glob("*/recipe.yaml")]
    newest_first = sorted(candidates, key=lambda path: (path / "recipe.yaml").stat().st_mtime_ns, reverse=True)
    if run is None and newest_first:
        return RunFolder(newest_first[0])
    if run is not None:
        for path in (folder / run, Path(run)):
            if (path / "recipe.yaml").is_file():
                return RunFolder(path)
        named = runs_of(folder, run_stem(run))
        if named:
            return named[-1]
    known = ", ".join(path.name for path in newest_first[:5])
    raise UsageError(
        "RUN",
        got="none" if run is None else repr(run),
        expected=f"one of {known}" if known else f"a run in {folder.absolute()}",
        remedy="Start one with `rlmq up RECIPE`",
    )


def newest_run(recipe: Recipe) -> RunFolder | None:
    """The newest run of the recipe's name, for processes started by hand."""
    found = runs_of(Path(recipe.run.folder).absolute(), run_stem(recipe.run.name))
    return found[-1] if found else None


@contextlib.contextmanager
def name_lock(recipe: Recipe) -> Iterator[None]:
    """Hold the name's lock: one `rlmq up` per name and run folder. The kernel frees it with the process.

    Raises:
        SecondController: another process holds it.
        UsageError, DependencyError: the run folder cannot be used.
    """
    folder = Path(recipe.run.folder).absolute()
    stem = run_stem(recipe.run.name)
    with unusable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f".{stem}.lock").open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SecondController(
                f"run {recipe.run.name!r} in {folder}",
                got=f"another `rlmq up` of it{_holder(file)}",
                expected="one at a time",
                remedy="Wait for it, end it, or give this one another run.name",
            ) from None
        with unusable(folder):
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


def _holder(file: IO[str]) -> str:
    file.seek(0)
    pid = file.read(16).strip()
    return f", pid {pid}" if pid.isdigit() else ""


def open_run(recipe: Recipe, *, fresh: bool = False) -> OpenedRun:
    """Choose and prepare the run of this recipe; call it with the name's lock held.

    The newest run of the name is continued unless it is finished; a finished one is continued when
    `train.steps` or `data.passes` grew. `fresh` starts the next ordinal.

    Raises:
        UsageError: the recipe changed in a way that is not harmless; the message has the differences.
        DependencyError: the run folder cannot be written.
    """
    folder = Path(recipe.run.folder).absolute()
    newest = newest_run(recipe)
    if newest is None or fresh:
        return OpenedRun(_begin(_next_folder(folder, run_stem(recipe.run.name)), recipe), "new")
    before = load_recipe(newest.recipe, ()).recipe
    different = tuple(changes(before, recipe))
    if not all(harmless(change) for change in different):
        raise UsageError(
            f"the recipe of run {newest.run_id} changed",
            got="\n" + "\n".join(f"  {change}" for change in different) + "\n",
            remedy="Undo the change, start anew with --fresh, or give the run another name",
        )
    if _finished(newest) and not _grew(before, recipe):
        return OpenedRun(newest, "finished", different)
    _reopen_summary(newest)
    return OpenedRun(_begin(newest, recipe), "continued", different)


def _next_folder(folder: Path, stem: str) -> RunFolder:
    form = re.compile(rf"{re.escape(stem)}-([0-9]+)")
    with unusable(folder):
        paths = list(folder.iterdir()) if folder.exists() else []
    taken = [int(m.group(1)) for path in paths if (m := form.fullmatch(path.name))]
    return RunFolder(folder / f"{stem}-{max(taken, default=0) + 1}")


def next_run(recipe: Recipe, *, fresh: bool) -> RunFolder:
    """The run that `open_run` would choose; writes nothing."""
    newest = None if fresh else newest_run(recipe)
    folder = Path(recipe.run.folder).absolute()
    return newest or _next_folder(folder, run_stem(recipe.run.name))


def _begin(run: RunFolder, recipe: Recipe) -> RunFolder:
    with unusable(run.path):
        run.logs.mkdir(parents=True, exist_ok=True)
        write_atomically(run.recipe, dump_recipe(recipe))
    return run


def read_summary(run: RunFolder) -> dict[str, Any]:
    """`summary.json`, or {} when the run has none (yet)."""
    try:
        found = json.loads(run.summary.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _finished(run: RunFolder) -> bool:
    """A drained run ended well, and has steps left."""
    summary = read_summary(run)
    return summary.get("exit") == 0 and summary.get("steps_end") != "drain"


def _grew(before: Recipe, after: Recipe) -> bool:
    passes = after.data.passes is not None and (before.data.passes or 0) < after.data.passes
    return after.train.steps > before.train.steps or passes


def _reopen_summary(run: RunFolder) -> None:
    """An unfinished continuation must not pass for the finished run before it."""
    summary = read_summary(run)
    if summary:
        with unusable(run.path):
            write_atomically(run.summary, json.dumps(summary | {"exit": None}, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers, and a crash, see the old content or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextlib.contextmanager
def unusable(path: Path) -> Iterator[None]:
    """Turn an `OSError` about the run folder into one message.

    Raises:
        UsageError: a file is in its path, or the name is too long.
        DependencyError: no permission, a read-only mount, a full disk.
    """
    try:
        yield
    except OSError as error:
        raise folder_error(error, path) from error


def folder_error(error: OSError, path: Path) -> RlmqError:
    """What an `OSError` about files of a run means for the user."""
    place = error.filename or path
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DependencyError(
            f"disk full at {place}", got=reason, remedy="Free some space; the same command continues the run"
        )
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return UsageError(
            f"run.folder {path}",
            got=f"a file at {_file_in_path(path)}",
            expected="a folder",
            remedy="Remove that file, or set run.folder to another place",
        )
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL):
        return UsageError(f"run.folder {path}", got=reason, remedy="Set run.folder to another place")
    return DependencyError(
        f"run.folder {path}",
        got=f"{reason} at {place}",
        expected="a folder that can be written",
        remedy="Correct its owner or mount, or set run.folder to another place",
    )


def _file_in_path(path: Path) -> Path:
    for part in (*reversed(path.parents), path):
        if part.exists() and not part.is_dir():
            return part
    return path
