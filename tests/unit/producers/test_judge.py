"""The judge against a real HTTP server in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlmq.common.errors import UsageError
from rlmq.common.recipe.reward_block import RewardBlock
from rlmq.producers.judge import Judge
from rlmq.producers.process_runner import ProcessRewardRunner
from rlmq.producers.reward_runner import RewardRow
from rlmq.producers.reward_values import NoVerdict

# Answers with the number of characters of the question's last line; the plan file says which statuses come first.
SERVER = """
import http.server, json, pathlib, sys, threading, time
lock = threading.Lock()
folder = pathlib.Path(sys.argv[1])
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with lock:
            with (folder / "asked.jsonl").open("a") as file:
                told = {"path": self.path, "key": self.headers["authorization"], "at": time.monotonic(), **asked}
                file.write(json.dumps(told) + "\\n")
            plan = json.loads((folder / "plan.json").read_text())
            status = plan.pop(0) if plan else 200
            (folder / "plan.json").write_text(json.dumps(plan))
        length = len(asked["messages"][0]["content"].splitlines()[-1])
        text = "I am not sure." if status == 201 else f"Score: 3 at first.\\nScore: {length}"
        body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(status)
        if status == 429: self.send_header("retry-after", "1")
        if status == 599:
            self.close_connection = True
            return self.connection.shutdown(2)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


class Endpoint:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}/v1"
        self.judges: list[Judge] = []
        self.plan()

    def plan(self, *statuses: int) -> None:
        (self.folder / "plan.json").write_text(json.dumps(statuses))

    @property
    def asked(self) -> list[dict[str, Any]]:
        path = self.folder / "asked.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    argv = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        made = Endpoint(tmp_path, int(process.stdout.readline()))
        yield made
        for one in made.judges:
            one.close()
        process.kill()


def judge(endpoint: Endpoint, **arguments: Any) -> Judge:
    given = {"timeout_s": 20.0, "model": "m", "prompt": "{prompt} {style}\n{response}", **arguments}
    endpoint.judges.append(Judge(endpoint.url, folder=endpoint.folder, **given))
    return endpoint.judges[-1]


def test_the_last_number_of_its_answer_counts(endpoint: Endpoint) -> None:
    values = judge(endpoint)(["why", "how"], ["12345", "{style}"], style=["short", "long"])

    assert values == [0.5, 0.7]
    first = next(one for one in endpoint.asked if one["messages"][0]["content"].startswith("why"))
    assert first["path"] == "/v1/chat/completions"
    assert (first["model"], first["temperature"]) == ("m", 0)
    assert first["messages"][0]["content"] == "why short\n12345"


def test_a_busy_endpoint_is_asked_again(endpoint: Endpoint) -> None:
    endpoint.plan(503, 429)

    assert judge(endpoint)(["p"], ["1234"]) == [0.4]
    assert len(endpoint.asked) == 3


def test_it_asks_no_faster_than_it_may_and_waits_as_it_is_told(endpoint: Endpoint) -> None:
    began = time.monotonic()
    assert judge(endpoint, requests_per_s=10.0)(["p"] * 4, ["1234"] * 4) == [0.4] * 4
    assert time.monotonic() - began >= 0.3
    endpoint.plan(429)

    assert judge(endpoint)(["p"], ["12345"]) == [0.5]
    refused, answered = (one["at"] for one in endpoint.asked[-2:])
    assert answered - refused >= 0.95


def test_a_connection_that_breaks_is_tried_again(endpoint: Endpoint) -> None:
    endpoint.plan(599)

    assert judge(endpoint)(["p"], ["1234"]) == [0.4]
    assert len(endpoint.asked) == 2


def test_a_judge_that_stays_busy_has_no_verdict_within_its_time(endpoint: Endpoint) -> None:
    endpoint.plan(*[503] * 50)

    values = judge(endpoint, retries=40, timeout_s=2.0)(["p", "q"], ["1234", "1"])

    assert all(isinstance(value, NoVerdict) and "HTTP 503" in value.reason for value in values)
    assert 4 <= len(endpoint.asked) < 40  # pauses double, and the time ends them


def test_a_refused_request_is_not_sent_again(endpoint: Endpoint) -> None:
    endpoint.plan(400)

    (value,) = judge(endpoint)(["p"], ["1234"])

    assert isinstance(value, NoVerdict)
    assert "HTTP 400" in value.reason
    assert len(endpoint.asked) == 1


def test_an_answer_without_a_number_is_no_verdict(endpoint: Endpoint) -> None:
    endpoint.plan(201)

    (value,) = judge(endpoint, cache="kept")(["p"], ["1234"])

    assert isinstance(value, NoVerdict)
    assert "I am not sure" in value.reason
    assert list((endpoint.folder / "kept").iterdir()) == []


def test_the_same_content_is_asked_about_once(endpoint: Endpoint) -> None:
    assert judge(endpoint, cache="kept")(["p"], ["1234"]) == [0.4]
    assert judge(endpoint, cache="kept")(["p", "q"], ["1234", "1234"]) == [0.4, 0.4]
    assert len(endpoint.asked) == 2
    assert judge(endpoint, cache="kept", model="other")(["p"], ["1234"]) == [0.4]
    assert len(endpoint.asked) == 3


def test_the_key_comes_from_the_environment(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="JUDGE_KEY"):
        judge(endpoint, key_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "abc")

    judge(endpoint, key_env="JUDGE_KEY")(["p"], ["1234"])

    assert endpoint.asked[0]["key"] == "Bearer abc"


def test_a_judge_that_is_down_has_no_verdict_and_says_so(tmp_path: Path) -> None:
    block = RewardBlock(judge="http://127.0.0.1:9/v1", timeout_s=4.0, arguments={"model": "m", "retries": 1})
    runner = ProcessRewardRunner(block, "judge", tmp_path)
    try:
        verdicts = runner.score([RewardRow("p", "r", {}), RewardRow("p", "s", {})])
    finally:
        runner.close()

    assert verdicts.values == [None, None]
    assert not verdicts.timed_out
    assert "judge: no answer from http://127.0.0.1:9/v1/chat/completions: ConnectError" in verdicts.notes[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [({"model": "m", "pattern": "("}, "pattern"), ({}, "model"), ({"model": "m", "colour": 1}, "colour")],
)
def test_a_wrong_argument_is_named(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        ProcessRewardRunner(RewardBlock(judge="http://x/v1", arguments=arguments), "judge", tmp_path)
