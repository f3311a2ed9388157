"""Every mistake gets one message (subject, got, expected, what to do), its exit code, and no process left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

USAGE, DEPENDENCY = 2, 3


@pytest.fixture
def recipe(cli: Any, tmp_path: Path) -> Path:
    """The tiny recipe beside data and rewards that a test may spoil."""
    rows = [{"prompt": f"Say {word}: ", "answer": word} for word in ("one", "two", "three", "four")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def length(completions, **_):\n    return [len(c) / 8 for c in completions]\n"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
run: {{name: own}}
model: {cli.root}/recipes/tiny_model.py:folder
data: {{train: train.jsonl, prompts_per_step: 2, max_prompt_tokens: 64}}
algorithm: {{name: grpo, group_size: 2}}
rollout: {{max_response_tokens: 8}}
reward: [{{function: "rewards.py:length", timeout_s: 2}}]
train: {{steps: 2, lr: 1.0e-3}}
"""
    )
    return path


def refused(cli: Any, code: int, *words: str, args: tuple[Any, ...]) -> str:
    """The command ends with the code and one message that holds the words."""
    done = cli.run(*args)
    assert done.code == code, done.text
    assert "Traceback" not in done.text
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.text
    for word in words:
        assert word in done.err, (word, done.err)
    assert not cli.processes()
    return str(done.err)


def test_the_recipe_as_it_is_works(cli: Any, recipe: Path) -> None:
    done = cli.run("up", recipe)
    assert done.code == 0, done.text


def test_unknown_key(cli: Any, recipe: Path) -> None:
    for verb in ("check", "up"):
        refused(cli, USAGE, "train.warmup_step", "warmup_steps", args=(verb, recipe, "train.warmup_step=1"))


def test_wrong_type(cli: Any, recipe: Path) -> None:
    refused(cli, USAGE, "train.lr", "fast", args=("up", recipe, "train.lr=fast"))


def test_no_recipe(cli: Any, tmp_path: Path) -> None:
    refused(cli, USAGE, "none.yaml", args=("up", tmp_path / "none.yaml"))


@pytest.mark.parametrize("model", ["./missing", "someone/not-here", "nowhere.py:folder"])
def test_missing_model(cli: Any, recipe: Path, model: str) -> None:
    refused(cli, USAGE, model.split(":")[0].lstrip("./"), args=("up", recipe, f"model={model}"))


def test_missing_data_file(cli: Any, recipe: Path) -> None:
    for verb in ("check", "up"):
        refused(cli, USAGE, "other.jsonl", args=(verb, recipe, "data.train=other.jsonl"))


def test_missing_prompt_column(cli: Any, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    refused(cli, USAGE, "prompt", "question", args=("up", recipe))


def test_empty_data(cli: Any, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    refused(cli, USAGE, "train.jsonl", args=("up", recipe))


def test_missing_reward_function(cli: Any, recipe: Path) -> None:
    for verb in ("check", "up"):
        refused(cli, USAGE, "rewards.py", "correct", args=(verb, recipe, "reward.0.function=rewards.py:correct"))


def test_missing_column_of_a_reward_function(cli: Any, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def length(completions, solution):\n    return [1.0 for _ in completions]\n"
    )
    refused(cli, USAGE, "length", "solution", args=("up", recipe))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("raise ValueError('the judge is ill')", "the judge is ill"),
        ("import time; time.sleep(60)", "2"),
        ("return [float('nan') for _ in completions]", "nan"),
        ("return [1.0]", "expected 4"),
        ("import os; os._exit(9)", "9"),
    ],
    ids=["raises", "hangs", "nan", "wrong length", "exits"],
)
def test_a_reward_function_that_never_gives_a_verdict(
    cli: Any, recipe: Path, tmp_path: Path, body: str, word: str
) -> None:
    (tmp_path / "rewards.py").write_text(f"def length(completions, **_):\n    {body}\n")
    text = refused(cli, USAGE, "no verdict", "length", args=("up", recipe))
    assert word in text.lower()


def test_a_prompt_longer_than_allowed(cli: Any, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "x" * 100}) + "\n")
    refused(cli, USAGE, "max_prompt_tokens", "64", args=("up", recipe))


def test_a_prompt_longer_than_the_models_context(cli: Any, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "x" * 5000}) + "\n")
    refused(cli, USAGE, "context", args=("up", recipe, "data.max_prompt_tokens=6000"))


def test_redis_that_is_not_there(cli: Any, recipe: Path) -> None:
    refused(cli, DEPENDENCY, "redis", "127.0.0.1:1", args=("up", recipe, "redis.url=redis://127.0.0.1:1"))


@contextmanager
def not_redis() -> Iterator[int]:
    """A server that answers everything with an HTTP error; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1024)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1])


def test_a_server_that_is_no_redis(cli: Any, recipe: Path) -> None:
    with not_redis() as port:
        refused(cli, DEPENDENCY, str(port), args=("up", recipe, f"redis.url=redis://127.0.0.1:{port}"))


def test_a_file_where_the_run_folder_should_be(cli: Any, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = cli.run("up", recipe, f"run.folder={tmp_path}/taken")
    assert done.code in (USAGE, DEPENDENCY), done.text
    assert "taken" in done.err
    assert "Traceback" not in done.text
    assert not cli.processes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB, which the test may fill or make read-only."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(mount)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_run_folder_on_a_read_only_file_system(cli: Any, recipe: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = cli.run("up", recipe, f"run.folder={small_disk}/runs")
    assert done.code in (USAGE, DEPENDENCY), done.text
    assert str(small_disk) in done.err.replace("\n", "")
    assert "Traceback" not in done.text
    assert not cli.processes()


def test_a_disk_that_is_full(cli: Any, recipe: Path, small_disk: Path) -> None:
    # given room for the logs, not for a checkpoint
    done = cli.run("up", recipe, f"run.folder={small_disk}/runs", "train.steps=50", "checkpoint.every_steps=1")
    assert done.code == DEPENDENCY, done.text
    assert "Traceback" not in done.text
    assert not cli.processes()


def test_a_socket_that_is_in_use(cli: Any, recipe: Path, tmp_path: Path) -> None:
    # given a folder where the first run's control socket would be
    import hashlib

    run = tmp_path / "runs" / "own-1"
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    places = [Path(f"/run/user/{os.getuid()}"), Path("/tmp")]
    folder = next(p for p in places if os.access(p, os.W_OK)) / f"rlmq-{os.getuid()}-{digest}"
    (folder / "doorbell").mkdir(parents=True)
    try:
        done = cli.run("up", recipe)
        assert done.code == DEPENDENCY, done.text
        assert "doorbell" in done.err
        assert "Traceback" not in done.text
    finally:
        if (folder / "doorbell").is_dir():
            (folder / "doorbell").rmdir()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
