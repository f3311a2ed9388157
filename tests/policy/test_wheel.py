"""A wheel built from the tree works where the tree is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "buffer", "controller", "producers", "consumers")
FORBIDDEN = {
    "pickle": r"\bpickle\b(?!\.find_class)",
    "objects over ZeroMQ": r"\b(recv|send)_pyobj\b",
    "torch.load": r"\btorch\.load\s*\(",
    "object collectives": r"\b\w*(broadcast|gather|scatter)\w*_object(_list)?\s*\(|\ball_gather_object\b",
    "code from a hub": r"trust_remote_code\s*=\s*True",
    "decoders that can run code": r"\b(marshal|shelve|dill|joblib|cloudpickle)\b|allow_pickle\s*=\s*True"
    r"|yaml\.(load|unsafe_load|full_load)(_all)?\s*\(",
    "eval or exec": r"(?<![\w.])(eval|exec)\s*\(",
}


def run(command: Sequence[str], *, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, with `extra` environment, and fail with both outputs."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    environment |= extra
    ended = subprocess.run(
        list(command), cwd=cwd, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without network from a copy of the tree that has nothing but sources."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, tree / name)
    out = tmp_path_factory.mktemp("dist")
    # The hook that pip calls, in the base interpreter: setuptools breaks in an environment with $ in its path.
    build = f"import setuptools.build_meta as hook; hook.build_wheel({str(out)!r})"
    base = getattr(sys, "_base_executable", sys.executable)
    run([base, "-c", build], cwd=tree, PYTHONPATH=sysconfig.get_path("purelib"))
    return next(out.glob("rlmq-*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel: it sees this one's packages, but not the editable rlmq in it."""
    folder = tmp_path_factory.mktemp("venv") / "env"
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=Path("/"))
    python = folder / "bin" / "python"
    site = run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], cwd=Path("/")
    ).stdout.strip()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "install", "--no-deps", "--no-index"]
    run([*pip, "--target", site, str(wheel)], cwd=Path("/"))
    # A plain path line: the .pth files in that folder, the editable install's among them, are not read.
    (Path(site) / "neighbours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    expected = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".lua", ".j2") or path.name == "py.typed":
                place = path.relative_to(ROOT)
                inside = place.relative_to("common/api") if place.parts[:2] == ("common", "api") else place
                expected.add(f"rlmq/{inside.as_posix()}")

    found = {name for name in names_in(wheel) if ".dist-info/" not in name}

    assert found == expected


def test_the_wheel_holds_the_redis_functions_and_the_typing_marker(wheel: Path) -> None:
    names = names_in(wheel)

    assert "rlmq/py.typed" in names
    assert any(re.fullmatch(r"rlmq/buffer/functions/\w+\.lua", name) for name in names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.parametrize("construct", list(FORBIDDEN))
def test_no_file_of_the_wheel_uses_what_can_run_code_from_data(wheel: Path, construct: str) -> None:
    pattern = re.compile(FORBIDDEN[construct])
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py"):
                lines = archive.read(name).decode("utf-8").splitlines()
                found += [f"{name}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if pattern.search(line)]

    assert not found, "\n".join(found)


def test_import_is_quick_and_without_torch(python: Path) -> None:
    code = (
        "import sys, time; t = time.monotonic(); import rlmq; s = time.monotonic() - t; "
        "print(s, rlmq.__file__, bool({'torch', 'transformers'} & set(sys.modules)))"
    )

    runs = [run([str(python), "-c", code], cwd=Path("/")).stdout.split() for _ in range(3)]

    assert all(place.startswith(str(python.parents[1])) for _, place, _ in runs), "the editable rlmq was imported"
    assert all(torch == "False" for _, _, torch in runs)
    assert min(float(seconds) for seconds, _, _ in runs) < 1.0


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_answers_from_any_folder_without_torch(python: Path, option: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['rlmq', {option!r}]\n"
        "try:\n    runpy.run_module('rlmq.cli', run_name='__main__')\n"
        "except SystemExit as end:\n    code = end.code or 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(code)"
    )

    ended = run([str(python), "-c", code], cwd=Path("/"))

    assert "rlmq" in ended.stdout


def test_the_redis_functions_can_be_read_from_the_installed_wheel(python: Path) -> None:
    code = (
        "from importlib.resources import files; "
        "print(sum(f.name.endswith('.lua') for f in files('rlmq.buffer').joinpath('functions').iterdir()))"
    )

    ended = run([str(python), "-c", code], cwd=Path("/"))

    assert int(ended.stdout) > 0
