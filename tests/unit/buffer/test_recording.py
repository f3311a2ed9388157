"""Recordings: segments, manifest, merging, other file systems."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from rlmq.buffer.recording import Recording, RecordingWriter, place_of
from rlmq.common.errors import UsageError
from rlmq.common.run_folder import RunFolder


def rows(step: int, count: int, *, ended: bool = True, text: str = "") -> pa.Table:
    ids = [f"train-{step:06d}-{i:04d}-00" for i in range(count)]
    made = {
        "sample_id": ids,
        "step": pa.array([step] * count, pa.int32()),
        "response_text": [text or i for i in ids],
    }
    return pa.table({**made, "end_state": pa.array(["trained" if ended else None] * count, pa.string())})


def test_the_manifest_tells_each_file_and_a_changed_bit_is_found(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path)
    writer.add("train", 1, rows(1, 3))
    writer.add("train", 2, rows(2, 2))

    told = json.loads((tmp_path / "_train.manifest.json").read_text())["segments"]

    assert [(one["name"], one["first_step"], one["rows"]) for one in told] == [
        ("train-000001-0000.parquet", 1, 3),
        ("train-000002-0000.parquet", 2, 2),
    ]
    for one in told:
        content = (tmp_path / one["name"]).read_bytes()
        assert (one["bytes"], one["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert Recording(tmp_path).verify() == []
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / one["name"]).write_bytes(damaged)
    (tmp_path / told[0]["name"]).unlink()
    found = Recording(tmp_path).verify()
    assert found[0] == "train-000001-0000.parquet: gone"
    assert found[1].startswith("train-000002-0000.parquet: SHA-256 ")


def test_small_files_become_one_segment_of_the_asked_size(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path, segment_bytes=6000)
    for step in range(1, 11):
        writer.add("train", step, rows(step, 20))

    names = [one.name for one in Recording(tmp_path).segments("train")]

    merged = [name for name in names if "-to-" in name]
    assert merged
    assert len(names) < 10
    assert sorted(path.name for path in tmp_path.glob("*.parquet")) == names
    whole = Recording(tmp_path).read()
    assert whole["step"].to_pylist() == [step for step in range(1, 11) for _ in range(20)]
    assert Recording(tmp_path).read(steps=[2])["sample_id"].to_pylist() == rows(2, 20)["sample_id"].to_pylist()
    # plain pyarrow reads the same
    assert pq.read_table(tmp_path).sort_by("sample_id").equals(whole.combine_chunks())
    assert Recording(tmp_path).verify() == []


def test_many_small_files_become_one_segment(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path, most_files=8)
    for step in range(1, 10):
        writer.add("train", step, rows(step, 1))

    names = [one.name for one in Recording(tmp_path).segments("train")]

    assert names == ["train-000001-to-000008-0000.parquet", "train-000009-0000.parquet"]
    assert Recording(tmp_path).read()["step"].to_pylist() == list(range(1, 10))


def test_a_row_that_was_written_twice_is_read_as_it_ended(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path)
    writer.add("train", 1, rows(1, 2, ended=False, text="early"))
    writer.add("train", 1, rows(1, 2, text="late"))

    assert Recording(tmp_path).read().to_pylist() == rows(1, 2, text="late").to_pylist()


def test_any_file_system_holds_a_recording() -> None:
    memory = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory")))
    first = RecordingWriter("/runs/a", segment_bytes=100, mark="0001", filesystem=memory)
    second = RecordingWriter("/runs/a", mark="0002", filesystem=memory)

    names = [first.add("train", 1, rows(1, 1)).name, second.add("train", 2, rows(2, 1)).name]
    first.add("train", 3, rows(3, 1))

    assert names == ["train-000001-00010000.parquet", "train-000002-00020000.parquet"]
    recording = Recording("/runs/a", filesystem=memory)
    assert recording.read()["step"].to_pylist() == [1, 2, 3]
    assert recording.verify() == []


def test_urls_name_a_folder_for_each_run(tmp_path: Path) -> None:
    RecordingWriter(f"file://{tmp_path}/demo-1").add("train", 1, rows(1, 1))

    assert Recording(tmp_path / "demo-1").tables() == ["train"]
    assert place_of(RunFolder(tmp_path / "demo-1")) == tmp_path / "demo-1" / "samples"
    with pytest.raises(UsageError, match="expected a folder or a URL"):
        Recording("nowhere://demo")
    with pytest.raises(UsageError, match=r"no rows of table train and steps \[5\], expected steps 1"):
        Recording(tmp_path / "demo-1").read(steps=[5])
