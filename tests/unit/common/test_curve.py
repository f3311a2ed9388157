"""Keys of the control plane: files, the door, and what a key may say, over real sockets."""

from __future__ import annotations

import io
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlmq.common.bus import ControllerBus, WorkerBus, may_say, ring_controller
from rlmq.common.calls import CallResult
from rlmq.common.curve import Keys
from rlmq.common.endpoints import Endpoints
from rlmq.common.errors import DependencyError, UsageError
from rlmq.common.logs import configure
from rlmq.common.messages import Beat, Done, Doorbell, Goodbye, Heartbeat, Ordered, Report
from rlmq.common.recipe.load import load_recipe
from rlmq.common.recipe.schema import ControlBlock
from rlmq.common.run_folder import RunFolder

ROLES = ("controller", "operator", "reward", "actor")


@pytest.fixture
def run() -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory(prefix="rlmq-curve-") as folder:
        yield RunFolder(Path(folder))


@pytest.fixture
def keys(run: RunFolder) -> Keys:
    made = Keys(run.path / "keys")
    for name in ROLES:
        made.make(name)
    return made


@pytest.fixture
def control(keys: Keys) -> ControlBlock:
    return ControlBlock(address=f"tcp://127.0.0.1:{free_port()}", keys=str(keys.folder))


@pytest.fixture
def said() -> io.StringIO:
    """What the process's log says."""
    stream = io.StringIO()
    configure("controller", 0, stream=stream)
    return stream


def free_port() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def heartbeat(role: str = "reward") -> Heartbeat:
    return Heartbeat(
        role=role, rank=0, incarnation=1, activity="idle", ready=True, serving=-1, progress=0, activity_s={}
    )


@contextmanager
def controller(run: RunFolder, control: ControlBlock | None) -> Iterator[ControllerBus]:
    bus = ControllerBus(run, control, epoch=3, tick=lambda: None, tick_s=1.0)
    try:
        yield bus
    finally:
        bus.close()


@contextmanager
def worker(
    run: RunFolder, control: ControlBlock | None, heard: list[Doorbell] | None = None, says: str = "reward"
) -> Iterator[WorkerBus]:
    """A worker with the key of `reward` that reports as `says`."""
    bells: list[Doorbell] = [] if heard is None else heard
    bus = WorkerBus(
        run, control, role="reward", heard=bells.append, heartbeat=lambda: heartbeat(says), heartbeat_s=0.1
    )
    try:
        yield bus
    finally:
        bus.close()


def wait_until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.01)


def failure(bus: WorkerBus) -> str:
    """Why the worker was refused, or nothing."""
    try:
        bus.check()
    except DependencyError as error:
        return str(error)
    return ""


# -- files ---------------------------------------------------------------------------------------------------


def test_keys_are_made_once_and_for_their_owner_only(keys: Keys) -> None:
    before = keys.secret("reward")
    assert not keys.make("reward")
    assert keys.secret("reward") == before
    assert keys.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in keys.folder.iterdir()} == {0o600}


def test_half_a_pair_is_completed_or_left_alone(keys: Keys) -> None:
    # given the controller's machine, with the public half alone, and a pair whose public half was lost
    keys.file("actor").unlink()
    public = keys.public("reward")
    keys.public_file("reward").unlink()
    before = keys.public("actor")
    # then neither is replaced
    assert not keys.make("actor")
    assert not keys.make("reward")
    assert keys.public("actor") == before
    assert keys.public("reward") == public


def test_a_key_that_is_made_anew_replaces_both_halves(keys: Keys) -> None:
    before = keys.secret("reward"), keys.public("reward")
    assert keys.make("reward", anew=True)
    assert keys.secret("reward") != before[0]
    assert keys.public("reward") != before[1]
    assert keys.speakers()[keys.public("reward")] == "reward"


@pytest.mark.parametrize("name", ["reward.key", "actor.pub"])
def test_a_key_file_that_others_can_read_is_refused_by_name(keys: Keys, name: str) -> None:
    (keys.folder / name).chmod(0o640)
    with pytest.raises(UsageError, match=f"{name}.*640.*600"):
        keys.secret("reward"), keys.speakers()


def test_a_key_folder_that_others_can_look_into_is_refused_by_name(keys: Keys) -> None:
    keys.folder.chmod(0o755)
    with pytest.raises(UsageError, match=r"keys: got mode 755"):
        keys.secret("reward")
    with pytest.raises(UsageError, match=r"keys: got mode 755"):
        keys.make("rollout")


def test_the_folder_of_systemds_credentials_is_taken_as_it_is(
    keys: Keys, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.folder.chmod(0o750)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(keys.folder))
    found = Endpoints.of(run, ControlBlock(keys="$CREDENTIALS_DIRECTORY")).keys
    assert found is not None
    assert found.secret("reward")


@pytest.mark.parametrize("text", ["", "short", "\\" * 40, "x" * 45])
def test_a_file_that_is_no_key_is_named(keys: Keys, text: str) -> None:
    keys.file("reward").write_text(text)
    with pytest.raises(DependencyError, match=r"reward\.key"):
        keys.secret("reward")


# -- addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "192.0.2.7", "example.org", "eth0"])
def test_an_address_that_others_reach_needs_keys(tmp_path: Path, host: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "run: {name: n}\nmodel: m\ndata: {train: t}\nreward: [{function: 'r.py:f'}]\ntrain: {steps: 1}\n"
        f"control: {{address: 'tcp://{host}:5555'}}\n"
    )
    with pytest.raises(UsageError, match=r"line 6.*keys \(of `rlmq keys`\)"):
        load_recipe(recipe)
    assert load_recipe(recipe, ["control.keys=keys"]).recipe.control.address == f"tcp://{host}:5555"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1"])
