"""Processes that do not compute never import torch, neither directly nor through anything that they import."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "matplotlib")


def light_modules() -> list[str]:
    """Modules that run in the controller, the reward workers, the recorder or the command."""
    modules = ["rlmq", "rlmq.common.worker", "rlmq.common.columns"]
    patterns = {
        "rlmq": "common/api/**/*.py",
        "rlmq.controller": "controller/**/*.py",
        "rlmq.buffer": "buffer/**/*.py",
        "rlmq.producers": "producers/reward*.py",
        "rlmq.consumers": "consumers/recorder*.py",
        "rlmq.common.recipe": "common/recipe/*.py",
        "rlmq.common.algorithms": "common/algorithms/*.py",
    }
    for package, pattern in patterns.items():
        base = ROOT.joinpath(*pattern.split("*", maxsplit=1)[0].rpartition("/")[0].split("/"))
        for path in sorted(ROOT.glob(pattern)):
            parts = path.relative_to(base).with_suffix("").parts
            modules.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return modules


def imported(source: str) -> Iterator[str]:
    """Modules that a source file imports, anywhere in it; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("module", light_modules())
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import importlib, sys; importlib.import_module({module!r}); print(*set(sys.modules) & set({HEAVY!r}))"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 0, ended.stderr
    assert not ended.stdout.split(), f"{module} imports {ended.stdout.strip()}"


def test_every_package_folder_is_listed_for_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"])
    found = set()
    for package in ("common", "buffer", "controller", "producers", "consumers"):
        for init in (ROOT / package).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join(["rlmq", *(parts[2:] if parts[:2] == ("common", "api") else parts)]))

    assert found == listed


def test_no_lower_layer_imports_the_top_one() -> None:
    allowed = ("rlmq.common", "rlmq.buffer", "rlmq.controller", "rlmq.producers", "rlmq.consumers")
    found = []
    for package in ("common", "buffer", "controller", "producers", "consumers"):
        for path in (ROOT / package).rglob("*.py"):
            if path.is_relative_to(ROOT / "common" / "api"):
                continue
            for module in imported(path.read_text("utf-8")):
                if module.split(".")[0] == "rlmq" and not module.startswith(allowed):
                    found.append(f"{path.relative_to(ROOT)} imports {module}")

    assert not found
