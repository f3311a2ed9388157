"""Responses that grow turn by turn: the policy writes, the user's environment answers, the policy goes on.

What the environment says is tokenised once and appended: ids are never decoded and encoded again. Its tokens are no
samples of the policy: `loss_mask` is false there. The budget `max_response_tokens` is of the whole response.

All rows of a chunk take their turns together, so that what is generated side by side does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rlmq.common.engines.generation import Generated, Request
from rlmq.common.errors import UsageError
from rlmq.common.user_code import load_function, source_file, user_error


class Environment(Protocol):
    """What the user's `rollout.environment` is: called with no arguments, it gives one of these."""

    def answer(self, text: str, fields: Mapping[str, Any]) -> str | None:
        """What follows the policy's newest turn, markers of the chat template included; None: the response ends.

        Args:
            text: the turn, without special tokens.
            fields: the data row, `prompt` included.
        """


@dataclass(slots=True)
class Episode:
    """A response so far; the lists have one entry per token. `turns` counts the policy's turns from 0."""

    request: Request
    fields: Mapping[str, Any]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    truncated: bool = False
    turn: int = 0
    part: int = 0
    """Of the turn: one more each time that other weights came into it."""

    @property
    def id(self) -> str:
        """Sample id."""
        return self.request.id

    @property
    def left_tokens(self) -> int:
        """What is left of the budget."""
        return self.request.sampling.max_tokens - len(self.token_ids)

    def next_request(self) -> Request:
        """The next turn's, or the rest of one; its random numbers are those of its own id."""
        if self.turn == 0 and self.part == 0:
            return self.request
        sampling = replace(self.request.sampling, max_tokens=self.left_tokens)
        prompt = [*self.request.prompt_ids, *self.token_ids]
        name = f"{self.id}~{self.turn}" + (f".{self.part}" if self.part else "")
        return replace(self.request, id=name, prompt_ids=prompt, sampling=sampling)

    def add(self, generated: Generated) -> None:
        """The policy's turn."""
        self._extend(generated.token_ids, generated.logprobs, generated.policy_versions, own=True)
        self.truncated = generated.truncated

    def add_part(self, generated: Generated) -> None:
        """What there is of a turn that goes on with other weights."""
        self._extend(generated.token_ids, generated.logprobs, generated.policy_versions, own=True)
        self.part += bool(generated.token_ids)

    def add_answer(self, ids: Sequence[int]) -> None:
        """The environment's answer; the next turn is the policy's."""
        version = self.policy_versions[-1] if self.policy_versions else 0
        self._extend(ids, [0.0] * len(ids), [version] * len(ids), own=False)
        self.turn, self.part = self.turn + 1, 0

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, own: bool) -> None:
        self.token_ids += ids
        self.logprobs += logprobs
        self.policy_versions += versions
        self.own += [own] * len(ids)
        self.turns += [self.turn] * len(ids)


class Answers:
    """The environment's part of the episodes; without one, every response has one turn.

    Args:
        spec: `file.py:Class` (or a function that makes one), or None.
        folder: the recipe's folder.
        most_turns: of the policy in one response.
        encode, decode: the tokenizer's, without special tokens.
    """

    def __init__(
        self,
        spec: str | None,
        folder: Path,
        *,
        most_turns: int,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._environment: Environment | None = None
        self._most_turns = most_turns
        self._encode = encode
        self._decode = decode
        if spec is not None:
            self._path = source_file(spec, folder, subject=_KEY)
            self._environment = make_environment(spec, folder)

    def goes_on(self, episode: Episode, turn: Generated) -> bool:
        """Ask the environment; whether the policy writes another turn.

        A response whose budget would be used up by the answer ends there, as truncated.

        Raises:
            UsageError: the user's code raised, or gave no text.
        """
        if self._environment is None or turn.truncated:
            return False
        try:
            answer = self._environment.answer(self._decode(turn.token_ids), episode.fields)
        except Exception as error:  # whatever the user's code raises
            raise user_error(error, self._path, subject=f"{_KEY}, sample {episode.id}") from error
        if answer is None or episode.turn + 1 >= self._most_turns:
            return False
        if not isinstance(answer, str):
            raise UsageError(f"{_KEY}, sample {episode.id}", got=type(answer).__name__, expected="text or None")
        ids = self._encode(answer)
        if len(ids) >= episode.left_tokens:
            episode.truncated = True
            return False
        episode.add_answer(ids)
        return True


_KEY = "rollout.environment"


def make_environment(spec: str, folder: Path) -> Environment:
    """The user's environment.

    Raises:
        UsageError: it is not there, raises when it is made, or has no method `answer`.
    """
    path = source_file(spec, folder, subject=_KEY)
    make = load_function(spec, folder, subject=_KEY)
    try:
        made = make()
    except Exception as error:  # whatever the user's code raises
        raise user_error(error, path, subject=_KEY) from error
    if not callable(getattr(made, "answer", None)):
        raise UsageError(
            f"{_KEY} ({spec})", got=type(made).__name__, expected="an object with answer(text, fields)"
        )
    environment: Environment = made
    return environment
