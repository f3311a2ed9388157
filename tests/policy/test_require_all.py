"""RLMQ_REQUIRE_ALL turns unlisted skips into failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
LISTED = "text\n\n## Skips that are allowed\n\n* `test_listed.py::*`: no GPU\n\n## Other\n\n* `test_x.py::*`: no\n"


def run_pytest(folder: Path, source: str, *, name: str, required: bool) -> subprocess.CompletedProcess[str]:
    """A pytest process of its own over one test file, with the plugin and a list that allows test_listed.py."""
    plugin = folder / "plugin"
    plugin.mkdir()
    (plugin / "require_all.py").write_text((TESTS / "require_all.py").read_text("utf-8"), "utf-8")
    (plugin / "README.md").write_text(LISTED, "utf-8")
    (folder / name).write_text(source, "utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
    environment = os.environ | {"PYTHONPATH": str(plugin), "RLMQ_REQUIRE_ALL": "1" if required else "0"}
    command = [sys.executable, "-m", "pytest", "-p", "require_all", "-q", "-p", "no:cacheprovider", name]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


SKIPS = {
    "call": "import pytest\ndef test_a(): pytest.skip('no server')\n",
    "mark": "import pytest\n@pytest.mark.skip(reason='no server')\ndef test_a(): pass\n",
    "module": "import pytest\npytest.skip('no server', allow_module_level=True)\ndef test_a(): pass\n",
    "fixture": "import pytest\n@pytest.fixture\ndef f(): pytest.skip('no server')\ndef test_a(f): pass\n",
}


@pytest.mark.parametrize("source", SKIPS.values(), ids=SKIPS.keys())
def test_an_unlisted_skip_fails_when_everything_is_required(tmp_path: Path, source: str) -> None:
    ended = run_pytest(tmp_path, source, name="test_own.py", required=True)

    assert ended.returncode != 0, ended.stdout
    assert "no server" in ended.stdout
    assert "tests/README.md" in ended.stdout


def test_the_same_skip_is_a_skip_otherwise(tmp_path: Path) -> None:
    ended = run_pytest(tmp_path, SKIPS["call"], name="test_own.py", required=False)

    assert ended.returncode == 0, ended.stdout
    assert "1 skipped" in ended.stdout


def test_a_listed_skip_is_allowed(tmp_path: Path) -> None:
    ended = run_pytest(tmp_path, SKIPS["call"], name="test_listed.py", required=True)

    assert ended.returncode == 0, ended.stdout
    assert "1 skipped" in ended.stdout


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.xfail\ndef test_a(): assert False\n"

    ended = run_pytest(tmp_path, source, name="test_own.py", required=True)

    assert ended.returncode == 0, ended.stdout
    assert "1 xfailed" in ended.stdout


def test_the_plugin_is_part_of_this_session(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.has_plugin("require_all")
