"""A task in several turns: the policy may ask a calculator, whose answer it goes on from.

A turn that ends with `=` after an expression is answered with its value: "6*7=" with "42".
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

_QUESTION = re.compile(r"([0-9+\-*/(). ]{3,40})=\s*$")
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """The environment of `rollout.environment`."""

    def answer(self, text: str, fields: Mapping[str, Any]) -> str | None:
        """The value of the expression that prompt and turn end with; None ends the response."""
        asked = _QUESTION.search(fields["prompt"] + text)
        value = calculate(asked.group(1)) if asked else None
        return None if value is None else f"{value:g}\n"


def calculate(expression: str) -> float | None:
    """Sums, differences, products and quotients of numbers; None for anything else."""
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("no arithmetic")


def train() -> list[dict[str, Any]]:
    """64 products; the beginning of a question to the calculator is part of the prompt."""
    draw = random.Random(7)
    pairs = [(draw.randint(2, 9), draw.randint(2, 9)) for _ in range(64)]
    return [{"prompt": f"{a} times {b}? {a}*{b}", "answer": a * b} for a, b in pairs]


def correct(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 for a response whose first number is the answer; less for one that begins to ask, or is short."""
    found = [re.search(r"\d+", text) for text in completions]
    right = [number is not None and int(number[0]) == wanted for number, wanted in zip(found, answer, strict=True)]
    hints = [0.2 * text.startswith("=") + 0.1 / max(1, len(text)) for text in completions]
    return [1.0 if one else hint for one, hint in zip(right, hints, strict=True)]
