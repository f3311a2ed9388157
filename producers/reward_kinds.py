"""Scorers that need no file of the user: each is made once in the child and called as a function of TRL's form.

What a scorer has no verdict about is a `NoVerdict` in its list, with the reason.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlmq.common.errors import DependencyError, UsageError
from rlmq.producers.reward_values import NoVerdict


class OwnScorer(Protocol):
    """A scorer of ours: columns in, values out."""

    per_row: bool  # called once per row, so that the time limit is each row's

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[Any]:
        """One number, None or `NoVerdict` per row."""


def make_scorer(block: Mapping[str, Any], folder: Path) -> OwnScorer:
    """The scorer of an item that is no function.

    Args:
        block: `kind`, `source`, `subject`, `arguments`, `timeout_s`, `memory_mb`.
        folder: where relative names are looked up.

    Raises:
        UsageError: arguments that it does not take, a package that is missing, or what the kind itself refuses.
    """
    made = _maker(block, folder)
    try:
        return made(**block["arguments"])
    except DependencyError as error:
        raise UsageError(str(error)) from error
    except TypeError as error:
        raise UsageError(
            f"{block['subject']}, arguments", got=str(error), expected="what this kind takes"
        ) from error


def _maker(block: Mapping[str, Any], folder: Path) -> Callable[..., OwnScorer]:
    source, limits = block["source"], {"timeout_s": block["timeout_s"]}
    if block["kind"] == "builtin":
        return {"math_verify": MathVerify, "reasoning_gym": ReasoningGym}[source]
    if block["kind"] == "judge":
        from rlmq.producers.judge import Judge

        return lambda **arguments: Judge(source, folder=folder, **limits, **arguments)
    if block["kind"] == "code":
        from rlmq.producers.sandbox import CodeTests

        limits |= {"memory_mb": block["memory_mb"] or 512}
        return lambda **arguments: CodeTests(source, **limits, **arguments)
    from rlmq.producers.reward_model import RewardModel

    return lambda **arguments: RewardModel(source, folder=folder, **arguments)


def require(package: str, install: str) -> Any:
    """Import a package that not everybody has.

    Raises:
        UsageError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"reward builtin {package}",
            got=f"no package {error.name}",
            expected=f"the package {install}",
            remedy=f"Install it: pip install {install}",
        ) from error


def text_of(completion: Any) -> str:
    """A completion as text, where the prompt is messages too."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


class MathVerify:
    """1 where `math_verify.verify` holds the response's answer for equal to the data's, else 0.

    Its own time-outs (5 s to read an answer, 5 s to compare) are no verdict; where it fails on a response, the
    answers are not equal, as is its default.

    Args:
        answer: the field with the true answer; default: the first of `answer`, `solution`, `ground_truth`, and
            verl's `reward_model.ground_truth` that the row has.
    """

    per_row = True  # its own time limits need the main thread and a whole call

    def __init__(self, answer: str = "") -> None:
        self._math = require("math_verify", "math-verify[antlr4_13_2]")
        self._timeout: type[BaseException] = require("math_verify.errors", "math-verify").TimeoutException
        self._fields = (answer,) if answer else ("answer", "solution", "ground_truth")

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[Any]:
        """One verdict per row; an answer of the data that cannot be parsed gives none."""
        return [
            self._verdict(text_of(c), fields)
            for c, fields in zip(completions, rows_of(columns, len(completions)), strict=True)
        ]

    def _verdict(self, response: str, fields: Mapping[str, Any]) -> float | NoVerdict:
        model = fields.get("reward_model")
        nested = model.get("ground_truth") if isinstance(model, Mapping) else None
        truth = next((fields[name] for name in self._fields if fields.get(name) is not None), nested)
        if truth is None:
            return NoVerdict(f"math_verify: no field {' or '.join(self._fields)} in the row")
        gold = self._math.parse(f"${truth}$") if "$" not in str(truth) else self._math.parse(str(truth))
        if not gold:
            return NoVerdict(f"math_verify: the data's answer {truth!r} cannot be parsed")
        try:
            found = self._math.parse(response, raise_on_error=True)
            return float(self._math.verify(gold, found, raise_on_error=True))
        except (self._timeout, MemoryError, OSError, ImportError) as error:  # not the response's fault
            return NoVerdict(f"math_verify: {type(error).__name__}: {error}")
        except Exception:  # noqa: BLE001 - it takes anything that a response may say
            return 0.0


class ReasoningGym:
    """The score that the reasoning-gym task of each row gives, 0 to 1.

    A row is an entry of `reasoning_gym`: `question`, `answer`, `metadata` (with `source_dataset`), as fields or as
    one field `entry`; objects may be JSON text. Where the response has `<answer>…</answer>`, the last one counts.
    """

    per_row = True

    def __init__(self) -> None:
        self._gym = require("reasoning_gym", "reasoning-gym")
        self._scorers: dict[str, Callable[..., float]] = {}

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[Any]:
        """One verdict per row; a row that is no entry gets none."""
        return [
            self._verdict(text_of(c), fields)
            for c, fields in zip(completions, rows_of(columns, len(completions)), strict=True)
        ]

    def _verdict(self, response: str, fields: Mapping[str, Any]) -> float | NoVerdict:
        entry = dict(_object(fields.get("entry", fields)))
        metadata = entry["metadata"] = dict(_object(entry.get("metadata") or {}))
        name = metadata.get("source_dataset")
        if not name or "answer" not in entry:
            return NoVerdict("reasoning_gym: no entry (answer, metadata.source_dataset) in the row")
        if name not in self._scorers:
            try:
                self._scorers[name] = self._gym.get_score_answer_fn(name)
            except ValueError as error:
                return NoVerdict(f"reasoning_gym: {error}")
        _, opened, tail = response.rpartition("<answer>")
        answer = tail.partition("</answer>")[0] if opened else response
        return float(self._scorers[name](answer.strip(), entry))


def rows_of(columns: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """Columns as one mapping per row."""
    return [{name: values[row] for name, values in columns.items()} for row in range(count)]


def _object(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value
