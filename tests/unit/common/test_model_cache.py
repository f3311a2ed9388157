"""Models made on this machine: once, whole, and with a named holder when waiting takes too long."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from rlmq.common.errors import DeadlineExceeded, DependencyError
from rlmq.common.model_cache import file_lock, make_once

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLMQ_CACHE", str(tmp_path / "cache"))


def _build_and_count(target: Path) -> None:
    (target / "weights").write_text("whole")
    with (Path(os.environ["RLMQ_CACHE"]).parent / "built").open("a") as log:
        log.write("x")
    time.sleep(0.3)  # long enough for the others to come


def _make(results: str) -> None:
    folder = make_once("m", _build_and_count)
    (Path(results) / str(os.getpid())).write_text((folder / "weights").read_text())


def test_several_processes_build_once_and_all_see_it_whole(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    processes = [SPAWN.Process(target=_make, args=(str(results),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert [path.read_text() for path in results.iterdir()] == ["whole"] * 4
    assert (tmp_path / "built").read_text() == "x"


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        make_once("m", fail)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".m.lock"]
    assert (make_once("m", lambda target: (target / "weights").touch()) / "weights").exists()


def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "cache" / "models" / ".m.tmp-123"
    left.mkdir(parents=True)
    make_once("m", lambda target: (target / "weights").touch())
    assert not left.exists()


def test_waiting_for_a_lock_ends_with_the_holders_process_id(tmp_path: Path) -> None:
    with (
        file_lock(tmp_path / "l", timeout_s=1, purpose="first"),
        pytest.raises(DeadlineExceeded, match=rf"second: got lock .* held by process {os.getpid()}"),
        file_lock(tmp_path / "l", timeout_s=0.2, purpose="second"),
    ):
        pass


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), file_lock(tmp_path / "l", timeout_s=1, purpose="first"):
        raise ValueError("x")
    with file_lock(tmp_path / "l", timeout_s=0.2, purpose="second"):
        pass


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLMQ_CACHE", str(tmp_path / "file"))
    with pytest.raises(DependencyError, match="RLMQ_CACHE"):
        make_once("m", lambda target: None)
