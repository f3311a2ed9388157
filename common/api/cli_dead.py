"""`rlmq dead`: rows that ended as dead and are still held; look at them, try them again, or let go of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.text import Text

from rlmq.buffer.redis_store import RedisStore
from rlmq.buffer.store import DeadLetter
from rlmq.cli_buffer import Buffer, new_console, new_grid, opened_buffer, plain, print_json, row_count
from rlmq.common.errors import ExitCode, UsageError
from rlmq.controller.display import duration

_ID = re.compile(r"[^/:]+/[^/:]+:\d+")
_TRACEBACK = "Traceback (most recent call last)"


def dead_list_command(run: str | None, *, folder: Path, as_json: bool) -> int:
    """`rlmq dead list`."""
    with opened_buffer(folder, run) as buffer:
        letters = _letters(buffer)
    if as_json:
        for name, letter in letters.items():
            print_json(_letter_json(name, letter))
        return int(ExitCode.OK)
    if not letters:
        print(f"run {buffer.run.run_id} has no dead letters")
        return int(ExitCode.OK)
    grid = new_grid("id", "stage", "rows", "age", "reason", right=("rows", "age"))
    for name, letter in letters.items():
        grid.add_row(name, letter.stage, str(letter.range.count), _age(letter), plain(_headline(letter.reason)))
    new_console().print(grid)
    return int(ExitCode.OK)


def dead_show_command(words: Sequence[str], *, folder: Path, rows: int, as_json: bool) -> int:
    """`rlmq dead show`: one letter with the text columns of its first `rows` rows."""
    run, names = _run_and_ids(words)
    if len(names) != 1:
        raise UsageError("dead show", got=f"{len(names)} ids", expected="one", remedy="`rlmq dead list` shows them")
    with opened_buffer(folder, run) as buffer:
        [(name, letter)] = _chosen(buffer, names).items()
        texts = _texts(buffer, letter)
    if as_json:
        print_json({**_letter_json(name, letter), "text": texts})
        return int(ExitCode.OK)
    _print_letter(name, letter, texts, rows)
    return int(ExitCode.OK)


def dead_retry_command(words: Sequence[str], *, folder: Path, every: bool) -> int:
    """`rlmq dead retry`."""

    def retried(store: RedisStore, letter: DeadLetter) -> str:
        return f"{row_count(store.retry(letter))} ready again{_stage(letter, ' for')}"

    return _each("retry", words, folder, every, retried)


def dead_drop_command(words: Sequence[str], *, folder: Path, every: bool) -> int:
    """`rlmq dead drop`."""

    def dropped(store: RedisStore, letter: DeadLetter) -> str:
        return f"{row_count(store.drop(letter))} let go, still counted as dead"

    return _each("drop", words, folder, every, dropped)


def _letters(buffer: Buffer) -> dict[str, DeadLetter]:
    """Dead letters of all tables by id, oldest first in each."""
    found = (letter for table in buffer.tables for letter in buffer.store.dead_letters(table.name))
    return {_letter_id(letter): letter for letter in found}


def _run_and_ids(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Ids are words like `train/prompts-0.3:0`; what is left is the run."""
    runs = [word for word in words if not _ID.fullmatch(word)]
    if len(runs) > 1:
        expected = "at most one run; ids look like train/prompts-0.3:0"
        raise UsageError("RUN", got=" ".join(map(repr, runs)), expected=expected)
    return next(iter(runs), None), [word for word in words if _ID.fullmatch(word)]


def _letter_id(letter: DeadLetter) -> str:
    return f"{letter.table}/{letter.range.chunk}:{letter.range.first}"


def _chosen(buffer: Buffer, names: Sequence[str]) -> dict[str, DeadLetter]:
    """The letters of these ids.

    Raises:
        UsageError: one of them is not there; nothing was done.
    """
    letters = _letters(buffer)
    for name in names:
        if name not in letters:
            known = ", ".join(list(letters)[:5])
            raise UsageError(
                f"ID {name}",
                got=f"no such dead letter in run {buffer.run.run_id}",
                expected=f"one of {known}{', …' * (len(letters) > 5)}" if known else "",
                remedy="`rlmq dead list` shows them" if known else "It has none",
            )
    return {name: letters[name] for name in names}


def _each(
    verb: str, words: Sequence[str], folder: Path, every: bool, do: Callable[[RedisStore, DeadLetter], str]
) -> int:
    """Do it with the letters that the words name, or with every one, and say what was done."""
    run, names = _run_and_ids(words)
    if bool(names) == every:
        got = "both ids and --all" if every else "neither an id nor --all"
        remedy = "`rlmq dead list` shows the ids"
        raise UsageError(f"dead {verb}", got=got, expected="ids or --all", remedy=remedy)
    with opened_buffer(folder, run) as buffer:
        letters = _letters(buffer) if every else _chosen(buffer, names)
        for name, letter in letters.items():
            print(f"{name}: {do(buffer.store, letter)}", flush=True)
        if not letters:
            print(f"run {buffer.run.run_id} has no dead letters")
    return int(ExitCode.OK)


def _texts(buffer: Buffer, letter: DeadLetter) -> list[dict[str, str]]:
    """The text columns of each row, without those that have no value."""
    [table] = [one for one in buffer.tables if one.name == letter.table]
    names = [
        one.name for one in table.columns if pa.types.is_string(one.type) or pa.types.is_large_string(one.type)
    ]
    rows = buffer.store.read(letter.table, [letter.range], names).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _letter_json(name: str, letter: DeadLetter) -> dict[str, Any]:
    one = letter.range
    where = {"table": letter.table, "chunk": one.chunk, "first": one.first, "rows": one.count}
    return {"id": name, **where, "stage": letter.stage, "at": letter.at, "reason": letter.reason}


def _print_letter(name: str, letter: DeadLetter, texts: Sequence[Mapping[str, str]], rows: int) -> None:
    console = new_console()
    lost = f"{name}: {row_count(letter.range.count)}, lost{_stage(letter, ' by')} {_age(letter)} ago"
    console.print(Text(lost, style="bold"))
    console.print(Text(plain(letter.reason.rstrip())))
    for index, row in enumerate(texts[:rows], start=letter.range.first):
        console.print(Text(f"\nrow {index}", style="bold"))
        for column, value in row.items():
            console.print(Text.assemble((f"{column}: ", "dim"), plain(value)))
    if len(texts) > rows:
        console.print(f"\nand {row_count(len(texts) - rows)} more (--rows {len(texts)})")


def _headline(reason: str) -> str:
    """The line that tells most: the first one, but of a traceback the last."""
    lines = [line for line in reason.splitlines() if line.strip()] or ["(no reason)"]
    return lines[-1] if lines[0].startswith(_TRACEBACK) else lines[0]


def _stage(letter: DeadLetter, word: str) -> str:
    """` by stage reward`; nothing for rows that no stage lost (a group's deadline)."""
    return f"{word} stage {letter.stage}" if letter.stage else ""


def _age(letter: DeadLetter) -> str:
    return duration(max(0.0, time.time() - letter.at))
