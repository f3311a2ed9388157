"""Groups of recorded rows as they were trained on, for algorithms that otherwise generate: nothing is made anew.

Tokens, behaviour log-probs, versions and rewards are the recorded ones. A row brings all that the nodes before the
actor would have written, reference and critic apart, which work on it as in any run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlmq.buffer.recording import Recording
from rlmq.common.columns import Column, arrow_schema
from rlmq.common.errors import UsageError
from rlmq.common.recipe.schema import Recipe
from rlmq.producers.prompt_tokens import PreparedPrompt, PreparedPrompts


class RecordedGroups:
    """The trained rows of the recipe's recordings (`data.train`), by group.

    Args:
        columns: what the rows bring, in the order in which they are put.

    Raises:
        UsageError: a recording without such rows; steps of several recordings, which would be of no one order.
    """

    def __init__(self, recipe: Recipe, folder: Path, columns: Sequence[Column]) -> None:
        self._in_steps = recipe.data.recorded == "steps"
        self._schema = arrow_schema(columns)
        sets = recipe.training_sets
        if self._in_steps and len(sets) > 1:
            raise UsageError(
                "data.recorded", got="steps of several recordings", expected="groups, or one recording"
            )
        self._rows = pa.concat_tables(self._read(name, folder / source, source) for name, source in sets.items())
        self._steps = np.array(self._rows["end_step"].to_pylist())
        self._groups = self._by_group()

    def _read(self, name: str, place: Path, source: str) -> pa.Table:
        at: str | Path = source if "://" in source else place.expanduser()
        rows = Recording(at).read("train")
        label = f"recording {at}"
        lacking = [one for one in (*self._schema.names, "end_state", "end_step") if one not in rows.column_names]
        if lacking:
            remedy = (
                "The recipe's algorithm and names of rewards must be such that the recorded run had its columns"
            )
            raise UsageError(label, got=f"no column {lacking[0]}", expected="a whole recording", remedy=remedy)
        kept = rows.filter(pc.and_(pc.equal(rows["end_state"], "trained"), pc.is_valid(rows["reward"])))
        if not kept.num_rows:
            raise UsageError(label, got=f"none of {rows.num_rows} rows trained on", expected="trained rows")
        if not self._in_steps:  # two recordings may have the same ids
            kept = kept.sort_by([("end_step", "ascending"), ("sample_id", "ascending")])
        source_column = pa.array([name] * kept.num_rows, pa.string())
        kept = kept.set_column(kept.schema.get_field_index("source"), "source", source_column)
        return kept.select([*self._schema.names, "end_step"])

    def _by_group(self) -> list[list[int]]:
        """Indices of the rows of each group: in one step together, by step and id."""
        found: dict[tuple[str, int, str], list[int]] = {}
        keys = zip(*(self._rows[name].to_pylist() for name in ("source", "end_step", "group_id")), strict=True)
        for index, key in enumerate(keys):
            found.setdefault(key, []).append(index)
        return list(found.values())

    @property
    def prompts(self) -> PreparedPrompts:
        """A prompt for each group, by which their order is made; it brings nothing."""
        sources = self._rows["source"].take([rows[0] for rows in self._groups]).to_pylist()
        return PreparedPrompts(tuple(PreparedPrompt(source, (), "", "") for source in sources), 0, 0)

    @property
    def steps(self) -> int | None:
        """The last step, where each has the rows that it had; None: the order of the data says when they end."""
        return int(self._steps.max()) if self._in_steps else None

    def of_step(self, step: int) -> list[int]:
        """The groups that a step of the recorded run trained on."""
        return [index for index, rows in enumerate(self._groups) if self._steps[rows[0]] == step]

    def chunks(
        self, step: int, groups: Sequence[int], most_rows: int, *, after: int = 0, table: str = "train"
    ) -> list[pa.RecordBatch]:
        """The rows of these groups for a step, in chunks of whole groups of one size.

        Under their own names where a step has the rows that it had; else under those of the step.
        """
        found: list[pa.RecordBatch] = []
        held: list[dict[str, Any]] = []
        size = 0
        for place, group in enumerate(groups, after):
            rows = self._named(
                f"{table}-{step:06d}-{place:04d}", step, self._rows.take(self._groups[group]).to_pylist()
            )
            if held and (len(rows) != size or len(held) + len(rows) > most_rows):
                found.append(pa.RecordBatch.from_pylist(held, schema=self._schema))
                held = []
            held += rows
            size = len(rows)
        return [*found, pa.RecordBatch.from_pylist(held, schema=self._schema)] if held else found

    def _named(self, group_id: str, step: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for member, row in enumerate(rows):
            row["step"] = step
            if not self._in_steps:
                row["group_id"], row["sample_id"] = group_id, f"{group_id}-{member:02d}"
        return rows
