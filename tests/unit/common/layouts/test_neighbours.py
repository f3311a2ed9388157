"""Memory that processes of one host share."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from rlmq.common.layouts import neighbours
from rlmq.common.layouts.neighbours import Neighbour, SharedBuffer, can_read, mapped, this_process

OTHER = """
import sys, msgspec
from rlmq.common.layouts.neighbours import *
buffer = SharedBuffer.of(4096)
buffer.words[7] = 41
print(msgspec.json.encode(this_process()).decode(), buffer.fd, flush=True)
sys.stdin.readline()
print(int(buffer.words[7]), flush=True)
"""


def test_a_buffer_is_seen_by_another_process_and_gone_with_its_own() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    told, _, fd = other.stdout.readline().rpartition(" ")
    neighbour = msgspec.json.decode(told, type=Neighbour)

    assert can_read(neighbour)
    for wrong in ({"host": "elsewhere"}, {"token": "00"}, {"fd": 999}, {"pid": 2**22 + 1}):
        assert not can_read(msgspec.structs.replace(neighbour, **wrong)), wrong
    words = mapped(neighbour.pid, int(fd))
    assert int(words[7]) == 41
    words[7] += 1
    out, _ = other.communicate("\n", timeout=60)

    assert out.strip() == "42"
    assert not can_read(neighbour)
    assert int(words[7]) == 42  # what is mapped stays


def test_a_buffer_is_used_again_after_a_run_that_went_well_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_SPARE", [])  # other tests of this process have left some
    first = SharedBuffer.of(8192)
    first.close(again=True)
    second = SharedBuffer.of(8192)
    assert second is first
    second.close()
    assert SharedBuffer.of(8192) is not first
    own = this_process()
    assert own is not None and can_read(own)
