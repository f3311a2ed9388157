"""Which run a command means, and what happens when its folder cannot be used."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlmq.common.errors import DependencyError, RlmqError, SecondController, UsageError
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import Recipe
from rlmq.common.run_folder import RunFolder
from rlmq.controller.runs import find_run, folder_error, name_lock, next_run, open_run, read_summary, run_stem

ODD_NAMES = ["n" * 80, "n" * 200, "with space", "ä", "it's", 'a"b', "100%", "-x", "日本", "a\\b"]


def recipe(folder: Path, name: str = "b", **changed: object) -> Recipe:
    train = {"steps": 3, **changed}
    return Recipe.model_validate(
        {
            "run": {"name": name, "folder": str(folder / "runs")},
            "model": "m",
            "data": {"train": "t.jsonl"},
            "reward": ({"function": "r.py:score"},),
            "train": train,
        }
    )


def finish(run: RunFolder, code: int = 0, steps: int = 3) -> None:
    run.summary.write_text(json.dumps({"exit": code, "steps": steps, "eval_before": {"a": 0.5}}))


def test_a_first_run_gets_ordinal_1_and_its_resolved_recipe(tmp_path: Path) -> None:
    opened = open_run(recipe(tmp_path))

    assert (opened.run.run_id, opened.state) == ("b-1", "new")
    assert load_recipe(opened.run.recipe).recipe == recipe(tmp_path)


def test_the_same_recipe_continues_an_unfinished_run(tmp_path: Path) -> None:
    first = open_run(recipe(tmp_path))

    again = open_run(recipe(tmp_path))

    assert (again.run, again.state) == (first.run, "continued")


def test_fresh_takes_the_next_ordinal(tmp_path: Path) -> None:
    for _ in range(10):
        open_run(recipe(tmp_path), fresh=True)

    assert open_run(recipe(tmp_path), fresh=True).run.run_id == "b-11"
    assert open_run(recipe(tmp_path)).run.run_id == "b-11"


def test_a_finished_run_stays_finished(tmp_path: Path) -> None:
    first = open_run(recipe(tmp_path))
    finish(first.run)

    again = open_run(recipe(tmp_path))

    assert again.state == "finished"
    assert read_summary(first.run)["exit"] == 0


def test_a_drained_run_goes_on(tmp_path: Path) -> None:
    first = open_run(recipe(tmp_path))
    finish(first.run)
    first.run.summary.write_text(json.dumps(read_summary(first.run) | {"steps_end": "drain"}))

    assert open_run(recipe(tmp_path)).state == "continued"


@pytest.mark.parametrize("code", [130, 143, 2, 5])
def test_a_run_that_ended_otherwise_is_continued(tmp_path: Path, code: int) -> None:
    finish(open_run(recipe(tmp_path)).run, code)

    assert open_run(recipe(tmp_path)).state == "continued"


def test_more_steps_continue_a_finished_run_that_is_then_unfinished(tmp_path: Path) -> None:
    first = open_run(recipe(tmp_path))
    finish(first.run)

    grown = open_run(recipe(tmp_path, steps=6))
    after_a_crash = open_run(recipe(tmp_path, steps=6))

    assert (grown.run, grown.state) == (first.run, "continued")
    assert after_a_crash.state == "continued"
    assert read_summary(first.run)["eval_before"] == {"a": 0.5}


def test_a_changed_recipe_is_refused_with_the_difference_and_changes_nothing(tmp_path: Path) -> None:
    first = open_run(recipe(tmp_path, lr=1.0e-4))
    before = first.run.recipe.read_text()

    with pytest.raises(UsageError, match=r"train\.lr: 0\.0001 -> 5e-05") as refused:
        open_run(recipe(tmp_path, lr=5.0e-5))

    assert "--fresh" in str(refused.value)
    assert first.run.recipe.read_text() == before


def test_a_changed_recipe_is_welcome_in_a_fresh_run(tmp_path: Path) -> None:
    open_run(recipe(tmp_path, lr=1.0e-4))

    assert open_run(recipe(tmp_path, lr=5.0e-5), fresh=True).run.run_id == "b-2"


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_work_and_are_found_again(tmp_path: Path, name: str) -> None:
    first = open_run(recipe(tmp_path, name))

    again = open_run(recipe(tmp_path, name))

    assert again.run == first.run
    assert first.run.path.parent == tmp_path / "runs"
    assert find_run(tmp_path / "runs", name) == first.run
    assert len(str(first.run.sockets / "doorbell").encode()) < 100


def test_different_names_never_share_a_run(tmp_path: Path) -> None:
    names = [*ODD_NAMES, "n" * 100 + "a", "n" * 100 + "b", "with_space", "a b", "a_b", "b", "b-1"]

    runs = [open_run(recipe(tmp_path, name)).run for name in names]

    assert len({run.path for run in runs}) == len(names)
    assert len({run.sockets for run in runs}) == len(names)
    assert all(run_stem(name).isascii() for name in names)


def test_runs_in_folders_whose_first_100_characters_agree_have_their_own_sockets(tmp_path: Path) -> None:
    base = tmp_path / ("long " * 20 + "ä'%")
    one, two = (open_run(recipe(base / leaf)).run for leaf in ("one", "two"))

    assert str(one.path)[:100] == str(two.path)[:100]
    assert one.sockets != two.sockets
    assert len(str(one.sockets).encode()) < 80


def test_next_run_names_the_run_without_making_it(tmp_path: Path) -> None:
    assert next_run(recipe(tmp_path), fresh=False).run_id == "b-1"
    assert not (tmp_path / "runs").exists()


def test_the_newest_run_is_the_default_of_reading_commands(tmp_path: Path) -> None:
    open_run(recipe(tmp_path, "one"))
    two = open_run(recipe(tmp_path, "two")).run

    assert find_run(tmp_path / "runs").run_id == two.run_id
    with pytest.raises(UsageError, match="two-1, one-1"):
        find_run(tmp_path / "runs", "three")


def test_a_second_start_of_a_name_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with (
        name_lock(recipe(tmp_path)),
        pytest.raises(SecondController, match="another `rlmq up`") as refused,
        name_lock(recipe(tmp_path)),
    ):
        pass

    assert refused.value.exit_code == 4
    with name_lock(recipe(tmp_path)), name_lock(recipe(tmp_path, "other")):
        pass


LOCKS = """
import sys, time, pathlib
sys.path.insert(0, sys.argv[2])
from test_runs import recipe
from rlmq.controller.runs import name_lock
with name_lock(recipe(pathlib.Path(sys.argv[1]))):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_the_kernel_frees_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCKS, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(SecondController, match=str(holder.pid)), name_lock(recipe(tmp_path)):
        pass

    holder.kill()
    holder.wait()

    with name_lock(recipe(tmp_path)):
        pass
    holder.stdout.close()


