"""From data rows to prompts in tokens: the chat template, one BOS, and the length policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jinja2
import msgspec

from rlmq.common.errors import UsageError
from rlmq.producers.data import Row

LongPrompts = Literal["refuse", "skip", "cut_left"]


class PromptTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def bos_token_id(self) -> int | None:
        """Id of the begin-of-text token, if it has one."""

    @property
    def chat_template(self) -> Any:
        """The chat template, if it has one."""

    def __call__(self, text: str) -> Any:
        """Tokenise plain text, special tokens added: an object with `input_ids`."""

    def apply_chat_template(
        self, conversation: list[Any], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> Any:
        """Render messages and tokenise them."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Any:
        """The text of the tokens."""


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A response that the data bring: `ids, mask` [tokens], and its text without special tokens.

    `name` tells it from the others of its prompt (`chosen`); `cut`: the length policy took its end away.
    """

    name: str
    ids: tuple[int, ...]
    text: str
    mask: tuple[bool, ...]
    cut: bool = False


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready to be put: `ids` [tokens], their text, and the data row as JSON."""

    source: str
    ids: tuple[int, ...]
    text: str
    record: str
    responses: tuple[PreparedResponse, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """The prompts of one data set, and how many the length policy skipped or cut."""

    prompts: tuple[PreparedPrompt, ...]
    skipped: int = 0
    cut: int = 0


@dataclass(frozen=True, slots=True)
class LengthPolicy:
    """How long prompts may be, in tokens; `context_tokens` is the model's limit for prompt and response."""

    max_prompt_tokens: int
    max_response_tokens: int
    long_prompts: LongPrompts
    context_tokens: int | None = None


def prompt_ids(tokenizer: PromptTokenizer, prompt: str | list[Any], *, subject: str) -> list[int]:
    """Tokens of a prompt: those of `tokenizer(text)`, or of the chat template with its generation prompt.

    A template writes BOS itself, so the tokenizer adds nothing to it; plain text gets the tokenizer's BOS,
    also when the text begins with one already: there is never a second.

    Raises:
        UsageError: messages without a chat template, a template that raises, or no tokens at all.
    """
    if isinstance(prompt, str):
        ids = [int(i) for i in tokenizer(prompt).input_ids]
        bos = tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
    else:
        ids = chat_ids(tokenizer, prompt, subject)
    if not ids:
        raise UsageError(subject, got="no tokens", expected="a prompt of at least one token")
    return ids


def prepare_prompts(
    rows: Iterable[Row],
    tokenizer: PromptTokenizer,
    policy: LengthPolicy,
    *,
    source: str,
    subject: str,
    progress: Callable[[], None] = lambda: None,
    responses: Callable[[Row, str], tuple[PreparedResponse, ...] | None] = lambda _row, _where: (),
) -> PreparedPrompts:
    """Tokenise rows and apply the length policy.

    Args:
        source: name of the data set, a column of its rows.
        subject: the recipe's key, the beginning of error messages; rows are counted from 1.
        progress: called now and then; tokenising a large data set takes minutes.
        responses: makes those that a row brings; None: the row is skipped.

    Raises:
        UsageError: a prompt too long (policy `refuse`), longer than the model's context, or none left.
    """
    prompts: list[PreparedPrompt] = []
    skipped = cut = long_answers = 0
    for number, row in enumerate(rows, 1):
        where = f"{subject}, row {number}"
        ids = row.get("prompt_ids") or prompt_ids(tokenizer, row["prompt"], subject=where)
        answers = responses(row, where)
        if answers is None:
            skipped, long_answers = skipped + 1, long_answers + 1
            continue
        cut += any(answer.cut for answer in answers)
        if len(ids) > policy.max_prompt_tokens:
            if policy.long_prompts == "skip":
                skipped += 1
                continue
            ids = _cut_left(ids, tokenizer.bos_token_id, policy, where)
            cut += 1
        _check_context(len(ids), policy, where)
        prompts.append(_prepared(row, ids, tokenizer, source, answers))
        if number % 256 == 0:
            progress()
    if not prompts:
        got = f"0 of {skipped} prompts with at most {policy.max_prompt_tokens} tokens"
        if long_answers:
            got += f", {long_answers} for a response of more than {policy.max_response_tokens}"
        raise UsageError(subject, got=got, expected="at least one prompt that is short enough", remedy=_RAISE_LIMIT)
    return PreparedPrompts(tuple(prompts), skipped, cut)


_RAISE_LIMIT = "Raise data.max_prompt_tokens, or set data.long_prompts to skip or cut_left"


def chat_ids(tokenizer: PromptTokenizer, messages: list[Any], subject: str, *, open_turn: bool = True) -> list[int]:
    """Tokens of messages by the model's template; with `open_turn`, the assistant's turn has begun at their end.

    Raises:
        UsageError: there is no template, or it raises.
    """
    if not tokenizer.chat_template:
        remedy = "Give prompts as text, or a model whose tokenizer has a chat template"
        raise UsageError(
            subject, got="chat messages", expected="text: the model has no chat template", remedy=remedy
        )
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=open_turn, tokenize=True, return_dict=False
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        expected = "messages that the model's chat template accepts"
        raise UsageError(subject, got=f"roles {roles}: {error}", expected=expected) from error
    return [int(i) for i in ids]


def _cut_left(ids: list[int], bos: int | None, policy: LengthPolicy, where: str) -> list[int]:
    """The end of the prompt, after its BOS if it had one."""
    limit = policy.max_prompt_tokens
    if policy.long_prompts == "refuse":
        expected = f"at most {limit} (data.max_prompt_tokens)"
        raise UsageError(where, got=f"a prompt of {len(ids)} tokens", expected=expected, remedy=_RAISE_LIMIT)
    if bos is not None and ids[0] == bos and limit > 1:
        return [bos, *ids[-(limit - 1) :]]
    return ids[-limit:]


def _check_context(tokens: int, policy: LengthPolicy, where: str) -> None:
    total = tokens + policy.max_response_tokens
    if policy.context_tokens is not None and total > policy.context_tokens:
        raise UsageError(
            where,
            got=f"{tokens} prompt tokens + {policy.max_response_tokens} (rollout.max_response_tokens) = {total}",
            expected=f"at most {policy.context_tokens}, the model's context",
            remedy="Lower rollout.max_response_tokens or data.max_prompt_tokens",
        )


def _prepared(
    row: Row, ids: list[int], tokenizer: PromptTokenizer, source: str, responses: tuple[PreparedResponse, ...]
) -> PreparedPrompt:
    text = str(tokenizer.decode(ids, skip_special_tokens=False))
    return PreparedPrompt(source, tuple(ids), text, msgspec.json.encode(row).decode(), responses)
