"""From data rows that have their responses to tokens: one response a row, or a chosen and a rejected one.

::

    {prompt, response}            prompt: text or messages; response: text, or a list of one assistant message
    {prompt, chosen, rejected}    the same of two
    recorded rows                 as tokens: see `rlmq.producers.recorded_rows`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlmq.common.errors import UsageError
from rlmq.producers.data import Row
from rlmq.producers.prompt_tokens import LengthPolicy, PreparedResponse, PromptTokenizer, chat_ids, prompt_ids

ONE = ("response",)
PAIR = ("chosen", "rejected")


class ResponseTokenizer(PromptTokenizer, Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Tokens of a text."""


def responses_of(
    tokenizer: ResponseTokenizer, policy: LengthPolicy, names: Sequence[str], ends: Sequence[int]
) -> Callable[[Row, str], tuple[PreparedResponse, ...] | None]:
    """What makes the responses of a row; None: the length policy skips it.

    Args:
        names: keys of the row's responses, `ONE` or `PAIR`.
        ends: ids that end a response; the first is appended where none is there.
    """

    def prepared(row: Row, where: str) -> tuple[PreparedResponse, ...] | None:
        found = []
        for name in names:
            of = f"{where}, {name}"
            ids, mask = _tokens(row["prompt"], row[name], tokenizer, ends, of)
            cut = len(ids) > policy.max_response_tokens
            if cut and policy.long_prompts == "skip":
                return None
            if cut and policy.long_prompts == "refuse":
                raise UsageError(
                    of,
                    got=f"a response of {len(ids)} tokens",
                    expected=f"at most {policy.max_response_tokens} (rollout.max_response_tokens)",
                    remedy="Raise rollout.max_response_tokens, or set data.long_prompts to skip or cut_left",
                )
            ids, mask = ids[: policy.max_response_tokens], mask[: policy.max_response_tokens]
            text = str(tokenizer.decode(ids, skip_special_tokens=True))
            found.append(PreparedResponse("" if name in ONE else name, tuple(ids), text, tuple(mask), cut))
        return tuple(found)

    return prepared


def _tokens(
    prompt: Any, response: Any, tokenizer: ResponseTokenizer, ends: Sequence[int], where: str
) -> tuple[list[int], list[bool]]:
    if isinstance(response, dict):  # recorded: token in, token out
        return list(response["ids"]), list(response["loss_mask"])
    ids = response_ids(tokenizer, prompt, response, ends, subject=where)
    return ids, [True] * len(ids)


def response_ids(
    tokenizer: ResponseTokenizer, prompt: str | list[Any], response: Any, ends: Sequence[int], *, subject: str
) -> list[int]:
    """Tokens that the policy would have had to write after `prompt_ids(prompt)`, end of text included.

    They are what prompt and response in one have more than the prompt. Where tokens cross the border, the response
    is tokenised by itself: the policy goes on from the prompt's tokens, whatever the whole text's would be.

    Raises:
        UsageError: nothing, or another form; a template that raises.
    """
    text = _text(response, subject)
    before = prompt_ids(tokenizer, prompt, subject=subject)
    if isinstance(prompt, str):
        whole = prompt_ids(tokenizer, prompt + text, subject=subject)
    else:
        answer = {"role": "assistant", "content": text}
        whole = chat_ids(tokenizer, [*prompt, answer], subject, open_turn=False)
    if whole[: len(before)] == before and len(whole) > len(before):
        ids = whole[len(before) :]
    else:
        ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    last_end = max((place for place, token in enumerate(ids) if token in ends), default=None)
    if last_end is None:
        return [*ids, *ends[:1]]
    return ids[: last_end + 1]  # what a template writes after it is no part of the response


def _text(response: Any, subject: str) -> str:
    if isinstance(response, list) and len(response) == 1 and isinstance(response[0], dict):
        role, response = response[0].get("role"), response[0].get("content")
        if role != "assistant":
            raise UsageError(subject, got=f"a message of {role!r}", expected="one of the assistant")
    if not isinstance(response, str) or not response:
        got = "nothing" if response in (None, "") else f"{type(response).__name__} {str(response)[:60]!r}"
        raise UsageError(subject, got=got, expected="text, or a list of one assistant message")
    return response
