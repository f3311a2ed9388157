"""Rewards from a plain script: any kind of scorer, no run, no server."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import rlmq
from rlmq.common.errors import UsageError

SOURCE = """
import time
def correct(completions, answer, **_):
    return [None if a is None else float(c == a) for c, a in zip(completions, answer)]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "a": return 0.25
    out = {"score": 0.5, "pred": solution_str[:3]}
    if len(solution_str) % 2: out["acc"] = True
    return out
def no_score(completions, **_): return [{"acc": 1.0} for _ in completions]
def greedy(completions, **_): return [len(bytearray(1 << 30)) for _ in completions]
class Counting:
    def __init__(self, start): self.made = start
    def __call__(self, completions, **_):
        self.made += 1
        return [self.made for _ in completions]
class Broken:
    def __init__(self): raise ValueError("no such thing")
    def __call__(self, completions, **_): return [1.0]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(SOURCE)
    return tmp_path


def row(response: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": "p", "response": response, **fields}


def test_a_plain_script_gets_totals_and_components(folder: Path) -> None:
    script = """
import json, sys, rlmq
assert "torch" not in sys.modules
rows = [{"prompt": "p", "response": "4", "answer": "4"}, {"prompt": "p", "response": "5", "answer": None}]
items = ["rewards.py:correct", {"function": "rewards.py:Counting", "arguments": {"start": 1}, "weight": 0.5}]
with rlmq.RewardClient(items) as client:
    first, second = client.score(rows), client.score(rows)
assert not {"torch", "redis", "zmq"} & set(sys.modules), sys.modules
print(json.dumps([first.rewards, first.components, second.rewards]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )

    assert ended.returncode == 0, ended.stderr
    first, components, second = json.loads(ended.stdout)
    assert first == [1.0 + 0.5 * 2, 0.5 * 2]
    assert components == {"correct": [1.0, None], "Counting": [2.0, 2.0]}
    assert second == [1.0 + 0.5 * 3, 0.5 * 3]


@pytest.mark.parametrize("reverse", [False, True])
def test_dicts_and_numbers_may_alternate(folder: Path, reverse: bool) -> None:
    rows = [row("x" * n, data_source="ab"[n % 2], reward_model={"ground_truth": "3"}) for n in range(6)]
    rows = rows[::-1] if reverse else rows
    with rlmq.RewardClient(["rewards.py:compute_score"], folder=folder) as client:
        scores = client.score(rows)

    assert scores.rewards == [0.25 if one["data_source"] == "a" else 0.5 for one in rows]
    # what a dict has beside its score is kept, and nothing is made up for the others
    dicts = [one["response"] if one["data_source"] == "b" else None for one in rows]
    expected = [{} if text is None else {"pred": text[:3], "acc": True} for text in dicts]
    assert scores.fields == {"compute_score": expected}


def test_further_fields_are_plain_values(folder: Path) -> None:
    (folder / "odd.py").write_text(
        "import numpy as np\n"
        "def odd(completions, **_):\n"
        "    return [{'score': None, 'n': np.float32(0.5), 'b': np.bool_(True), 'big': 1 << 80,\n"
        "             'nan': float('nan'), 'text': 'x' * 5000, 'many': [1, 2], 3: None, 'int': 7}, 1.0]\n"
    )
    with rlmq.RewardClient(["odd.py:odd"], folder=folder) as client:
        scores = client.score([row("x"), row("y")])

    assert scores.rewards == [None, 1.0]
    plain = {
        "n": 0.5,
        "b": 1.0,
        "big": float(1 << 80),
        "nan": None,
        "text": "x" * 1000,
        "many": "[1, 2]",
        "3": None,
    }
    assert scores.fields == {"odd": [{**plain, "int": 7}, {}]}


def test_a_dict_without_a_score_is_named_with_its_row(folder: Path) -> None:
    with rlmq.RewardClient(["rewards.py:no_score"], folder=folder) as client:
        scores = client.score([row("x")])

    assert scores.rewards == [None]
    assert "no_score: row 0" in scores.reasons[0]
    assert "without 'score'" in scores.reasons[0]


def test_an_ensemble_enters_the_sum_as_its_mean(folder: Path) -> None:
    members = [
        {"function": "rewards.py:Counting", "name": f"m{n}", "arguments": {"start": n}, "ensemble": "e"}
        for n in (1, 4)
    ]
    with rlmq.RewardClient([*members, "rewards.py:correct"], folder=folder) as client:
        scores = client.score([row("4", answer="4")])

    assert scores.components == {"m1": [2.0], "m4": [5.0], "correct": [1.0]}
    assert scores.rewards == [(2.0 + 5.0) / 2 + 1.0]


def test_a_scorer_that_needs_more_memory_than_it_may_has_no_verdict(folder: Path) -> None:
    item = {"function": "rewards.py:greedy", "memory_mb": 512}
    with rlmq.RewardClient([item], folder=folder) as client:
        scores = client.score([row("x")])

    assert scores.rewards == [None]
    assert "MemoryError" in scores.reasons[0]


def test_math_verify_compares_answers_and_its_time_out_is_no_verdict(folder: Path) -> None:
    pytest.importorskip("math_verify")
    cases: list[tuple[str, dict[str, Any], float | None]] = [
        ("The answer is $\\frac{1}{2}$.", {"answer": "0.5"}, 1.0),
        ("so \\boxed{3}", {"answer": 3}, 1.0),
        ("so \\boxed{4}", {"answer": "3"}, 0.0),
        ("no idea", {"answer": "3"}, 0.0),
        ("$x^2+2x+1$", {"solution": "$(x+1)^2$"}, 1.0),
        ("7", {"reward_model": {"ground_truth": "7"}}, 1.0),
        ("7", {}, None),
        ("$9^{9^{9^{9}}}$", {"answer": "3"}, None),
    ]
    with rlmq.RewardClient([{"builtin": "math_verify", "timeout_s": 60.0}], folder=folder) as client:
        scores = client.score([row(response, **fields) for response, fields, _ in cases])

    assert scores.rewards == [expected for _, _, expected in cases]
    assert [reason.partition(" ")[0] for reason in scores.reasons] == ["math_verify:"] * 2
    assert "Timeout" in scores.reasons[1]


def test_reasoning_gym_scores_its_own_entries(folder: Path) -> None:
    import reasoning_gym

    (entry,) = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=3)
    right, wrong = f"so <answer>{entry['answer']}</answer>", "<answer>none</answer>"
    with rlmq.RewardClient([{"builtin": "reasoning_gym", "timeout_s": 60.0}], folder=folder) as client:
        scores = client.score([row(right, **entry), row(wrong, entry=json.dumps(entry)), row("no entry")])

    assert scores.rewards[0] == 1.0
    assert scores.rewards[1] is not None
    assert scores.rewards[1] < 1.0
    assert scores.rewards[2] is None


def test_a_reward_model_scores_the_text_with_its_own_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers on each text alone, without padding."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    words = {word: n for n, word in enumerate(["<pad>", "<unk>", "<user>", "<assistant>", "a", "b", "c"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    config = LlamaConfig(
        vocab_size=7, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, pad_token_id=0, max_position_embeddings=12,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder / "judge-model")
    tokenizer.save_pretrained(folder / "judge-model")
    responses = ["a", "a b c", "b b", "a b c a", "b " * 20]
    item = {"model": "./judge-model", "timeout_s": 60.0, "arguments": {"batch_tokens": 20, "device": "cpu"}}
    with rlmq.RewardClient([item], folder=folder) as client:
        scores = client.score([row(text) for text in responses])

    for text, value in zip(responses[:-1], scores.rewards, strict=False):
        ids = torch.tensor([[2, 1, 3, *(words[word] for word in text.split())]])
        with torch.inference_mode():
            expected = model(input_ids=ids).logits[0, 0].item()
        assert value == pytest.approx(expected, abs=1e-5)
    assert scores.rewards[-1] is None
    assert "more than its 12 positions" in scores.reasons[0]


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ({"function": "rewards.py:correct", "code": "tests"}, "exactly one of"),
        ({"weight": 1.0}, "exactly one of"),
        ({"function": "rewards.py:Broken"}, "no such thing"),
        ({"model": "./nothing"}, "nothing"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder: Path, item: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        rlmq.RewardClient([item], folder=folder)


class Approving(http.server.BaseHTTPRequestHandler):
    """A judge that gives 7 of 10."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"choices": [{"message": {"content": "Score: 7"}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.mark.timeout(200)
def test_a_judge_that_is_down_for_a_while_has_no_verdict_and_then_its_own(cli: Any) -> None:
    # given a run with a judge beside a function, that nobody answers for
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    recipe = cli.folder / "judged.yaml"
    text = cli.tiny.read_text().replace("tiny_", f"{cli.tiny.parent}/tiny_")
    judge = (
        f'{{judge: "http://127.0.0.1:{port}/v1", timeout_s: 3, name: judge, arguments: {{model: m, retries: 1}}}}'
    )
    recipe.write_text(text.replace("timeout_s: 10}]", f"timeout_s: 10}}, {judge}]"))
    up = cli.start("up", recipe, "train.steps=6", "evaluate.every_steps=0", "deterministic=false")
    cli.wait_until(lambda: any((cli.folder / "runs").glob("*/metrics.jsonl")), "the run has begun", 100)
    cli.wait_until(lambda: cli.metrics("tiny") != [], "a step", 60)
    # when it comes back
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Approving) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert up.wait(120) == 0
        server.shutdown()
    # then rows of the first step have no verdict of it, which is no 0, and those of the last one have it
    run = cli.newest_run("tiny")
    rows = pq.read_table(sorted((run / "samples").glob("train-*.parquet"))).to_pylist()
    first, last = ([row for row in rows if row["step"] == step] for step in (1, 6))
    assert first and all(row["reward.judge"] is None and row["reward"] == row["reward.letters"] for row in first)
    assert last and all(row["reward"] == pytest.approx(row["reward.letters"] + 0.7) for row in last)
    # and the log told it
    log = (run / "logs" / "reward-0.log").read_text()
    assert "reward.no_verdict" in log and str(port) in log
