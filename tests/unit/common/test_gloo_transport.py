"""Weight transport between real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlmq.common.errors import DeadlineExceeded, IntegrityError, UsageError
from rlmq.common.gloo import GlooTransport
from rlmq.common.weights import Rendezvous, TensorSpec, WeightManifest

RECEIVER = Path(__file__).with_name("gloo_receiver.py")
BUCKET_BYTES = 4096
Named = list[tuple[str, torch.Tensor]]


def weights() -> Named:
    """Odd sizes, several types, longer than a bucket, empty, scalar, not contiguous, tied."""
    draw = torch.Generator().manual_seed(3)
    embedding = torch.randn(37, 171, generator=draw)
    return [
        ("embedding", embedding),
        ("half", torch.randn(3, 5, generator=draw).bfloat16()),
        ("empty", torch.empty(0, 4)),
        ("count", torch.tensor(2**40 + 1)),
        ("mask", torch.tensor([True, False, True])),
        ("turned", torch.randn(7, 11, generator=draw).T),
        ("blocks", torch.randn(1500, generator=draw, dtype=torch.float64)),
        ("head", embedding),
    ]


def manifest_of(tensors: Named) -> WeightManifest:
    names = {
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.bool: "BOOL",
        torch.float64: "F64",
    }
    return WeightManifest(tuple(TensorSpec(n, tuple(t.shape), names[t.dtype]) for n, t in tensors))


@contextmanager
def receivers(
    meeting: Rendezvous, manifest: WeightManifest, folder: Path, behaviours: dict[str, str]
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    env = {**os.environ, "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    places = [msgspec.json.encode(meeting).decode(), msgspec.json.encode(manifest).decode()]
    processes = {
        member: subprocess.Popen(
            [sys.executable, str(RECEIVER), *places, member, str(folder), behaviour],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for member, behaviour in behaviours.items()
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate(timeout=20)


def transfer(folder: Path, behaviours: dict[str, str], timeout_s: float = 60.0) -> dict[str, int | None]:
    """Send to these members; exit codes of those that end by themselves."""
    tensors = weights()
    manifest = manifest_of(tensors)
    transport = GlooTransport(timeout_s=timeout_s, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", tuple(behaviours))
    with receivers(meeting, manifest, folder, behaviours) as processes:
        transport.send(meeting, manifest, tensors)
        return {member: process.wait(timeout=30) for member, process in processes.items()}


def assert_received(folder: Path, member: str) -> None:
    received = load_file(folder / f"{member}.safetensors")
    assert received.keys() == {name for name, _ in weights()}
    for name, tensor in weights():
        assert torch.equal(received[name], tensor), name


@pytest.fixture
def taken_default_port() -> Iterator[None]:
    """torch's default port has a listener, which must not matter."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", 29500))
            listener.listen()
        except OSError:
            pass  # somebody else listens there: as good
        yield


@pytest.mark.usefixtures("taken_default_port")
def test_every_tensor_arrives_at_every_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29500")

    codes = transfer(tmp_path, {"rollout-0": "whole", "rollout-1": "whole"})

    assert codes == {"rollout-0": 0, "rollout-1": 0}
    assert_received(tmp_path, "rollout-0")
    assert_received(tmp_path, "rollout-1")


def test_tied_tensors_travel_once() -> None:
    tensors = weights()
    manifest = manifest_of(tensors)
    sender, receiver = GlooTransport(bucket_bytes=BUCKET_BYTES), GlooTransport()
    meeting = sender.offer("g", ("a",))
    names: list[str] = []

    def take(name: str, _: torch.Tensor) -> None:
        names.append(name)

    other = threading.Thread(target=receiver.receive, args=(meeting, "a", manifest, take))
    other.start()
    stats = sender.send(meeting, manifest, tensors)
    other.join(timeout=30)

    assert sorted(names) == sorted(name for name, _ in tensors)
    assert stats.bytes == manifest.total_bytes - tensors[0][1].nbytes


@pytest.mark.parametrize("behaviour", ["killed", "stopped", "late"])
def test_a_member_that_fails_is_named_within_the_timeout_and_hurts_nobody_else(
    behaviour: str, tmp_path: Path
) -> None:
    tensors = weights()
    manifest = manifest_of(tensors)
    transport = GlooTransport(timeout_s=12.0, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", ("rollout-0", "rollout-1"))

    with receivers(meeting, manifest, tmp_path, {"rollout-0": behaviour, "rollout-1": "whole"}) as processes:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"step-3.*member rollout-0.*(bucket|join|confirm)") as caught:
            transport.send(meeting, manifest, tensors)
        seconds = time.monotonic() - started
        assert processes["rollout-1"].wait(timeout=20) == 0

    assert "member rollout-1" not in str(caught.value)
    assert seconds < 12.0 + 5.0
    assert_received(tmp_path, "rollout-1")


