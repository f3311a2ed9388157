"""Responses that the data bring: their tokens, the end of text, the length policy; recorded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmq.common.errors import UsageError
from rlmq.producers.prompt_tokens import LengthPolicy, prepare_prompts, prompt_ids
from rlmq.producers.recorded_rows import load_answered_rows
from rlmq.producers.response_tokens import ONE, PAIR, response_ids, responses_of
from tests.unit.producers.test_prompt_tokens import byte_tokenizer

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Say 3:"}]


def end_of(tokenizer: Any) -> int:
    return int(tokenizer.convert_tokens_to_ids("<|end|>"))


def prepared(rows: list[dict[str, Any]], names: Any, *, most: int = 16, kind: Any = "refuse") -> Any:
    tokenizer = byte_tokenizer()
    policy = LengthPolicy(40, max_response_tokens=most, long_prompts=kind)
    made = responses_of(tokenizer, policy, names, [end_of(tokenizer)])
    return prepare_prompts(rows, tokenizer, policy, source="train", subject="data.train", responses=made)


def test_text_is_what_the_whole_has_more_than_the_prompt_and_ends() -> None:
    tokenizer = byte_tokenizer()
    end = end_of(tokenizer)
    ids = response_ids(tokenizer, "Say:", " three", [end], subject="s")
    assert ids == [*tokenizer.encode(" three", add_special_tokens=False), end]
    whole = tokenizer("Say: three").input_ids
    assert prompt_ids(tokenizer, "Say:", subject="s") + ids == [*whole, end]


@pytest.mark.parametrize("response", ["three", [{"role": "assistant", "content": "three"}]])
def test_a_chat_response_is_what_the_template_writes_after_the_open_turn(response: Any) -> None:
    tokenizer = byte_tokenizer()
    end = end_of(tokenizer)
    ids = response_ids(tokenizer, CHAT, response, [end], subject="s")
    assert tokenizer.decode(ids) == "three<|end|>"
    assert ids.count(end) == 1


def test_what_a_template_writes_after_the_end_is_no_response() -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>\n{% endfor %}"
    tokenizer = byte_tokenizer(template=template + "{% if add_generation_prompt %}[assistant]{% endif %}")
    assert tokenizer.decode(response_ids(tokenizer, CHAT, "3", [end_of(tokenizer)], subject="s")) == "3<|end|>"


def test_a_template_that_rewrites_the_turn_leaves_the_response_by_itself() -> None:
    template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer = byte_tokenizer(template=template + "{% if add_generation_prompt %}<think>{% endif %}")
    assert tokenizer.decode(response_ids(tokenizer, CHAT, "3", [end_of(tokenizer)], subject="s")) == "3<|end|>"


@pytest.mark.parametrize("response", [None, "", 3, [], [{"role": "user", "content": "x"}], [{"role": "assistant"}]])
def test_what_is_no_response_is_named_with_its_row(response: Any) -> None:
    with pytest.raises(UsageError, match=r"data\.train, row 2, response"):
        prepared([{"prompt": "a", "response": "b"}, {"prompt": "a", "response": response}], ONE)


def test_both_of_a_pair_count_in_the_length_policy() -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c" * 9}, {"prompt": "d", "chosen": "e", "rejected": "f"}]
    with pytest.raises(UsageError, match=r"row 1, rejected.*a response of 10 tokens.*at most 8"):
        prepared(rows, PAIR, most=8)
    skipped = prepared(rows, PAIR, most=8, kind="skip")
    assert (len(skipped.prompts), skipped.skipped) == (1, 1)
    assert [one.name for one in skipped.prompts[0].responses] == ["chosen", "rejected"]
    cut = prepared(rows, PAIR, most=8, kind="cut_left")
    assert (len(cut.prompts), cut.cut) == (2, 1)
    chosen, rejected = cut.prompts[0].responses
    assert (rejected.text, rejected.cut, len(rejected.mask)) == ("c" * 8, True, 8)
    assert not chosen.cut and chosen.text == "b"


def test_all_too_long_says_which_limit() -> None:
    with pytest.raises(UsageError, match="1 for a response of more than 2"):
        prepared([{"prompt": "a", "response": "bcd"}], ONE, most=2, kind="skip")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Three groups: rewards 0, 1 and 0.5; equal ones; one row has no verdict. The last part repeats a row."""
    rewards = {"g1": [0.0, 1.0, 0.5], "g2": [0.3, 0.3], "g3": [None, 0.9]}
    rows = [
        {
            "sample_id": f"{group}-{member}",
            "group_id": group,
            "prompt_ids": [1, 2],
            "prompt_text": "p",
            "response_ids": [member, 9],
            "response_text": "r",
            "loss_mask": [True, member != 1],
            "reward": reward,
            "advantages": None,
        }
        for group, own in rewards.items()
        for member, reward in enumerate(own)
    ]
    samples = tmp_path / "samples"
    samples.mkdir()
    schema = pa.schema(
        [(n, pa.string()) for n in ("sample_id", "group_id", "prompt_text", "response_text")]
        + [(n, pa.list_(pa.int32())) for n in ("prompt_ids", "response_ids")]
        + [("loss_mask", pa.list_(pa.bool_())), ("reward", pa.float64()), ("advantages", pa.float64())]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), samples / "train-000001-0000.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1], schema=schema), samples / "train-000001-0001.parquet")
    return tmp_path


