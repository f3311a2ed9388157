"""The public surface as sorted lists of lines, and the frozen copies beside this file.

    python tests/policy/frozen.py --write     (make freeze)

Users' scripts, dashboards and stored data depend on these names, so a change is seen as a diff.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

FOLDER = Path(__file__).parent


def commands() -> Iterator[str]:
    """`rlmq` and its commands, with arguments and options."""
    import typer

    from rlmq.cli import app

    yield from _command_lines("rlmq", typer.main.get_command(app))


def _command_lines(path: str, command: Any) -> Iterator[str]:
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield f"{path} {parameter.metavar or parameter.name.upper()}"
        else:
            yield f"{path} {' '.join([*parameter.opts, *parameter.secondary_opts])}"
    for name, child in getattr(command, "commands", {}).items():
        yield f"{path} {name}"
        yield from _command_lines(f"{path} {name}", child)


def metrics() -> Iterator[str]:
    """Prometheus metrics: name, type, labels."""
    from rlmq.common.metrics import REGISTRY

    for collector in list(REGISTRY._collector_to_names):
        labels = ", ".join(getattr(collector, "_labelnames", ()))
        for family in collector.describe() if hasattr(collector, "describe") else ():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield f"{name} {family.type} {{{labels}}}"


def redis_keys() -> Iterator[str]:
    """Keys in Redis, for run RUN and table TABLE; one that ends with a colon goes on with a name."""
    from rlmq.buffer import keys

    for suffix in keys.TABLE_SUFFIXES.values():
        yield keys.table_prefix("RUN", "TABLE") + suffix
    for suffix in keys.RUN_SUFFIXES.values():
        yield keys.run_prefix("RUN") + suffix


def columns() -> Iterator[str]:
    """Columns of the sample tables, in their order, and the fingerprint that guards stored data."""
    from rlmq.common.columns import fingerprint
    from rlmq.common.flow import sample_columns, sample_flow

    found = sample_columns(sample_flow(["NAME"], reference=True))
    for place, column in enumerate(found):
        yield f"{place:02d} {column.name}: {column.type} (written by {column.writer})"
    yield f"fingerprint {fingerprint(found)}"


def recipe_keys() -> Iterator[str]:
    """Keys of a recipe, with type and default."""
    from rlmq.common.recipe.schema import Recipe

    yield from _recipe_lines("", Recipe)


def _recipe_lines(prefix: str, block: type[BaseModel]) -> Iterator[str]:
    for name, field in block.model_fields.items():
        blocks = [t for t in (field.annotation, *get_args(field.annotation)) if _is_block(t)]
        many = ".N" if blocks and blocks[0] is not field.annotation else ""
        if blocks:
            yield from _recipe_lines(f"{prefix}{name}{many}.", blocks[0])
            continue
        default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
        yield f"{prefix}{name}: {_type_name(field.annotation)} = {default}"


def _is_block(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _type_name(annotation: Any) -> str:
    """The type as one would write it, without the bounds that pydantic keeps in `Annotated`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_type_name(argument) for argument in arguments)
    if origin is Literal:
        return " | ".join(repr(argument) for argument in arguments)
    if arguments:
        return f"{origin.__name__}[{', '.join(_type_name(argument) for argument in arguments)}]"
    if annotation in (None, NoneType):
        return "None"
    return "..." if annotation is Ellipsis else annotation.__name__


def exit_codes() -> Iterator[str]:
    """Exit codes of every command."""
    from rlmq.common.errors import ExitCode

    for code in ExitCode:
        yield f"{int(code):3d} {code.name.lower()}"


SURFACES: Mapping[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "metrics": metrics,
    "redis_keys": redis_keys,
    "columns": columns,
    "recipe_keys": recipe_keys,
    "exit_codes": exit_codes,
}


def current(surface: str) -> str:
    """The surface as it is now, as the text of its file."""
    return "".join(f"{line}\n" for line in sorted(set(SURFACES[surface]())))


def frozen_file(surface: str) -> Path:
    """Where the frozen copy lies."""
    return FOLDER / f"{surface}.txt"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    for surface in SURFACES:
        frozen_file(surface).write_text(current(surface), encoding="utf-8")
        print(frozen_file(surface))
