"""From the YAML tree to a `Recipe`: the schema says how to read each scalar, and every problem is collected."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlmq.common.recipe.schema import Recipe
from rlmq.common.recipe.yaml_tree import BlockNode, ListNode, Node, Scalar

Path = tuple[str | int, ...]


class _Missing:
    """No usable value; the problem has been noted."""


MISSING = _Missing()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a recipe."""

    path: Path
    where: str
    got: str
    expected: str
    remedy: str = ""

    @property
    def key(self) -> str:
        """The dotted path, `reward.0.weight`."""
        return dotted(self.path)


def dotted(path: Path) -> str:
    """`("reward", 0, "weight")` as `reward.0.weight`."""
    return ".".join(str(part) for part in path)


def to_recipe(root: Node) -> tuple[Recipe | None, list[Problem]]:
    """The recipe, or everything that is wrong with it in file order."""
    reader = _Converter()
    value = reader.block(root, Recipe, ())
    noted = {problem.path for problem in reader.problems}
    recipe = None
    if not isinstance(value, _Missing):
        try:
            recipe = Recipe.model_validate(value)
        except ValidationError as error:
            reader.problems.extend(_constraints(error, root, noted))
    return (None if reader.problems else recipe), sorted(reader.problems, key=_line)


def _line(problem: Problem) -> int:
    kind, _, number = problem.where.partition(" ")
    return int(number) if kind == "line" else 0


