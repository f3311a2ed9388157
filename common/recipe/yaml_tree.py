"""YAML as a tree that still knows its lines, with YAML 1.2's scalars and no key twice.

PyYAML reads YAML 1.1, where `1e-6` is text, `on` is true, `010` is 8 and `1:30` is 90. Here a plain
scalar stays text until the schema says what is expected at its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from rlmq.common.errors import UsageError

MOST_NODES = 100_000  # nested aliases grow exponentially

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")
_RESOLVER = yaml.SafeLoader("")


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text, and whether it was written without quotes; `where` is "line 12" or the override."""

    text: str
    plain: bool
    where: str

    @property
    def is_null(self) -> bool:
        """Nothing, `~` or `null`."""
        return self.plain and self.text in _NULLS

    def number(self) -> int | float | None:
        """The number that an unquoted scalar is in YAML 1.2, else None (so `010`, `1:30`, `1_000`, `.inf`)."""
        if not self.plain:
            return None
        if _INT.fullmatch(self.text):
            return int(self.text)
        number = float(self.text) if _FLOAT.fullmatch(self.text) else math.inf
        return number if math.isfinite(number) else None

    def boolean(self) -> bool | None:
        """True or false; `yes`, `on` and the like are text."""
        return _BOOLS.get(self.text) if self.plain else None

    def value(self) -> str | int | float | bool | None:
        """What it is where any value may stand."""
        if self.is_null:
            return None
        boolean = self.boolean()
        if boolean is not None:
            return boolean
        number = self.number()
        return self.text if number is None else number


@dataclass(slots=True)
class ListNode:
    """A sequence."""

    items: list[Node]
    where: str


@dataclass(slots=True)
class BlockNode:
    """A mapping with text keys, and where each key stands."""

    items: dict[str, Node]
    where: str
    key_where: dict[str, str] = field(default_factory=dict)


Node = Scalar | ListNode | BlockNode


def parse_yaml(text: str, *, subject: str) -> Node:
    """Read one YAML document.

    Raises:
        UsageError: not YAML, a key twice (both lines are named), a tag, or nested aliases without end.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UsageError(subject, got=_yaml_problem(error), expected="YAML") from error
    except RecursionError as error:
        raise UsageError(subject, got="blocks nested without end", expected="a recipe") from error
    if root is None:
        return Scalar("", plain=True, where="line 1")
    return _Reader(subject).node(root)


class _Reader:
    """Turns PyYAML's nodes into ours."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._count = 0
        self._open: set[int] = set()

    def node(self, node: yaml.Node) -> Node:
        self._count += 1
        if self._count > MOST_NODES or id(node) in self._open:
            raise self._refuse(node, "an alias that contains itself or repeats without end", "a finite document")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node)
            if isinstance(node, yaml.SequenceNode):
                self._check_tag(node, "seq")
                return ListNode([self.node(item) for item in node.value], _where(node))
            if isinstance(node, yaml.MappingNode):
                return self._block(node)
        finally:
            self._open.discard(id(node))
        raise self._refuse(node, "an unknown kind of node", "YAML")

    def _scalar(self, node: yaml.ScalarNode) -> Scalar:
        plain = node.style is None
        self._check_tag(node, *(_PLAIN_TAGS if plain else ("str",)))
        if plain and node.tag == f"{_TAG}str":  # a number's text has this tag only when !!str was written
            tag: str = _RESOLVER.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
            plain = tag == node.tag
        return Scalar(node.value, plain=plain, where=_where(node))

    def _block(self, node: yaml.MappingNode) -> BlockNode:
        self._check_tag(node, "map")
        block = BlockNode({}, _where(node))
        lines: dict[str, str] = {}
        merged: list[BlockNode] = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._refuse(key, "a key that is no text", "key: value")
            name = key.value
            if name in lines:
                raise UsageError(
                    self._subject,
                    got=f"the key {name!r} twice, on {lines[name]} and {_where(key)}",
                    expected="each key once",
                    remedy="Delete one of the two",
                )
            lines[name] = _where(key)
            if name == "<<" and key.style is None:
                merged.extend(self._merged(value))
            else:
                block.items[name], block.key_where[name] = self.node(value), lines[name]
        for source in merged:
            for name, item in source.items.items():
                if name not in block.items:
                    block.items[name], block.key_where[name] = item, source.key_where[name]
        return block

    def _merged(self, value: yaml.Node) -> Iterator[BlockNode]:
        """The blocks that `<<: *a` or `<<: [*a, *b]` brings in, the strongest first."""
        for node in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            block = self.node(node)
            if not isinstance(block, BlockNode):
                raise self._refuse(node, "<< with something that is no block", "<<: *name of a block")
            yield block

    def _check_tag(self, node: yaml.Node, *allowed: str) -> None:
        if node.tag not in [_TAG + name for name in allowed]:
            raise self._refuse(node, f"the tag {node.tag.replace(_TAG, '!!')}", "plain values without tags")

    def _refuse(self, node: yaml.Node, got: str, expected: str) -> UsageError:
        return UsageError(f"{self._subject}, {_where(node)}", got=got, expected=expected)


def _where(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} on line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())