def test_recorded_rows_keep_their_tokens_and_masks(recording: Path) -> None:
    rows = load_answered_rows("samples", recording, ONE, min_reward=0.5, subject="data.train")
    found = prepared(rows, ONE)
    assert [one.responses[0].ids for one in found.prompts] == [(1, 9), (2, 9), (1, 9)]
    assert [one.responses[0].mask for one in found.prompts] == [(True, False), (True, True), (True, False)]
    assert {one.ids for one in found.prompts} == {(1, 2)}
    everything = load_answered_rows("samples", recording, ONE, min_reward=None, subject="data.train")
    assert len(everything) == 7


def test_the_best_of_n_is_one_response_a_group_by_reward(recording: Path) -> None:
    rows = load_answered_rows("samples", recording, ONE, min_reward=None, best_of_group=True, subject="data.train")
    every = load_answered_rows("samples", recording, ONE, min_reward=None, subject="data.train")
    best: dict[str, float] = {}
    for row in (one["response"] for one in every if one["response"]["reward"] is not None):
        group = row["sample_id"].split("-")[0]
        best[group] = max(best.get(group, -9.0), row["reward"])
    assert {row["response"]["sample_id"].split("-")[0]: row["response"]["reward"] for row in rows} == best
    assert len(rows) == len(best)
    with pytest.raises(UsageError, match=r"the folder of a run's samples, since data\.best_of_group is given"):
        load_answered_rows("t.jsonl", recording, ONE, min_reward=None, best_of_group=True, subject="data.train")


def test_pairs_of_a_recording_are_the_best_and_the_worst_of_a_group(recording: Path) -> None:
    rows = load_answered_rows("samples", recording, PAIR, min_reward=None, subject="data.train")
    assert [(row["chosen"]["sample_id"], row["rejected"]["sample_id"]) for row in rows] == [("g1-1", "g1-0")]


def test_a_recording_with_nothing_to_learn_from_is_refused(recording: Path) -> None:
    with pytest.raises(UsageError, match="none among 7 recorded rows"):
        load_answered_rows("samples", recording, ONE, min_reward=2.0, subject="data.train")
    (recording / "empty").mkdir()
    with pytest.raises(UsageError, match="no rows of table train"):
        load_answered_rows("empty", recording, ONE, min_reward=None, subject="data.train")


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "a", "choosen": "b", "rejected": "c"}\n')
    with pytest.raises(UsageError, match=r"a column 'chosen'.*Rename 'choosen'"):
        load_answered_rows("t.jsonl", tmp_path, PAIR, min_reward=None, subject="data.train")