def test_loopback_needs_no_keys_and_says_so(run: RunFolder, host: str, said: io.StringIO) -> None:
    control = ControlBlock(address=f"tcp://{host}:{free_port()}")
    heard: list[Doorbell] = []
    with controller(run, control) as bus, worker(run, control, heard):
        wait_until(lambda: Beat(3) in heard and bool(bus.reports()))
    assert "no keys" in said.getvalue()


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:65535", "127.0.0.1:5555", "tcp://:5555", "ipc://x:1", ""]
)
def test_another_form_of_address_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="65534"):
        ControlBlock(address=address)


# -- the door ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tcp", [True, False])
def test_a_known_key_comes_in(run: RunFolder, control: ControlBlock, tcp: bool) -> None:
    if not tcp:
        control = ControlBlock(keys=control.keys)
    heard: list[Doorbell] = []
    with controller(run, control) as bus, worker(run, control, heard):
        found: list[Report] = []
        wait_until(lambda: Beat(3) in heard and heartbeat() in (found.extend(bus.reports()) or found))
        assert not bus.refusals.counts


@pytest.mark.timeout(60)
def test_a_key_that_the_controller_does_not_know_is_refused_on_both_sides(
    run: RunFolder, control: ControlBlock, keys: Keys, said: io.StringIO
) -> None:
    # given a controller whose allow-list has another key of the role
    theirs = Keys(run.path / "theirs")
    for name in ROLES:
        theirs.make(name)
    (theirs.folder / "controller.pub").write_bytes(keys.public("controller"))
    other = ControlBlock(address=control.address, keys=str(theirs.folder))
    with controller(run, control) as bus, worker(run, other) as refused:
        # then the worker says which file, and the controller whom it refused
        wait_until(lambda: bool(failure(refused)))
        assert str(theirs.file("reward")) in failure(refused)
        wait_until(lambda: bus.refusals.counts.get("key", 0) >= 1)
        assert not bus.reports()
    assert "127.0.0.1" in said.getvalue()
    assert theirs.public("reward").decode() in said.getvalue()


@pytest.mark.timeout(60)
def test_a_key_counts_once_it_is_in_the_folder(run: RunFolder, control: ControlBlock, keys: Keys) -> None:
    (keys.folder / "reward.pub").rename(run.path / "reward.pub")
    with controller(run, control) as bus:
        with worker(run, control) as refused:
            wait_until(lambda: bool(failure(refused)))
        (run.path / "reward.pub").rename(keys.folder / "reward.pub")
        with worker(run, control):
            wait_until(lambda: bool(bus.reports()))


@pytest.mark.timeout(60)
def test_a_worker_without_keys_is_told_and_counted(run: RunFolder, control: ControlBlock) -> None:
    plain = ControlBlock(address=control.address)
    with controller(run, control) as bus, worker(run, plain) as refused:
        wait_until(lambda: "control.keys" in failure(refused))
        wait_until(lambda: bool({"plain", "unfinished"} & set(bus.refusals.counts)))
        assert not bus.reports()


@pytest.mark.timeout(60)
def test_a_wrong_controller_key_is_named_in_time(run: RunFolder, control: ControlBlock, keys: Keys) -> None:
    theirs = Keys(run.path / "theirs")
    for name in ROLES:
        theirs.make(name)
    other = ControlBlock(address=control.address, keys=str(theirs.folder))
    with controller(run, control) as bus, worker(run, other) as refused:
        refused._attempts.patience_s = 0.5
        wait_until(lambda: "controller.pub" in failure(refused))
        assert bus.refusals.counts.get("handshake", 0) >= 1


@pytest.mark.timeout(60)
def test_a_worker_may_wait_for_its_controller(run: RunFolder, control: ControlBlock) -> None:
    with worker(run, control) as waiting:
        waiting._attempts.patience_s = 0.1
        time.sleep(0.5)
        assert not failure(waiting)
        with controller(run, control) as bus:
            wait_until(lambda: bool(bus.reports()))


# -- what a key may say --------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_report_of_another_role_than_the_keys_is_dropped_and_counted(
    run: RunFolder, control: ControlBlock
) -> None:
    with controller(run, control) as bus, worker(run, control, says="actor"):
        wait_until(lambda: bus.refusals.counts.get("role", 0) >= 2)
        assert not bus.reports()


@pytest.mark.timeout(60)
def test_an_operator_may_order(run: RunFolder, control: ControlBlock) -> None:
    with controller(run, control) as bus:
        ring_controller(run, control)
        found: list[Report] = []
        wait_until(lambda: Ordered() in (found.extend(bus.reports()) or found))


@pytest.mark.parametrize(
    ("speaker", "report", "allowed"),
    [
        ("operator", Ordered(), True),
        ("operator", heartbeat("reward"), False),
        ("operator", Done(CallResult(call_id="1/2/reward.score", rank=0)), False),
        ("reward", Ordered(), False),
        ("reward", heartbeat("reward"), True),
        ("reward", heartbeat("actor"), False),
        ("reward", Done(CallResult(call_id="1/2/reward.score", rank=0)), True),
        ("reward", Done(CallResult(call_id="1/2/actor.train", rank=0)), False),
        ("reward", Goodbye(role="actor", rank=0, incarnation=1, exit_code=2), False),
        ("", heartbeat("reward"), False),
    ],
)
def test_a_key_speaks_for_its_role(speaker: str, report: Report, allowed: bool) -> None:
    assert may_say(speaker, report) is allowed
