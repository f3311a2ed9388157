"""What is planted in the files of a good run is named by the oracle of whole runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chaos.recording import broken, differences
from faults.echo_run import EchoRun

pytestmark = pytest.mark.timeout(120)
STEPS = 4


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of echo workers."""
    run = EchoRun(tmp_path_factory.mktemp("good"), "checkpoint.every_steps=2", steps=STEPS)
    run.start()
    try:
        run.check()
    finally:
        run.end()
    return run.run


def _rows(run: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    path = sorted(run.glob("samples/train-*.parquet"))[0]
    pq.write_table(change(pq.read_table(path)), path)


def _with(name: str, value: object) -> Callable[[pa.Table], pa.Table]:
    """The table whose first row has another value."""

    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        rows[0][name] = value
        return pa.Table.from_pylist(rows, schema=table.schema)

    return change


def _lost(run: Path) -> None:
    _rows(run, lambda table: table.slice(1))


def _two_ends(run: Path) -> None:
    path = sorted(run.glob("samples/train-*.parquet"))[0]
    pq.write_table(_with("reward", -1.0)(pq.read_table(path)), path.with_name("train-000009-0000.parquet"))


def _stale(run: Path) -> None:
    _rows(run, _with("policy_versions", [7]))


def _unlogged(run: Path) -> None:
    _rows(run, _with("advantages", None))


def _foreign(run: Path) -> None:
    _rows(run, _with("sample_id", "train-000001-0099-00"))


def _log(run: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = run / "batch_log.jsonl"
    path.write_text("".join(line + "\n" for line in change(path.read_text().splitlines())))


def _retrained(run: Path) -> None:
    _log(run, lambda lines: [*lines, lines[-1]])


def _unapplied(run: Path) -> None:
    _log(run, lambda lines: lines[:-1])


def _ancestry(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000002")


def _critics_ancestry(run: Path) -> None:
    shutil.copytree(run / "checkpoints", run / "critic_checkpoints")
    shutil.rmtree(run / "critic_checkpoints" / "step-000002")


def _covered_twice(run: Path) -> None:
    path = run / "checkpoints" / "step-000004" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"rows": [*manifest["rows"][:1], *manifest["rows"]]}))


def _hash(run: Path) -> None:
    path = run / "checkpoints" / "step-000002" / "model.safetensors"
    path.write_text(path.read_text()[::-1])


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (_lost, "lost"),
        (_two_ends, "two ends"),
        (_stale, "stale"),
        (_unlogged, "unlogged"),
        (_foreign, "foreign"),
        (_retrained, "retrained"),
        (_unapplied, "retrained"),
        (_ancestry, "ancestry"),
        (_critics_ancestry, "ancestry"),
        (_covered_twice, "ancestry"),
        (_hash, "hash"),
    ],
)
def test_a_planted_fault_is_named(good: Path, tmp_path: Path, plant: Callable[[Path], None], named: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    assert broken(run, steps=STEPS) == []
    plant(run)
    assert any(line.startswith(f"{named}:") for line in broken(run, steps=STEPS)), broken(run, steps=STEPS)


@pytest.mark.parametrize("plant", [_stale, _two_ends, _unapplied])
def test_a_run_that_differs_is_told_from_an_equal_one(good: Path, tmp_path: Path, plant: Callable) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    assert differences(run, good) == []
    plant(run)
    found = [*differences(run, good), *broken(run, steps=STEPS)]
    assert found
