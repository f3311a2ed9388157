"""Weight sync between real processes, and between threads."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlmq.common.errors import DeadlineExceeded, IntegrityError, UsageError
from rlmq.common.layouts.build import even, flat_sharded, sharded
from rlmq.common.layouts.groups import HOST
from rlmq.common.layouts.layout import Box, Layout, MeshShape
from rlmq.common.layouts.meeting import Clock, connect
from rlmq.common.layouts.part import PartNote, WeightPart, own_part, part_of, whole_part
from rlmq.common.layouts.views import cut_shards
from rlmq.common.layouts.weight_sync import WeightReceiver, WeightSender
from rlmq.common.weights import Rendezvous, SyncStats, TensorSpec, WeightManifest

RECEIVER = Path(__file__).with_name("weight_receiver.py")
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
        until = time.monotonic() + 90.0
        while not all((folder / f"{member}.imported").exists() for member in behaviours):
            assert time.monotonic() < until, "receivers did not start"
            time.sleep(0.05)
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate(timeout=20)


def transfer(folder: Path, behaviours: dict[str, str], timeout_s: float = 60.0) -> dict[str, int | None]:
    """Send to these members; exit codes of those that end by themselves."""
    tensors = weights()
    manifest = manifest_of(tensors)
    transport = WeightSender(timeout_s=timeout_s, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", tuple(behaviours))
    with receivers(meeting, manifest, folder, behaviours) as processes:
        transport.send(meeting, own_part(tensors), 1)
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


def test_members_that_fail_are_named_within_the_timeout_and_hurt_nobody_else(tmp_path: Path) -> None:
    tensors = weights()
    members = {"a-killed": "killed", "b-stopped": "stopped", "c-late": "late", "d-whole": "whole"}
    transport = WeightSender(timeout_s=12.0, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", tuple(members))

    with receivers(meeting, manifest_of(tensors), tmp_path, members) as processes:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="step-3") as caught:
            transport.send(meeting, own_part(tensors), 1)
        seconds = time.monotonic() - started
        assert processes["d-whole"].wait(timeout=20) == 0

    for member, place in (("a-killed", "round|confirm"), ("b-stopped", "round|confirm"), ("c-late", "join")):
        assert re.search(f"member {member}[^;]*({place})", str(caught.value)), str(caught.value)
    assert "member d-whole" not in str(caught.value)
    assert seconds < 12.0 + 8.0
    assert_received(tmp_path, "d-whole")


def test_a_member_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    tensors = weights()
    transport = WeightSender(timeout_s=100.0, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", ("rollout-0", "rollout-1"))

    with receivers(meeting, manifest_of(tensors), tmp_path, {"rollout-1": "whole"}) as processes:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="member rollout-0: got left"):
            transport.send(meeting, own_part(tensors), 1, lambda member: member == "rollout-0")
        assert time.monotonic() - started < 90.0
        assert processes["rollout-1"].wait(timeout=20) == 0

    # and who comes too late is told at once
    assert_received(tmp_path, "rollout-1")
    with pytest.raises(DeadlineExceeded, match="no meeting place"):
        WeightReceiver("rollout-0").receive(meeting, whole_part(manifest_of(tensors)), lambda *_: None)


def test_a_flipped_bit_is_noticed_by_both_sides_at_once(tmp_path: Path) -> None:
    tensors = weights()
    manifest = manifest_of(tensors)
    transport = WeightSender(timeout_s=60.0, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", ("rollout-0",))

    with receivers(meeting, manifest, tmp_path, {"rollout-0": "flips"}) as processes:
        started = time.monotonic()
        with pytest.raises(IntegrityError, match=r"rollout-0.*damaged bytes in round 0"):
            transport.send(meeting, own_part(tensors), 1)
        out, _ = processes["rollout-0"].communicate(timeout=30)

    assert time.monotonic() - started < 50.0
    assert processes["rollout-0"].returncode == 6
    assert "damaged bytes in round 0" in out
    assert not (tmp_path / "rollout-0.safetensors").exists()


def test_a_sender_that_dies_is_named_by_the_receiver(tmp_path: Path) -> None:
    tensors = weights()
    manifest = manifest_of(tensors)
    transport = WeightSender(timeout_s=10.0)
    meeting = transport.offer("step-3", ("rollout-0",))

    with receivers(meeting, manifest, tmp_path, {"rollout-0": "whole"}) as processes:
        out, _ = processes["rollout-0"].communicate(timeout=60)

    assert processes["rollout-0"].returncode == 5
    assert "step-3" in out and "trainer rank 0" in out


def test_a_receiver_of_another_model_is_told(tmp_path: Path) -> None:
    tensors = weights()
    transport = WeightSender(timeout_s=8.0, bucket_bytes=BUCKET_BYTES)
    meeting = transport.offer("step-3", ("rollout-0",))

    with receivers(
        meeting, manifest_of([*tensors[:1], *tensors[2:]]), tmp_path, {"rollout-0": "whole"}
    ) as processes:
        with pytest.raises(UsageError, match="another model"):
            transport.send(meeting, own_part(tensors), 1)
        out, _ = processes["rollout-0"].communicate(timeout=30)

    # the receiver finds it out too, unless the sender has left before it could look
    assert processes["rollout-0"].returncode in (2, 5)
    assert "another model" in out or processes["rollout-0"].returncode == 5


def test_a_generation_that_was_not_offered_is_refused() -> None:
    transport = WeightSender()
    old = transport.offer("g1", ("a",))
    transport.offer("g2", ("a",))

    with pytest.raises(UsageError, match="g1"):
        transport.send(old, own_part([]), 1)


@pytest.mark.timeout(60)
def test_a_sender_that_dies_while_somebody_connects_is_not_waited_for() -> None:
    # given a meeting place that takes connections and answers none, and is then gone
    with socket.create_server((HOST, 0)) as listener:
        place = Rendezvous(HOST, listener.getsockname()[1], "1.1", ("rollout-0",), 600.0, 1)

        def die() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            listener.close()

        threading.Thread(target=die, daemon=True).start()
        # then the transfer's ten minutes are not spent
        with pytest.raises(DeadlineExceeded, match="no meeting place"):
            connect(place, Clock(600.0, "weight transfer 1.1"))


def test_the_meeting_place_listens_on_loopback_only() -> None:
    transport = WeightSender()
    meeting = transport.offer("g", ("a",))

    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]

    assert {place.ip for place in listening if place.port == meeting.port} == {"127.0.0.1"}


# -- trainer ranks and replicas as threads -----------------------------------------------------------------

SPECS = [
    TensorSpec("embed", (37, 30), "BF16"),
    TensorSpec("up", (24, 50), "BF16"),
    TensorSpec("norm", (30,), "BF16"),
]
Shapes = dict[str, torch.Tensor]


def model(seed: int) -> Shapes:
    draw = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=draw).bfloat16() for spec in SPECS}


class Run:
    """Trainer ranks and one replica that stay, as their objects do in a run."""

    def __init__(self, training: Layout, wanted: list[PartNote], *, delta: bool = False) -> None:
        self.training, self.wanted = training, wanted
        ranks = len(training.ranks)
        self.senders = [
            WeightSender(rank, ranks, delta=delta, timeout_s=30.0, bucket_bytes=2048) for rank in range(ranks)
        ]
        self.receivers = [WeightReceiver("r", rank, len(wanted)) for rank in range(len(wanted))]
        self.served: list[dict[str, torch.Tensor]] = [{} for _ in wanted]
        self.errors: list[BaseException] = []

    def sync(self, weights: Shapes, version: int) -> list[SyncStats]:
        """What every trainer rank sent."""
        meeting = self.senders[0].offer(f"g{version}", ("r",))
        stats: dict[int, SyncStats] = {}

        def guarded(work: Callable[[int], None], rank: int) -> None:
            try:
                work(rank)
            except Exception as error:
                self.errors.append(error)

        def send(rank: int) -> None:
            part = WeightPart(part_of(self.training, rank), cut_shards(self.training, rank, weights.items()))
            stats[rank] = self.senders[rank].send(meeting, part, version)

        def receive(rank: int) -> None:
            arrived: Shapes = {}
            self.receivers[rank].receive(
                meeting,
                self.wanted[rank],
                lambda name, _, tensor: arrived.__setitem__(name, tensor.clone()),
                served=self.served[rank].get,
            )
            self.served[rank] = arrived
            self.receivers[rank].committed()

        ends = [(send, rank) for rank in range(len(self.senders))] + [(receive, r) for r in range(len(self.wanted))]
        threads = [threading.Thread(target=guarded, args=end) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return [stats[rank] for rank in sorted(stats)]


def cut_over_two(ranks: list[int]) -> Layout:
    return sharded(SPECS, MeshShape(tp=2), {"embed": even(0, 37, 2), "up": even(1, 50, 2)}, ranks=ranks)


def test_every_trainer_rank_sends_its_part_to_a_replica_that_is_cut_otherwise() -> None:
    training = flat_sharded(SPECS, [0, 1, 2], rule="elements")
    target = cut_over_two([0, 1])
    run = Run(training, [part_of(target, rank) for rank in (0, 1)])
    weights = model(1)

    stats = run.sync(weights, 1)

    assert not run.errors
    for rank in (0, 1):
        wanted = cut_shards(target, rank, weights.items())
        assert run.served[rank].keys() == {spec.name for spec in SPECS}
        for name, tensor in run.served[rank].items():
            assert torch.equal(tensor, wanted[name, wanted.boxes(name)[0]])
    total = sum(spec.bytes for spec in SPECS) + 2 * 30  # the norm goes to both
    assert sum(one.bytes for one in stats) == total
    assert max(one.bytes for one in stats) < 1.25 * total / 3


def test_a_delta_moves_the_changes_and_is_bit_exact() -> None:
    run = Run(cut_over_two([0, 1]), [whole_part(WeightManifest(tuple(SPECS)))], delta=True)
    weights = model(1)
    first = run.sync(weights, 1)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    weights["embed"].view(-1)[::40] *= 2  # every 40th
    weights["up"][3, 49] = -0.0

    second = run.sync(weights, 2)

    assert not run.errors
    for name, tensor in weights.items():
        assert torch.equal(run.served[0][name].view(torch.int16), tensor.view(torch.int16))
    full = sum(spec.bytes for spec in SPECS)
    assert sum(one.bytes for one in first) == sum(one.full_bytes for one in second) == full
    changed = len(weights["embed"].view(-1)[::40]) + 1
    moves = 2 + 2 + 1  # the norm comes from one of the ranks
    assert 3 * changed <= sum(one.bytes for one in second) <= 3 * changed + 2400 // 255 + moves * (32 + 7)


def test_what_changes_everywhere_goes_in_full_and_so_does_what_starts_from_something_else() -> None:
    run = Run(cut_over_two([0, 1]), [whole_part(WeightManifest(tuple(SPECS)))], delta=True)
    full = sum(spec.bytes for spec in SPECS)
    run.sync(model(1), 1)
    assert sum(one.bytes for one in run.sync(model(2), 2)) == full

    run.receivers[0] = WeightReceiver("r")  # a new process
    assert sum(one.bytes for one in run.sync(model(2), 3)) == full
    assert sum(one.bytes for one in run.sync(model(2), 4)) < full / 5
    run.senders[1] = WeightSender(1, 2, delta=True, timeout_s=30.0, bucket_bytes=2048)  # and on the other side
    assert sum(one.bytes for one in run.sync(model(3), 5)) == full

    run.served[0]["up"][0, 0] += 1  # what is served is not what came
    run.sync(model(3), 6)
    assert [str(error) for error in run.errors] == [str(run.errors[0])]
    assert "another checksum" in str(run.errors[0])
    assert sum(one.bytes for one in run.sync(model(3), 7)) == full
    assert torch.equal(run.served[0]["up"], model(3)["up"])


def test_syncs_leave_no_open_files_behind() -> None:
    run = Run(cut_over_two([0, 1]), [whole_part(WeightManifest(tuple(SPECS)))])
    run.sync(model(1), 1)
    before = psutil.Process().num_fds()

    for version in range(2, 6):
        run.sync(model(1), version)

    assert psutil.Process().num_fds() <= before + 2


def test_tied_tensors_travel_once_and_arrive_under_both_names() -> None:
    tensors = weights()
    names: list[str] = []
    sender, receiver = WeightSender(bucket_bytes=BUCKET_BYTES), WeightReceiver("a")
    meeting = sender.offer("g", ("a",))

    def take(name: str, _: Box, tensor: torch.Tensor) -> None:
        names.append(name)

    other = threading.Thread(target=receiver.receive, args=(meeting, whole_part(manifest_of(tensors)), take))
    other.start()
    stats = sender.send(meeting, own_part(tensors), 1)
    other.join(timeout=30)

    assert sorted(names) == sorted(name for name, _ in tensors)
    assert names.index("head") == names.index("embedding") + 1
    assert stats.bytes == manifest_of(tensors).total_bytes - tensors[0][1].nbytes
