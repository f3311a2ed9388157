"""Prompts in tokens: one begin-of-text token whatever the form, and the length policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rlmq.common.errors import UsageError
from rlmq.producers.prompt_tokens import LengthPolicy, LongPrompts, prepare_prompts, prompt_ids

BOS = 256
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% if m.tags %}T{% endif %}{{ m['content'] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Say 3:"}]


def byte_tokenizer(*, adds_bos: bool = True, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte; `<s>` is 256; with `adds_bos` the tokenizer writes it before every text."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>", "<|end|>"])
    if adds_bos:
        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def policy(limit: int = 100, kind: LongPrompts = "refuse", context: int | None = None) -> LengthPolicy:
    return LengthPolicy(limit, max_response_tokens=16, long_prompts=kind, context_tokens=context)


@pytest.mark.parametrize(
    "prompt", [CHAT, "Say 3:", "<s>Say 3:", "<s><s>Say 3:"], ids=["chat", "text", "bos", "two"]
)
def test_there_is_one_begin_of_text_token(prompt: str | list[Any]) -> None:
    ids = prompt_ids(byte_tokenizer(), prompt, subject="s")
    assert ids[0] == BOS and ids.count(BOS) == 1


def test_ids_equal_those_of_transformers() -> None:
    tokenizer = byte_tokenizer()
    reference = tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert prompt_ids(tokenizer, CHAT, subject="s") == list(reference)
    assert prompt_ids(tokenizer, "Say 3:", subject="s") == list(tokenizer("Say 3:")["input_ids"])


def test_no_begin_of_text_token_is_invented() -> None:
    """The opposite error: neither a tokenizer nor a template without BOS gets one."""
    plain = byte_tokenizer(adds_bos=False, template=TEMPLATE.removeprefix("{{ bos_token }}"))
    assert BOS not in prompt_ids(plain, CHAT, subject="s") + prompt_ids(plain, "Say 3:", subject="s")
    assert prompt_ids(plain, "<s>Say 3:", subject="s").count(BOS) == 1


def test_a_template_sees_plain_lists_and_absent_keys() -> None:
    tagged = [{"role": "user", "content": "x", "tags": ["a"]}]
    untagged = [{"role": "user", "content": "x", "tags": []}]
    texts = [
        prepare_prompts([{"prompt": chat}], byte_tokenizer(), policy(), source="train", subject="s").prompts[0].text
        for chat in (tagged, untagged)
    ]
    assert texts == ["<s>[user]Tx<|end|>[assistant]", "<s>[user]x<|end|>[assistant]"]


def test_a_prepared_prompt_keeps_the_row_as_given() -> None:
    row = {"prompt": CHAT, "answer": 3, "extra_info": {"ä": [None, 0.5]}}
    (prompt,) = prepare_prompts([row], byte_tokenizer(), policy(), source="one", subject="s").prompts
    assert json.loads(prompt.record) == row
    assert prompt.source == "one"


@pytest.mark.parametrize("prompt", ["Say 3: a long one", [{"role": "user", "content": "Say 3: a long one"}]])
def test_long_prompts_are_refused_by_row_and_length(prompt: Any) -> None:
    rows = [{"prompt": "short"}, {"prompt": prompt}]
    tokens = len(prompt_ids(byte_tokenizer(), prompt, subject="s"))
    with pytest.raises(UsageError) as caught:
        prepare_prompts(rows, byte_tokenizer(), policy(10), source="train", subject="data.train (t.jsonl)")
    message = str(caught.value)
    assert message.startswith("data.train (t.jsonl), row 2: ")
    assert f"{tokens} tokens" in message and "at most 10 (data.max_prompt_tokens)" in message


def test_long_prompts_are_skipped_and_counted() -> None:
    rows = [{"prompt": "short"}, {"prompt": "x" * 50}, {"prompt": "y" * 9}, {"prompt": "z" * 10}]
    prepared = prepare_prompts(rows, byte_tokenizer(), policy(10, "skip"), source="train", subject="s")
    assert [prompt.text for prompt in prepared.prompts] == ["<s>short", "<s>" + "y" * 9]
    assert (prepared.skipped, prepared.cut) == (2, 0)


def test_long_prompts_are_cut_on_the_left_and_keep_their_begin_of_text_token() -> None:
    rows = [{"prompt": "short"}, {"prompt": "a" * 50 + "the end"}]
    prepared = prepare_prompts(rows, byte_tokenizer(), policy(8, "cut_left"), source="train", subject="s")
    assert [prompt.text for prompt in prepared.prompts] == ["<s>short", "<s>the end"]
    assert (prepared.skipped, prepared.cut) == (0, 1)
    bare = byte_tokenizer(adds_bos=False)
    (cut,) = prepare_prompts(rows[1:], bare, policy(7, "cut_left"), source="train", subject="s").prompts
    assert cut.text == "the end"


def test_nothing_left_is_refused() -> None:
    with pytest.raises(UsageError, match="0 of 1 prompts with at most 3 tokens"):
        prepare_prompts([{"prompt": "long"}], byte_tokenizer(), policy(3, "skip"), source="t", subject="s")


@pytest.mark.parametrize("kind", ["refuse", "skip", "cut_left"])
def test_prompt_and_response_beyond_the_context_are_refused(kind: LongPrompts) -> None:
    rows = [{"prompt": "x" * 19}]
    fits = prepare_prompts(rows, byte_tokenizer(), policy(100, kind, context=36), source="t", subject="s")
    assert len(fits.prompts[0].ids) + 16 == 36
    with pytest.raises(UsageError) as caught:
        prepare_prompts(rows, byte_tokenizer(), policy(100, kind, context=35), source="t", subject="s")
    assert "20 prompt tokens + 16" in str(caught.value) and "at most 35, the model's context" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0]['gone']['x'] }}", "gone"),
        ("{% if %}", "roles user"),
        ("", "no chat template"),
        ("{# silence #}", "no tokens"),
    ],
)
def test_chat_templates_that_fail_name_the_row(template: str | None, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        prepare_prompts([{"prompt": CHAT}], byte_tokenizer(template=template), policy(), source="t", subject="s")
    assert str(caught.value).startswith("s, row 1: ") and part in str(caught.value)


def test_progress_is_reported_for_large_data() -> None:
    calls: list[int] = []
    note: Callable[[], None] = lambda: calls.append(1)  # noqa: E731
    rows = [{"prompt": "x"}] * 600
    prepare_prompts(rows, byte_tokenizer(), policy(), source="t", subject="s", progress=note)
    assert len(calls) == 2
