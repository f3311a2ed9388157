"""`rlmq show`: one sample from its prompt to the gradient: who wrote what of it, when, and what became of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlmq.buffer.batch_log import BatchEntry
from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.buffer.recording import Recording, place_of
from rlmq.cli_buffer import plain
from rlmq.common.errors import UsageError
from rlmq.common.run_folder import RunFolder
from rlmq.controller.runs import find_run


def show_command(words: Sequence[str], *, folder: Path, as_json: bool) -> int:
    """`rlmq show`."""
    *runs, sample = words
    run = find_run(folder, runs[0] if runs else None)
    table, row = find_sample(run, sample)
    path = list(path_of(row))
    trained = trained_with(run, table, sample)
    if as_json:
        row = {**row, "lineage": path}
        print(json.dumps({"run": run.run_id, "table": table, **row, "trained_with": trained}, default=str))
        return 0
    sys.stdout.write("\n".join(_lines(run, table, row, path, trained)) + "\n")
    return 0


def find_sample(run: RunFolder, sample: str) -> tuple[str, dict[str, Any]]:
    """Table and recorded row of a sample.

    Raises:
        UsageError: no row of the recording has this id.
    """
    recording = Recording(place_of(run))
    words = sample.split("-")
    step = [int(words[1])] if len(words) > 1 and words[1].isdecimal() else None
    first = [words[0]] if words[0] in recording.tables() else []
    for table in dict.fromkeys([*first, *recording.tables()]):
        for steps in (step, None):
            try:
                rows = recording.read(table, steps=steps)
            except UsageError:  # none of this step
                continue
            ids = rows["sample_id"].to_pylist()
            if sample in ids:
                return table, rows.slice(ids.index(sample), 1).to_pylist()[0]
    remedy = "Rows are recorded when they have ended; `rlmq sql 'select sample_id from train'` lists them"
    raise UsageError("SAMPLE", got=repr(sample), expected=f"a recorded sample of run {run.run_id}", remedy=remedy)


def path_of(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lineage by time: what one process wrote at once is one item, with its tag's words as fields."""
    held: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in json.loads(row.get("lineage") or "[]"):
        key = (one["writer"], one["at"], one["tag"])
        item = held.setdefault(key, {**one, "columns": []})
        item["columns"] += one["columns"]
        item["version"] = one["version"] if item["version"] is None else item["version"]
    yield from sorted(held.values(), key=lambda item: item["at"])


def trained_with(run: RunFolder, table: str, sample: str) -> list[dict[str, Any]]:
    """For each step that trained on the sample: the micro-batch of each of its updates."""
    found = []
    for entry in FileBatchLog(run.batch_log).entries():
        for name, rows, updates in _parts(entry):
            if name == table and sample in rows:
                place = rows.index(sample)
                found.append(
                    {
                        "step": entry.step,
                        "row": place,
                        "of": len(rows),
                        "policy_version": entry.policy_version,
                        "micro_batches": [
                            {"update": number, "rank": rank, "micro_batch": index, "rows": len(micro)}
                            for number, update in enumerate(updates)
                            for rank, share in enumerate(update.micro_batches)
                            for index, micro in enumerate(share)
                            if place in micro
                        ],
                    }
                )
    return found


def _parts(entry: BatchEntry) -> Iterator[tuple[str, Sequence[str], Sequence[Any]]]:
    yield "train", entry.rows, entry.updates
    for loss in entry.losses:
        yield loss.table, loss.rows, loss.updates


def _lines(
    run: RunFolder,
    table: str,
    row: Mapping[str, Any],
    path: Sequence[Mapping[str, Any]],
    trained: Sequence[Mapping[str, Any]],
) -> Iterator[str]:
    end = row.get("end_state") or "not told how it ended"
    reason = f" ({row['end_reason']})" if row.get("end_reason") else ""
    yield f"{row['sample_id']}, table {table} of {run.run_id}: {end}{reason}"
    began = path[0]["at"] if path else 0.0
    for one in path:
        at = datetime.fromtimestamp(one["at"], UTC).strftime("%H:%M:%S.%f")[:-3]
        version = "" if one["version"] is None else f"  version {one['version']}"
        columns = _columns(one["columns"])
        yield f"  {at}  +{one['at'] - began:7.3f} s  {one['writer']:12} {columns}{version}  {one['tag']}".rstrip()
    versions = sorted(set(row.get("policy_versions") or []))
    if len(versions) > 1:
        counts = {one: row["policy_versions"].count(one) for one in versions}
        yield "  tokens by policy version: " + ", ".join(f"{one}: {count}" for one, count in counts.items())
    for one in trained:
        made = f"which made version {one['policy_version']}"
        yield f"  step {one['step']}: row {one['row'] + 1} of {one['of']}, {made}"
        for micro in one["micro_batches"]:
            where = f"update {micro['update'] + 1}, rank {micro['rank']}, micro-batch {micro['micro_batch'] + 1}"
            yield f"    {where} of {micro['rows']} rows"
    yield "prompt:    " + plain(str(row.get("prompt_text")))
    yield "response:  " + plain(str(row.get("response_text")))
    parts = {name: value for name, value in row.items() if name.startswith("reward") and value is not None}
    yield "rewards:   " + ", ".join(f"{name} {value}" for name, value in parts.items())


def _columns(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
