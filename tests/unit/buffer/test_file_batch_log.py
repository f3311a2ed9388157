"""The batch log file: order, torn ends, damage, a full disk."""

from __future__ import annotations

import json
import os
import resource
import signal

import pytest

from rlmq.buffer.batch_log import BatchEntry, LoggedRange, Update
from rlmq.buffer.file_batch_log import FileBatchLog
from rlmq.common.errors import DependencyError, IntegrityError


def _entry(step):
    return BatchEntry(
        step=step,
        policy_version=step,
        rows=(f"train-{step:06d}-0000-00", 'quote " and newline \n'),
        ranges=(LoggedRange("prompts.7", 0, 2),),
        updates=(Update(micro_batches=(((0,), (1,)), ((1, 0),)), denominators=(12.0, 1 / 3)),),
        behaviour_versions=(step - 1, step),
        seed=17,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "batch_log.jsonl"


@pytest.fixture
def log(path):
    log = FileBatchLog(path)
    for step in (1, 2, 3):
        log.append(_entry(step))
    yield log
    log.close()


def test_entries_come_back_in_order_and_equal(log, path):
    assert list(FileBatchLog(path).entries()) == [_entry(1), _entry(2), _entry(3)]
    assert list(FileBatchLog(path).entries(after_step=2)) == [_entry(3)]
    assert log.last_step() == FileBatchLog(path).last_step() == 3


def test_an_absent_file_is_an_empty_log(tmp_path):
    log = FileBatchLog(tmp_path / "none.jsonl")
    assert (list(log.entries()), log.last_step()) == ([], -1)
    assert not (tmp_path / "none.jsonl").exists()


def test_every_line_is_json_for_other_tools(log, path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["entry"]["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("step", [3, 5, 0])
def test_only_the_next_step_is_appended(log, path, step):
    before = path.read_bytes()
    with pytest.raises(IntegrityError, match=f"got step {step}, expected step 4"):
        log.append(_entry(step))
    assert path.read_bytes() == before


def test_a_reopened_log_goes_on(log, path):
    log.close()
    again = FileBatchLog(path)
    again.append(_entry(4))
    assert [e.step for e in again.entries()] == [1, 2, 3, 4]
    again.close()


def test_a_torn_last_line_is_ignored_wherever_it_was_cut(log, path):
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for cut in range(start + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert FileBatchLog(path).last_step() == 2


def test_a_torn_last_line_is_cut_off_by_the_next_append(log, path):
    log.close()
    path.write_bytes(path.read_bytes()[:-20])
    again = FileBatchLog(path)
    again.append(_entry(3))
    assert list(FileBatchLog(path).entries()) == [_entry(1), _entry(2), _entry(3)]
    again.close()


def test_damage_in_the_middle_names_file_and_offset(log, path):
    data = bytearray(path.read_bytes())
    second = data.index(b"\n") + 1
    data[second + 60] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"batch_log\.jsonl at byte {second}: "):
        list(FileBatchLog(path).entries())
    with pytest.raises(IntegrityError):
        FileBatchLog(path).append(_entry(4))


def test_every_flipped_byte_is_noticed(log, path):
    data = path.read_bytes()
    for offset in range(0, len(data), 7):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :])
        try:
            entries = list(FileBatchLog(path).entries())
        except IntegrityError:
            continue
        assert entries == [_entry(1), _entry(2)], f"byte {offset}: only the last line may be dropped"


def test_a_damaged_end_of_a_line_does_not_make_two_entries_a_torn_one(log, path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:-1] + b"?" + lines[2])
    with pytest.raises(IntegrityError, match="does not match its checksum"):
        list(FileBatchLog(path).entries())


def test_a_missing_line_is_noticed(log, path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(IntegrityError, match=r"step 3 after step 1, expected step 2"):
        list(FileBatchLog(path).entries())


def test_a_full_disk_leaves_the_log_as_it_was(log, path):
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
    try:
        with pytest.raises(DependencyError, match="expected room on the disk"):
            log.append(_entry(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    log.append(_entry(4))
    assert FileBatchLog(path).last_step() == 4


def test_append_is_on_disk_before_it_returns(path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(path.stat().st_size), fsync(descriptor)))
    log = FileBatchLog(path)
    log.append(_entry(1))
    assert synced[-1] == path.stat().st_size > 0
    log.close()


def test_steps_that_are_taken_back_come_again(tmp_path):
    path = tmp_path / "log.jsonl"
    log = FileBatchLog(path)
    for step in (1, 2, 3):
        log.append(_entry(step))

    log.rewind(2)

    assert list(FileBatchLog(path).entries()) == [_entry(1)]
    log.append(_entry(2))
    assert list(FileBatchLog(path).entries()) == [_entry(1), _entry(2)]
    FileBatchLog(path).rewind(1)
    assert FileBatchLog(path).last_step() == -1