@pytest.mark.parametrize("in_the_way", ["runs", "runs/b-1", "runs/b-1/logs"])
def test_a_file_in_the_path_of_the_run_folder_is_one_message(tmp_path: Path, in_the_way: str) -> None:
    path = tmp_path / in_the_way
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    wanted = recipe(tmp_path)

    def start() -> None:
        with name_lock(wanted):
            opened = open_run(wanted)
            if in_the_way == "runs/b-1":  # the ordinal is taken, by whatever it is
                assert opened.run.run_id == "b-2"
                return
            assert opened.run.run_id == "b-2"

    if in_the_way == "runs":
        with pytest.raises(UsageError, match=f"a file at {path}") as refused:
            start()
        assert refused.value.exit_code == 2
    else:
        start()


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, DependencyError, "disk full"),
        (errno.EDQUOT, DependencyError, "disk full"),
        (errno.EROFS, DependencyError, "Read-only file system"),
        (errno.EACCES, DependencyError, "Permission denied"),
        (errno.ENAMETOOLONG, UsageError, "File name too long"),
        (errno.ENOTDIR, UsageError, "a file at"),
    ],
)
def test_errors_of_the_operating_system_are_told_with_a_remedy(
    number: int, kind: type[RlmqError], words: str, tmp_path: Path
) -> None:
    error = folder_error(OSError(number, "", str(tmp_path / "x")), tmp_path)

    assert isinstance(error, kind)
    assert words in str(error)
    assert error.remedy


def test_a_folder_that_takes_no_files_is_one_message() -> None:
    wanted = recipe(Path("/proc"))

    with pytest.raises(RlmqError, match=r"run\.folder /proc/runs"), name_lock(wanted):
        pass