def test_a_member_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    tensors = weights()
    transport = GlooTransport(timeout_s=100.0, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", ("rollout-0", "rollout-1"))

    with receivers(meeting, manifest_of(tensors), tmp_path, {"rollout-1": "whole"}) as processes:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="member rollout-0: got left"):
            transport.send(meeting, manifest_of(tensors), tensors, lambda member: member == "rollout-0")
        assert time.monotonic() - started < 90.0
        assert processes["rollout-1"].wait(timeout=20) == 0

    # and who comes too late is told at once
    assert_received(tmp_path, "rollout-1")
    with pytest.raises(DeadlineExceeded, match="no meeting place"):
        GlooTransport().receive(meeting, "rollout-0", manifest_of(tensors), lambda name, tensor: None)


def test_a_flipped_bit_is_noticed_by_both_sides_at_once(tmp_path: Path) -> None:
    tensors = weights()
    manifest = manifest_of(tensors)
    transport = GlooTransport(timeout_s=60.0, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", ("rollout-0",))

    with receivers(meeting, manifest, tmp_path, {"rollout-0": "flips"}) as processes:
        started = time.monotonic()
        with pytest.raises(IntegrityError, match=r"rollout-0.*damaged bytes in bucket 0"):
            transport.send(meeting, manifest, tensors)
        out, _ = processes["rollout-0"].communicate(timeout=30)

    assert time.monotonic() - started < 50.0
    assert processes["rollout-0"].returncode == 6
    assert "damaged bytes in bucket 0" in out
    assert not (tmp_path / "rollout-0.safetensors").exists()


def test_a_sender_that_dies_is_named_by_the_receiver(tmp_path: Path) -> None:
    tensors = weights()
    manifest = manifest_of(tensors)
    transport = GlooTransport(timeout_s=10.0)
    meeting = transport.offer("step-3", ("rollout-0",))

    with receivers(meeting, manifest, tmp_path, {"rollout-0": "whole"}) as processes:
        out, _ = processes["rollout-0"].communicate(timeout=60)

    assert processes["rollout-0"].returncode == 5
    assert "step-3" in out and "the sender" in out


def test_a_receiver_of_another_model_is_told(tmp_path: Path) -> None:
    tensors = weights()
    transport = GlooTransport(timeout_s=8.0, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", ("rollout-0",))

    with receivers(meeting, manifest_of(tensors[:-1]), tmp_path, {"rollout-0": "whole"}) as processes:
        with pytest.raises(DeadlineExceeded, match="rollout-0"):
            transport.send(meeting, manifest_of(tensors), tensors)
        out, _ = processes["rollout-0"].communicate(timeout=30)

    assert processes["rollout-0"].returncode == 6
    assert "another manifest" in out


def test_tensors_that_are_not_the_manifests_are_not_sent() -> None:
    tensors = weights()
    transport = GlooTransport(timeout_s=5.0)
    meeting = transport.offer("g", ("a",))

    with pytest.raises(IntegrityError, match="weights to send"):
        transport.send(meeting, manifest_of(tensors), tensors[1:])
    with pytest.raises(IntegrityError, match="weights to send"):
        transport.send(meeting, manifest_of(tensors), [*tensors[:-1], ("head", torch.zeros(2))])


def test_a_generation_that_was_not_offered_is_refused() -> None:
    transport = GlooTransport()
    old = transport.offer("g1", ("a",))
    transport.offer("g2", ("a",))

    with pytest.raises(UsageError, match="g1"):
        transport.send(old, manifest_of([]), [])


def test_the_meeting_place_listens_on_loopback_only() -> None:
    transport = GlooTransport()
    meeting = transport.offer("g", ("a",))

    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]

    assert {place.ip for place in listening if place.port == meeting.port} == {"127.0.0.1"}


def test_generations_leave_no_open_files_behind(tmp_path: Path) -> None:
    transfer(tmp_path, {"a": "whole"})
    before = psutil.Process().num_fds()

    for _ in range(3):
        transfer(tmp_path, {"a": "whole"})

    assert psutil.Process().num_fds() <= before + 2