class _Converter:
    """Walks tree and schema together."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def block(self, node: Node, model: type[BaseModel], path: Path) -> dict[str, Any] | _Missing:
        if isinstance(node, Scalar) and node.is_null:
            node = BlockNode({}, node.where)
        if not isinstance(node, BlockNode):
            return self._wrong(node, path, f"a block with the keys {', '.join(model.model_fields)}")
        result: dict[str, Any] = {}
        for key, item in node.items.items():
            field = model.model_fields.get(key)
            if field is not None:
                value = self.value(item, field.annotation, (*path, key), field.description or "")
                if not isinstance(value, _Missing):
                    result[key] = value
            elif path or not key.startswith("x-"):
                self._unknown(key, node, model, path)
        for key, field in model.model_fields.items():
            if field.is_required() and key not in node.items:
                self._absent(key, field, node, path)
        return result

    def value(self, node: Node, annotation: Any, path: Path, sentence: str) -> Any:
        annotation = _bare(annotation)
        if get_origin(annotation) in (Union, types.UnionType):
            return self._union(node, get_args(annotation), path, sentence)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return self.block(node, annotation, path)
        if get_origin(annotation) is tuple:
            return self._tuple(node, get_args(annotation), path, sentence)
        if get_origin(annotation) is dict:
            return self._mapping(node, get_args(annotation)[1], path, sentence)
        if annotation is Any:
            return self._anything(node, path)
        return self._scalar(node, annotation, path, sentence)

    def _union(self, node: Node, options: tuple[Any, ...], path: Path, sentence: str) -> Any:
        if type(None) in options and isinstance(node, Scalar) and node.is_null:
            return None
        inner = [option for option in options if option is not type(None)]
        wants_block = isinstance(node, BlockNode)
        fitting = [option for option in inner if (get_origin(_bare(option)) is dict) == wants_block]
        return self.value(node, (fitting or inner)[0], path, sentence)

    def _tuple(self, node: Node, types_: tuple[Any, ...], path: Path, sentence: str) -> Any:
        endless = types_[-1] is Ellipsis
        size = None if endless else len(types_)
        one = type_words(types_[0])
        if not isinstance(node, ListNode) or (size is not None and len(node.items) != size):
            expected = f"a list of {size} values, each {one}" if size else f"a list, each item {one}"
            return self._wrong(node, path, expected, sentence)
        values = [
            self.value(item, types_[0] if endless else types_[i], (*path, i), sentence)
            for i, item in enumerate(node.items)
        ]
        is_block = isinstance(types_[0], type) and issubclass(types_[0], BaseModel)
        if is_block:  # keep the places, so that later problems name the right item
            return tuple({} if isinstance(v, _Missing) else v for v in values)
        return MISSING if any(isinstance(v, _Missing) for v in values) else tuple(values)

    def _mapping(self, node: Node, item_type: Any, path: Path, sentence: str) -> Any:
        if not isinstance(node, BlockNode):
            return self._wrong(node, path, "a block of key: value", sentence)
        values = {key: self.value(item, item_type, (*path, key), sentence) for key, item in node.items.items()}
        return MISSING if any(isinstance(v, _Missing) for v in values.values()) else values

    def _anything(self, node: Node, path: Path) -> Any:
        if isinstance(node, Scalar):
            return node.value()
        if isinstance(node, ListNode):
            return [self._anything(item, (*path, i)) for i, item in enumerate(node.items)]
        return {key: self._anything(item, (*path, key)) for key, item in node.items.items()}

    def _scalar(self, node: Node, kind: Any, path: Path, sentence: str) -> Any:
        words = type_words(kind)
        if not isinstance(node, Scalar) or node.is_null:
            return self._wrong(node, path, words, sentence)
        if kind is str:
            return node.text
        if get_origin(kind) is Literal:
            if node.text in get_args(kind):
                return node.text
            near = difflib.get_close_matches(node.text, [str(choice) for choice in get_args(kind)], 1)
            return self._wrong(node, path, words, sentence, f"Did you mean {near[0]!r}?" if near else "")
        value = _number_or_bool(node, kind)
        return self._wrong(node, path, words, sentence, _scalar_remedy(node, kind)) if value is None else value

    def _wrong(self, node: Node, path: Path, expected: str, sentence: str = "", remedy: str = "") -> _Missing:
        expected = f"{expected} ({sentence.rstrip('.')})" if sentence else expected
        self.problems.append(Problem(path, node.where, shown(node), expected, remedy))
        return MISSING

    def _unknown(self, key: str, node: BlockNode, model: type[BaseModel], path: Path) -> None:
        known = list(model.model_fields)
        near = difflib.get_close_matches(key, known, 1)
        elsewhere = [name for name in all_keys() if name.rsplit(".", 1)[-1] == key]
        if elsewhere and not (near and near[0] in key):
            remedy = f"Did you mean {elsewhere[0]}?"
        else:
            remedy = f"Did you mean {dotted((*path, near[0]))}?" if near else ""
        self.problems.append(
            Problem((*path, key), node.key_where[key], "an unknown key", f"one of {', '.join(known)}", remedy)
        )

    def _absent(self, key: str, field: FieldInfo, node: BlockNode, path: Path) -> None:
        expected = f"{type_words(field.annotation)} ({(field.description or '').rstrip('.')})".replace(" ()", "")
        self.problems.append(Problem((*path, key), node.where, "nothing", expected, "Add this key"))


def all_keys() -> Iterator[str]:
    """Dotted names of every leaf of the schema; an item of a list is `reward.0`."""
    return (dotted(path) for path, _ in leaves(Recipe, ()))


def leaves(model: type[BaseModel], path: Path) -> Iterator[tuple[Path, FieldInfo]]:
    """Every field of the schema that is no block itself, in order."""
    for key, field in model.model_fields.items():
        annotation = field.annotation
        if get_origin(annotation) is tuple and isinstance(get_args(annotation)[0], type):
            inner = get_args(annotation)[0]
            if issubclass(inner, BaseModel):
                yield from leaves(inner, (*path, key, 0))
                continue
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from leaves(annotation, (*path, key))
        else:
            yield (*path, key), field


def type_words(annotation: Any) -> str:
    """A type in the words of a user."""
    annotation = _bare(annotation)
    simple = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Any: "any value"}
    if annotation in simple:
        return simple[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if option is type(None) else type_words(option) for option in arguments)
    if origin is tuple:
        size = "a list, each item " if arguments[-1] is Ellipsis else f"a list of {len(arguments)}, each "
        return size + type_words(arguments[0])
    return "a block"


def shown(node: Node) -> str:
    """What a message says was found."""
    if isinstance(node, Scalar):
        if node.is_null:
            return "nothing"
        return repr(node.text) if node.number() is None and node.boolean() is None else node.text
    if isinstance(node, ListNode):
        return f"a list of {len(node.items)}"
    return f"a block with {', '.join(node.items) or 'no keys'}"


def _bare(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _number_or_bool(node: Scalar, kind: Any) -> int | float | bool | None:
    if kind is bool:
        return node.boolean()
    number = node.number()
    if number is None or kind is float:
        return None if number is None else float(number)
    return int(number) if number == int(number) else None


def _scalar_remedy(node: Scalar, kind: Any) -> str:
    if not node.plain:
        return "Remove the quotes"
    if kind is bool:
        truth = {"on": "true", "yes": "true", "y": "true", "off": "false", "no": "false", "n": "false"}
        word = truth.get(node.text.lower())
        return f"Write {word}" if word else ""
    if node.text.replace("_", "").lstrip("+-").lstrip("0").isdigit():
        return f"Write {int(node.text.replace('_', ''))}"
    return ""


def _constraints(error: ValidationError, root: Node, noted: set[Path]) -> Iterator[Problem]:
    """Pydantic's complaints about values of the right type, apart from consequences of noted problems."""
    for entry in error.errors(include_url=False):
        path = tuple(entry["loc"])
        if any(path[: len(p)] == p[: len(path)] for p in noted):
            continue
        node = _node_at(root, path)
        compound = isinstance(entry["input"], Mapping | list | tuple | BaseModel)
        got = shown(node) if compound else repr(entry["input"])
        yield Problem(path, node.where, got, _constraint_words(entry) + _sentence(path))


def _constraint_words(entry: ErrorDetails) -> str:
    if entry["type"] == "too_short":
        return f"at least {entry['ctx']['min_length']} item"
    text = entry["msg"]
    for lead in ("Input should be ", "Value error, "):
        text = text.removeprefix(lead)
    return text[0].lower() + text[1:]


def _sentence(path: Path) -> str:
    """The field's description in brackets; an index within a leaf (`train.betas.1`) belongs to the leaf."""
    anywhere = tuple(0 if isinstance(part, int) else part for part in path)
    for leaf, field in leaves(Recipe, ()):
        if anywhere[: len(leaf)] == leaf and field.description:
            return f" ({field.description.rstrip('.')})"
    return ""


def _node_at(root: Node, path: Path) -> Node:
    node = root
    for part in path:
        if isinstance(node, BlockNode) and part in node.items:
            node = node.items[str(part)]
        elif isinstance(node, ListNode) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            break
    return node
