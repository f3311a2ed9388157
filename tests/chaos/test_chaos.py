"""The chaos run and the matrix, a few faults long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chaos import chaos, matrix
from chaos.live import ROOT

pytestmark = pytest.mark.timeout(240)
PPO = ["--recipe", str(ROOT / "recipes" / "algorithms" / "ppo.yaml"), "--steps", "4"]


def test_a_run_with_kills_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    told = tmp_path / "chaos.json"
    code = chaos.main([*PPO, "--kills", "2", "--folder", str(tmp_path), "--json", str(told)])
    result = json.loads(told.read_text())
    assert code == 0, result["faults"]
    assert len(result["kills"]) == 2
    assert result["sha256"] == result["sha256_disturbed"]


def test_a_role_that_is_killed_and_stopped_recovers(tmp_path: Path) -> None:
    told = tmp_path / "matrix.json"
    code = matrix.main(
        ["--steps", "3", "--roles", "reward", "--cells", "2", "--folder", str(tmp_path), "--json", str(told)]
    )
    result = json.loads(told.read_text())
    assert code == 0, result["faults"]
    assert len(result["cells"]) == 2
