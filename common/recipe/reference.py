"""The reference of all recipe keys, generated: `python -m rlmq.common.recipe.reference > docs/recipe.md`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlmq.common.recipe.convert import dotted, leaves, type_words
from rlmq.common.recipe.schema import Recipe

_HEAD = """# Recipe reference

Every key of a recipe. This page is generated: `python -m rlmq.common.recipe.reference > docs/recipe.md`.
[`recipes/demo.yaml`](../recipes/demo.yaml) is a commented example; `rlmq check RECIPE` validates a file.

* A key that is not in this table is an error, and so is a key that stands twice in one block. Blocks of your
  own under a top-level name that begins with `x-` are ignored: a place for YAML anchors (`&name`, `<<: *name`).
* Plain values are read as YAML 1.2 by the type of the key: `1e-6` is a number, `1e1` is 10 where a whole number is
  expected, `on` and `yes` are text (write `true`), `010` and `1:30` are not numbers, `name: 1234` is text.
* `a.b=1` after the recipe's path on the command line replaces a value, read by the same rules; items of lists
  have their index (`reward.0.weight=2`), and the next free index appends. Of repeated overrides the last wins.
* Relative names of files (`model`, `data.*`, `reward.*.function`) are looked up in the recipe's folder, not in the
  working directory. When the recipe's path is a symbolic link: beside the link first, then beside the file it
  points to.
* `dataflow.min_batch_for_reward` is another name of `stages.reward.min_batch`.
* `file.py:function` is imported by path; its siblings can be imported from it as from a script.
  `package.module:function` is one of an installed package.

An unfinished run is continued by the same command. With a changed recipe it is continued only if all changes are
harmless: `train.steps` (where the learning rate's schedule does not depend on it), `data.passes`,
`evaluate.every_steps`, `checkpoint`, `stages`, `deadlines`, `track`, `placement`; outside deterministic mode also
`train.micro_batch_tokens`, `train.activation_checkpointing` and `reward.*.timeout_s`. In deterministic mode,
trainer ranks and threads may not change.
"""


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One key: dotted name (`reward.N.weight` for list items), type and default in words, a sentence."""

    key: str
    type: str
    default: str
    sentence: str


def describe_fields() -> list[FieldRow]:
    """Every key of the schema in order."""
    return [
        FieldRow(
            dotted(tuple("N" if part == 0 else part for part in path)),
            type_words(field.annotation) + _bounds(field),
            _default(field),
            field.description or "",
        )
        for path, field in leaves(Recipe, ())
    ]


def markdown() -> str:
    """The page."""
    lines = [_HEAD, "| key | type | default | |", "|---|---|---|---|"]
    for row in describe_fields():
        default = f"`{row.default}`" if row.default else "**required**"
        lines.append(f"| `{row.key}` | {row.type} | {default} | {row.sentence} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(str(item) for item in value)}]"
    return str(value)


def _bounds(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [
        f"{sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return f" {', '.join(found)}" if found else ""


if __name__ == "__main__":
    sys.stdout.write(markdown())
