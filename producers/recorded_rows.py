"""Rows of a recording (the `samples` folder of a run) as data to train on, in the tokens that were generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmq.buffer.recording import Recording
from rlmq.common.errors import IntegrityError, UsageError
from rlmq.producers.data import Row, load_rows
from rlmq.producers.response_tokens import PAIR

_COLUMNS = ("sample_id", "group_id", "prompt_ids", "prompt_text", "response_ids", "response_text", "loss_mask")


def load_answered_rows(
    source: str,
    folder: Path,
    names: Sequence[str],
    *,
    min_reward: float | None,
    best_of_group: bool = False,
    subject: str,
) -> list[Row]:
    """Rows with a prompt and these responses: of a data source as in `load_rows`, or of a folder of recorded rows.

    A pair of a recording is the best and the worst response of a group, by reward; of equal ones the first by
    sample id. Groups whose rewards are all equal have none.

    Args:
        min_reward: recorded rows with less reward, or without, are left out.
        best_of_group: of each group only the response with the most reward.

    Raises:
        UsageError: as `load_rows`; a folder without recorded rows, or nothing left of them.
    """
    place: str | Path = source if "://" in source else folder / Path(source).expanduser()
    if isinstance(place, Path) and not place.is_dir():
        if min_reward is not None or best_of_group:
            key = "min_reward" if min_reward is not None else "best_of_group"
            expected = f"the folder of a run's samples, since data.{key} is given"
            raise UsageError(subject, got=repr(source), expected=expected)
        return load_rows(source, folder, subject=subject, needs=("prompt", *names))
    label = f"{subject} ({source})"
    recorded = _recorded(place, label)
    kept = [row for row in recorded if _at_least(row["reward"], min_reward)]
    if best_of_group:
        kept = [max(members, key=lambda row: row["reward"]) for members in _groups(kept)]
    rows = _pairs(kept) if tuple(names) == PAIR else [_row(one, {"response": one}) for one in kept]
    if not rows:
        expected = "groups with different rewards" if tuple(names) == PAIR else "rows of at least data.min_reward"
        raise UsageError(label, got=f"none among {len(recorded)} recorded rows", expected=expected)
    return rows


def _recorded(place: str | Path, label: str) -> list[Row]:
    """Rows of `train` with a response, by sample id, each once."""
    try:
        table = Recording(place).read("train")
        names = [name for name in (*_COLUMNS, "reward") if name in table.column_names or name != "reward"]
        rows = table.select(names).to_pylist()
    except (IntegrityError, KeyError) as error:
        raise UsageError(label, got=str(error), expected="recorded rows") from error
    found = [{"reward": None, **row} for row in rows if row["response_ids"]]
    if not found:
        raise UsageError(label, got=f"{len(rows)} rows, no response", expected="a run's samples")
    return found


def _pairs(rows: Sequence[Row]) -> list[Row]:
    pairs = []
    for members in _groups(rows):
        best, worst = max(members, key=lambda row: row["reward"]), min(members, key=lambda row: row["reward"])
        if best["reward"] > worst["reward"]:
            pairs.append(_row(best, {"chosen": best, "rejected": worst}))
    return pairs


def _groups(rows: Sequence[Row]) -> Iterable[list[Row]]:
    """Rows with a reward, by group."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["reward"] is not None:
            groups.setdefault(row["group_id"], []).append(row)
    return groups.values()


def _row(of: Row, responses: Mapping[str, Row]) -> Row:
    found: dict[str, Any] = {"prompt": of["prompt_text"], "prompt_ids": of["prompt_ids"]}
    for name, row in responses.items():
        found[name] = {
            "sample_id": row["sample_id"],
            "reward": row["reward"],
            "ids": row["response_ids"],
            "loss_mask": row["loss_mask"],
        }
    return found


def _at_least(reward: float | None, least: float | None) -> bool:
    return least is None or (reward is not None and reward >= least)
