"""Rewards without a run: scorers of a recipe's `reward` list, called from a plain script."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rlmq.common.errors import UsageError
from rlmq.common.recipe.reward_block import RewardBlock
from rlmq.common.user_code import spec_of
from rlmq.producers.process_runner import ProcessRewardRunner
from rlmq.producers.reward_runner import RewardRow
from rlmq.producers.reward_values import total


@dataclass(frozen=True, slots=True)
class Scores:
    """What `RewardClient.score` found, in the rows' order; None is no verdict, never 0.

    Attributes:
        rewards: the weighted sum per row.
        components: by name of the scorer, its value per row, without its weight.
        reasons: why there is no verdict, where there is none.
        fields: by name of the scorer and row, what its dicts had beside their scores.
    """

    rewards: list[float | None]
    components: dict[str, list[float | None]]
    reasons: list[str] = field(default_factory=list)
    fields: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


class RewardClient:
    """Scores rows with the reward functions of a file, or with any item of a recipe's `reward` list.

    Each scorer has a process of its own with its limits, as in a run; nothing else is started.

    Args:
        rewards: a function at the top of a file, `"file.py:function"`, or an item as a mapping:
            `{"function": correct, "weight": 0.5}`, `{"judge": URL, "arguments": {…}}`. Functions are imported from
            their file in the scorer's process, so the script that calls this has it below `if __name__ == …`.
        folder: where relative files are looked up.
        timeout_s: the time limit of a call, for items that state none.

    Raises:
        UsageError: an item that is none, or a scorer that cannot be started.

    Example:
        >>> with RewardClient(["rewards.py:correct"]) as client:
        ...     client.score([{"prompt": "2 + 2", "response": "4", "answer": "4"}]).rewards
        [1.0]
    """

    def __init__(
        self,
        rewards: Sequence[str | Callable[..., Any] | Mapping[str, Any]],
        *,
        folder: str | Path = ".",
        timeout_s: float = 10.0,
    ) -> None:
        self._blocks = [_block(item, timeout_s) for item in rewards]
        self._runners: list[ProcessRewardRunner] = []
        names = [block.label for block in self._blocks]
        if not names or len(set(names)) < len(names):
            raise UsageError("RewardClient", got=f"{names}", expected="scorers, each with a name of its own")
        try:
            for block in self._blocks:
                self._runners.append(ProcessRewardRunner(block, block.label, Path(folder).resolve()))
        except BaseException:
            self.close()
            raise

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Scores:
        """Score rows: mappings with `prompt` (text or messages), `response`, and the fields that the scorers read.

        Raises:
            UsageError: a row without `response`.
        """
        for number, row in enumerate(rows):
            if not isinstance(row.get("response"), str):
                raise UsageError(f"row {number}", got="no text `response`", expected="prompt, response and fields")
        known = ("prompt", "response")
        plain = [
            RewardRow(row.get("prompt", ""), row["response"], {k: v for k, v in row.items() if k not in known})
            for row in rows
        ]
        components: dict[str, list[float | None]] = {}
        reasons: list[str] = []
        fields: dict[str, list[dict[str, Any]]] = {}
        for runner in self._runners:
            verdicts = runner.score(plain)
            components[runner.name] = verdicts.values
            fields |= {runner.name: list(verdicts.fields)} if verdicts.fields else {}
            reasons += [verdicts.failure] if verdicts.failure else list(verdicts.notes)
        weights = [block.weight for block in self._blocks]
        ensembles = [block.ensemble for block in self._blocks]
        parts = zip(*components.values(), strict=True)
        return Scores([total(weights, values, ensembles) for values in parts], components, reasons, fields)

    def close(self) -> None:
        """End the scorers' processes."""
        for runner in self._runners:
            runner.close()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _block(item: str | Callable[..., Any] | Mapping[str, Any], timeout_s: float) -> RewardBlock:
    given: dict[str, Any] = dict(item) if isinstance(item, Mapping) else {"function": item}
    if callable(given.get("function")):
        given["function"] = spec_of(given["function"], subject="RewardClient")
    try:
        return RewardBlock.model_validate({"timeout_s": timeout_s, **given})
    except ValueError as error:
        got = json.dumps(given, default=str)
        raise UsageError("RewardClient", got=f"{got}: {error}", expected="an item of a reward list") from error
