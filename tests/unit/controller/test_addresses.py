"""The address of a run's server, and the mark by which a shared server knows the run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rlmq.common.errors import DecodeError, DependencyError, UsageError
from rlmq.common.recipe.schema import ControlBlock, Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.addresses import claim_home, control_of, server_url, write_addresses


def run_in(folder: Path) -> RunFolder:
    path = folder / "b-1"
    path.mkdir(parents=True)
    return RunFolder(path)


def recipe(url: str | None) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "b"},
            "model": "m",
            "data": {"train": "t.jsonl"},
            "reward": ({"function": "r.py:score"},),
            "train": {"steps": 3},
            "redis": {"url": url},
        }
    )


def test_the_recipes_server_comes_before_the_runs(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    write_addresses(run, "unix:///x")

    assert server_url(recipe(None), run) == "unix:///x"
    assert server_url(recipe("redis://y"), run) == "redis://y"


def test_a_run_without_a_server_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match="rlmq up"):
        server_url(recipe(None), run_in(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"redis": 3}'])
def test_a_damaged_file_is_an_integrity_error(tmp_path: Path, text: str) -> None:
    run = run_in(tmp_path)
    run.addresses.write_text(text)

    with pytest.raises(DecodeError, match=r"addresses\.json"):
        server_url(recipe(None), run)


@pytest.mark.parametrize(
    ("listens", "reached"),
    [
        ("tcp://0.0.0.0:5555", f"tcp://{socket.gethostname()}:5555"),
        ("tcp://*:5555", f"tcp://{socket.gethostname()}:5555"),
        ("tcp://10.0.0.3:5555", "tcp://10.0.0.3:5555"),
        (None, None),
    ],
)
def test_workers_elsewhere_find_the_controllers_machine(
    tmp_path: Path, listens: str | None, reached: str | None
) -> None:
    run = run_in(tmp_path)
    control = ControlBlock(address=listens, keys="k")

    write_addresses(run, "unix:///x", control)

    assert control_of(recipe(None).model_copy(update={"control": control}), run).address == reached


def test_a_run_that_comes_back_finds_its_mark(tmp_path: Path, redis_url: str) -> None:
    run = run_in(tmp_path)

    for _ in range(2):
        write_addresses(run, redis_url)
        claim_home(run, redis_url)


def test_another_folder_with_the_same_run_id_is_refused_on_a_shared_server(tmp_path: Path, redis_url: str) -> None:
    one, two = run_in(tmp_path / "one"), run_in(tmp_path / "two")
    write_addresses(one, redis_url)
    write_addresses(two, redis_url)
    claim_home(one, redis_url)

    with pytest.raises(UsageError, match="another run with this id") as refused:
        claim_home(two, redis_url)

    assert "--fresh" in str(refused.value)
