"""Set-up: pins that agree with what the code needs, one clear message, any checkout path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FILES = ("Makefile", "pyproject.toml", "requirements.txt", "deploy/setup.sh")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Package → version, from requirements.txt and, for the two that are installed apart, deploy/setup.sh."""
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    exact = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    script = (ROOT / "deploy" / "setup.sh").read_text("utf-8")
    exact["torch"] = re.findall(r"^torch_version=(\S+)$", script, flags=re.MULTILINE)[0]
    return {normal(name): version for name, version in exact.items()}


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["embedded"], *extras["demo"], *extras["dev"]]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_what_the_code_needs_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    version = pins().get(normal(requirement.name))

    assert version is not None, "not in requirements.txt"
    assert requirement.specifier.contains(version)


def test_every_requirement_is_exact() -> None:
    lines = [x for x in (ROOT / "requirements.txt").read_text("utf-8").splitlines() if x and not x.startswith("#")]

    loose = [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]

    assert not loose


@pytest.fixture
def odd_checkout(tmp_path: Path) -> Path:
    """The files that set-up reads, in a folder whose name tries make, shells and format strings."""
    checkout = tmp_path / """it's a "100 %" pfäd $x #1"""
    for name in FILES:
        target = checkout / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return checkout


@pytest.mark.parametrize("target", ["demo", "test", "bench", "docs", "freeze"])
def test_make_commands_hold_no_absolute_path(odd_checkout: Path, target: str) -> None:
    outside_make = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    ended = subprocess.run(
        ["make", "-n", target],
        cwd=odd_checkout,
        env=outside_make,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert "sh deploy/setup.sh" in ended.stdout
    assert "pfäd" not in ended.stdout


def test_without_a_fitting_python_set_up_says_what_to_do(odd_checkout: Path, tmp_path: Path) -> None:
    # given a PATH with make and a shell only
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("make", "sh"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)

    ended = subprocess.run(
        ["make", "setup"],
        cwd=odd_checkout,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert ended.returncode != 0
    assert "got none, expected 3.11 or newer" in ended.stderr
    assert "PYTHON=" in ended.stderr


def test_a_folder_that_venv_refuses_is_named(tmp_path: Path) -> None:
    checkout = tmp_path / "a:b"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()

    ended = subprocess.run(
        ["sh", str(ROOT / "deploy" / "setup.sh")],
        cwd=checkout,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert ended.returncode == 3
    assert "a:b, expected a path without a colon" in ended.stderr
    assert not (checkout / ".venv").exists()
