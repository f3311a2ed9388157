"""Engines by name: what is refused before anything starts, and what the message offers instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmq.common.engines.engine_options import NoOptions
from rlmq.common.engines.registry import GENERATION, BuiltIn, EngineRegistry
from rlmq.common.errors import UsageError


def _checked(name: str, folder: Path, *, deterministic: bool = False, **options: Any) -> Any:
    return GENERATION.check(name, options, folder, deterministic=deterministic)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("vlm", r"got 'vlm', expected one of hf, vllm, http.*, or file.py:Class. Did you mean 'vllm'\?"),
        ("sglang", "got 'sglang'.* entry point group rlmq.generation_engines"),
        ("gone.py:Engine", "'gone.py', which is not there"),
    ],
)
def test_an_unknown_engine_is_refused_with_what_there_is(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        _checked(name, tmp_path)


def test_options_are_checked_by_the_engine_that_they_are_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rollout.engine_options.speed: .* Options of hf: none"):
        _checked("hf", tmp_path, speed=9)
    with pytest.raises(UsageError, match=r"rollout.engine_options.url: .* Options of http: url, model"):
        _checked("http", tmp_path)
    with pytest.raises(UsageError, match=r"engine_options.update: got none, in a run that trains"):
        _checked("http", tmp_path, url="http://127.0.0.1:9")
    with pytest.raises(UsageError, match="weights_folder with update: vllm"):
        _checked("http", tmp_path, url="http://127.0.0.1:9", update="vllm")


def test_a_deterministic_run_has_an_engine_that_repeats_itself(tmp_path: Path) -> None:
    _checked("hf", tmp_path, deterministic=True)
    with pytest.raises(UsageError, match="got http with deterministic: true, expected hf"):
        GENERATION.check("http", {"url": "http://h", "update": "none"}, tmp_path, deterministic=True)


def test_a_package_that_is_missing_or_of_another_version_is_refused_with_how_to_get_it(tmp_path: Path) -> None:
    needs = {"absent": ("no_such_module", ">=1", "pip install it"), "old": ("numpy", ">=999", "pip install numpy")}
    registry = EngineRegistry("rollout.engine", "none", {k: BuiltIn("m:C", NoOptions, n) for k, n in needs.items()})
    with pytest.raises(UsageError, match=r"got no package no_such_module here, expected no_such_module >=1\. pip"):
        registry.check("absent", {}, tmp_path, deterministic=False)
    with pytest.raises(UsageError, match=r"got numpy \d.* here, expected numpy >=999. pip install numpy"):
        registry.check("old", {}, tmp_path, deterministic=False)


def test_an_engine_of_a_file_is_found_beside_the_recipe_with_its_options(tmp_path: Path) -> None:
    text = "from rlmq.common.engines.engine_options import HttpOptions\n"
    text += "class Engine:\n    Options = HttpOptions\n    deterministic = True\n"
    (tmp_path / "mine.py").write_text(text)
    made = GENERATION.find("mine.py:Engine", tmp_path)
    assert made.__name__ == "Engine"
    options = {"url": "http://h", "update": "vllm", "weights_folder": "w"}
    checked: Any = GENERATION.check("mine.py:Engine", options, tmp_path, deterministic=True)
    assert checked.url == "http://h"
    with pytest.raises(UsageError, match=r"no function 'Other' in mine\.py"):
        GENERATION.find("mine.py:Other", tmp_path)


def test_a_recipe_is_checked_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rlmq.common.engines.registry import GENERATION;"
        "GENERATION.check('hf', {}, Path('.'), deterministic=True); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, cwd=tmp_path)
