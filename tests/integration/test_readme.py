"""The README's first own experiment, exactly as printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_FILE = re.compile(r"^`(first/[\w.]+)`.*?\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(600)
def test_the_first_own_experiment_works_as_printed(cli: Any, tmp_path: Path) -> None:
    # given a checkout (the parts that the text uses) with the three files of the README
    readme = (cli.root / "README.md").read_text()
    files = _FILE.findall(readme)
    assert [name for name, _ in files] == ["first/train.jsonl", "first/rewards.py", "first/recipe.yaml"]
    assert sum(len(text.splitlines()) for name, text in files if not name.endswith("jsonl")) <= 24
    (tmp_path / "recipes").symlink_to(cli.root / "recipes")
    (tmp_path / "first").mkdir()
    for name, text in files:
        (tmp_path / name).write_text(text)
    # when the commands of the README are given
    [commands] = [text for text in _SHELL.findall(readme) if "first/recipe.yaml" in text]
    for line in commands.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == ".venv/bin/rlmq"
        done = subprocess.run(
            [sys.executable, "-m", "rlmq.cli", *words[1:]],
            cwd=tmp_path,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        # then each ends well
        assert done.returncode == 0, done.stdout + done.stderr
    assert cli.summary("opposites")["steps"] == 6
    assert (cli.newest_run("opposites") / "reward.png").is_file()
